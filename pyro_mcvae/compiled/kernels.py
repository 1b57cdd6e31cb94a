"""
The kernels of a compiled graph in one file for the C++ compiler, or in one for each processor.

Inductor calls the compiler once for each kernel, and each call takes a second for headers and the
linker: 40 of 54 seconds for a chain of five transitions. Together they take six.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

# Two files are compiled at a time, where they are so long that their headers do not matter.
_LONG = 100_000

_INCLUDES = """
#include <torch/csrc/inductor/cpp_prefix.h>
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cerrno>
#include <cstdlib>
#include <sstream>
"""
# Each in a namespace of its own; the name that Inductor gives all of them is made another.
_PART = """
namespace part_{i} {{
#define kernel kernel_{i}
{source}
#undef kernel
{binding}
}}
"""


class _Kernel:
    """A kernel that is not compiled yet; if it is called, it is compiled alone."""

    def __init__(self, cache: Any, types: list[str], source: str) -> None:
        self.cache, self.types, self.source = cache, types, source
        self.run: Callable[..., None] | None = None

    def __call__(self, *args: object) -> None:
        if self.run is None:
            self.run = self.cache.load_pybinding(self.types, self.source)
        self.run(*args)


@contextmanager
def in_one_file() -> Iterator[None]:
    """
    Compile the kernels of graphs that are compiled within at the end, together.

    Where this version of PyTorch does not have what it takes, or the file cannot be compiled,
    kernels are compiled one by one, as Inductor does.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    if "{entry_func}" not in getattr(Cache, "suffix_template", ""):
        yield
        return
    load, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    scopes: list[dict[str, Any]] = []

    def load_later(self: AsyncCompile, argtypes: list[str], source_code: str) -> _Kernel:
        return _Kernel(Cache, argtypes, source_code)

    def wait_for_others(self: AsyncCompile, scope: dict[str, Any]) -> None:
        scopes.append(scope)
        wait(self, scope)

    AsyncCompile.cpp_pybinding, AsyncCompile.wait = load_later, wait_for_others  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding, AsyncCompile.wait = load, wait  # type: ignore[method-assign]
    kernels = [k for scope in scopes for k in scope.values() if isinstance(k, _Kernel)]
    if len(kernels) < 2:
        return
    try:
        _compile(kernels)
    except Exception:
        return  # each by itself, when it is called
    for scope in scopes:
        scope.update((n, k.run) for n, k in list(scope.items()) if isinstance(k, _Kernel))


def _compile(kernels: list[_Kernel]) -> None:
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    class First(Cache):
        entry_function = "kernel_0"

    long = sum(len(k.source) for k in kernels) > _LONG and (os.cpu_count() or 1) > 1
    files = [kernels[::2], kernels[1::2]] if long else [kernels]
    loads = [First.load_async(_source(file, Cache.suffix_template), "cpu") for file in files]
    with ThreadPoolExecutor(len(files)) as threads:  # the compiler is another process
        libraries = list(threads.map(lambda load: load(), loads))
    for library, file in zip(libraries, files, strict=True):
        for i, kernel in enumerate(file):
            # One file has the modules of all of them, each with its own function that makes it.
            name = f"{library.__name__.rpartition('.')[0]}.kernel_{i}"
            spec: Any = importlib.util.spec_from_file_location(name, library.__file__)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            kernel.run = getattr(module, f"kernel_{i}")


def _source(kernels: list[_Kernel], template: str) -> str:
    parts = [_INCLUDES]
    for i, kernel in enumerate(kernels):
        types = enumerate(t.replace("const ", "") for t in kernel.types)
        arguments = ", ".join(f"parse_arg<{t}>(args, {n})" for n, t in types)
        binding = template.format(
            arg_len=len(kernel.types),
            call_entry_func=f"kernel_{i}({arguments}); Py_RETURN_NONE;",
            entry_func=f"kernel_{i}",
            extra_parse_arg="",
        )
        parts.append(_PART.format(i=i, source=kernel.source, binding=binding))
    return "".join(parts)
