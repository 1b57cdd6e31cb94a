"""
The kernels of compiled graphs in one file for the C++ compiler.

Inductor calls the compiler once for each kernel, and each call takes a second for headers and the
linker: 40 of 54 seconds for a chain of five transitions. Together they take six.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["in_one_file"]

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
    found = {kernel.key: f for kernel, f in zip(kernels, made, strict=True)}
    for scope, name, kernel in waiting:
        scope[name] = found[kernel.key]


def _load(kernels: list[_Kernel]) -> list[Callable[..., None]]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    class First(Cache):
        entry_function = "kernel_0"

    library = First.load_async(_file(kernels, Cache.suffix_template), "cpu")()
    key, path = library.__name__.rpartition(".")[0], library.__file__
    found = []
    for i in range(len(kernels)):
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
