"""
The kernels of compiled graphs in one file for the C++ compiler, or one for each of two processors.

Inductor calls the compiler once for each kernel, and each call takes a second for headers and the
linker: 40 of 54 seconds for a chain of five transitions. Together they take six.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Protocol

__all__ = ["in_one_file", "instructions"]

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


class _Cache(Protocol):
    """What is used of Inductor's cache of compiled kernels."""

    suffix_template: str

    def load_pybinding(self, types: list[str], source: str) -> Callable[..., None]: ...


class _Kernel:
    """A kernel that is not compiled yet; if it is called, it is compiled alone."""

    def __init__(self, types: list[str], source: str, cache: _Cache) -> None:
        self.types, self.source, self._cache = types, source, cache
        self._alone: Callable[..., None] | None = None

    def __call__(self, *args: object) -> None:
        if self._alone is None:
            self._alone = self._cache.load_pybinding(self.types, self.source)
        self._alone(*args)

    @property
    def key(self) -> tuple[object, ...]:
        return (*self.types, self.source)


@contextmanager
def instructions(on_cpu: bool) -> Iterator[Future[dict[str, object]]]:
    """
    Inductor's options by which it trusts the processor's smaller sets of vector instructions.

    It tries the C++ compiler on each of them, for two or three seconds, and takes the largest. A
    compiler that knows the largest knows the others: they are asked for by the same headers. The
    compiler is tried on the largest while graphs are prepared.
    """
    from torch._inductor import compile_fx, config, cpu_vec_isa  # noqa: F401, before the thread

    def find() -> dict[str, object]:
        if not on_cpu or config.cpp.vec_isa_ok is not None:
            return {}
        flags = cpu_vec_isa.x86_isa_checker()
        sets = [s for s in cpu_vec_isa.supported_vec_isa_list if set(str(s).split()) <= {*flags}]
        return {"cpp.vec_isa_ok": True} if sets and bool(sets[0]) else {}

    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(find)


@contextmanager
def in_one_file() -> Iterator[None]:
    """
    Graphs that are compiled within have their kernels compiled at the end, together.

    Where this version of PyTorch does not have what it takes, or the file cannot be compiled,
    kernels are compiled one by one, as ever.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    if "{entry_func}" not in getattr(Cache, "suffix_template", ""):
        yield
        return
    load, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    scopes: list[dict[str, object]] = []

    def load_later(self: AsyncCompile, argtypes: list[str], source_code: str) -> _Kernel:
        return _Kernel(argtypes, source_code, Cache)

    def wait_for_others(self: AsyncCompile, scope: dict[str, object]) -> None:
        scopes.append(scope)
        wait(self, scope)

    AsyncCompile.cpp_pybinding, AsyncCompile.wait = load_later, wait_for_others  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding, AsyncCompile.wait = load, wait  # type: ignore[method-assign]
    _compile(scopes)


def _compile(scopes: list[dict[str, object]]) -> None:
    """Put compiled kernels in the places of those that wait."""
    waiting = [(s, n, k) for s in scopes for n, k in s.items() if isinstance(k, _Kernel)]
    kernels = list({kernel.key: kernel for *_, kernel in waiting}.values())
    if len(kernels) < 2:
        return
    try:
        made = _load(kernels)
    except Exception:
        return  # each by itself, when it is called
    for scope, name, kernel in waiting:
        scope[name] = made[kernel.key]


def _load(kernels: list[_Kernel]) -> dict[tuple[object, ...], Callable[..., None]]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    class First(Cache):
        entry_function = "kernel_0"

    files = _shared_out(kernels)
    loads = [First.load_async(_file(f, Cache.suffix_template), "cpu") for f in files]
    with ThreadPoolExecutor(len(files)) as threads:  # the compiler is another process
        libraries = list(threads.map(lambda load: load(), loads))
    made: dict[tuple[object, ...], Callable[..., None]] = {}
    for library, file in zip(libraries, files, strict=True):
        made |= zip((k.key for k in file), _functions(library, len(file)), strict=True)
    return made


def _shared_out(kernels: list[_Kernel]) -> list[list[_Kernel]]:
    """Kernels for one file, or for two of about the same length."""
    total = sum(len(k.source) for k in kernels)
    if total < _LONG or (os.cpu_count() or 1) < 2:
        return [kernels]
    files: list[list[_Kernel]] = [[], []]
    sizes = [0, 0]
    for kernel in sorted(kernels, key=lambda k: -len(k.source)):
        shorter = sizes.index(min(sizes))
        files[shorter].append(kernel)
        sizes[shorter] += len(kernel.source)
    return files


def _functions(library: ModuleType, count: int) -> list[Callable[..., None]]:
    key, path = library.__name__.rpartition(".")[0], library.__file__
    found = []
    for i in range(count):
        # One file has the modules of all of them, each with its own function that makes it.
        spec = importlib.util.spec_from_file_location(f"{key}.kernel_{i}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(getattr(module, f"kernel_{i}"))
    return found


def _file(kernels: list[_Kernel], template: str) -> str:
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
