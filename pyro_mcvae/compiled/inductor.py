"""Compile a graph by Inductor, with as little time outside its kernels as possible."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import textwrap
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor
from torch.fx import GraphModule

from pyro_mcvae.compiled.graph import owns_outputs, quick
from pyro_mcvae.compiled.repeats import Outline
from pyro_mcvae.ops import compat

Run = Callable[..., list[Tensor]]
_Call = Callable[[list[Tensor]], list[Tensor]]


def compile_by_inductor(graph: GraphModule, example: list[Tensor], outlined: Outline | None) -> Run:
    """Return the function of a graph, with the bodies of its outline compiled once."""

    def compile(graph: GraphModule, example: list[Tensor]) -> Callable[[], Run]:
        with compat.inductor_options(dict.fromkeys(_ASSERTS, False), where_known=True):
            call = _inductor(graph, example)
        return lambda: _with_memory(call)

    with in_one_file():
        if outlined:
            step: Run = quick(outlined.driver(compile)).forward
        else:
            step = compile(graph, example)()
    layouts = _layouts(example)

    def run(*inputs: Tensor) -> list[Tensor]:
        if _layouts(inputs) != layouts:  # the kernels do not check layouts
            raise RuntimeError("an input has another layout than when the step was recorded")
        # The next step overwrites the memory.
        return [t.clone() if _is_small(t) else t for t in step(*inputs)]

    return run


def _layouts(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(t.shape, t.stride()) for t in tensors]


def _inductor(graph: GraphModule, example: list[Tensor]) -> _Call:
    owns = owns_outputs(graph.graph)
    run, kernels = compat.inductor_kernels(graph, example)
    # The wrapper of the compiled function joins views of inputs with their updates.
    # Without any it does nothing, but takes a tenth of the time of a small graph.
    if owns and len(kernels) == 1:
        return cast("_Call", kernels[0])
    return lambda inputs: run(*inputs)


# The layout checks of kernels, which take a tenth of their time. Larger tensors are not kept.
_ASSERTS, _SMALL = ("size_asserts", "alignment_asserts"), 16_384
# The functions that make tensors in the code that Inductor generates.
_ALLOCATE, _VIEW = "empty_strided_cpu", "reinterpret_tensor"


def _with_memory(call: _Call) -> Run:
    """
    Return a compiled function that reuses its small tensors in each step.

    To allocate tensors and their views takes most of the time of a small graph. Therefore these
    statements of the generated code are evaluated once, and the others in each call. The results
    of a call are overwritten by the next one.
    """
    evaluated = None

    def run(*inputs: Tensor) -> list[Tensor]:
        nonlocal evaluated
        if evaluated is None:  # when the function is made, its kernels are not compiled yet
            evaluated = _evaluated(getattr(call, "__func__", call)) or call
        return evaluated(list(inputs))

    return run


def _evaluated(function: Any) -> _Call | None:
    """Return generated code without the statements that make small tensors, if it is known."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(definition, ast.FunctionDef):
        return None
    names, kept, remaining = dict(function.__globals__), dict[str, Tensor](), list[ast.stmt]()
    for statement in definition.body:
        match statement:
            case ast.Assign([ast.Name(name)], value) if _keeps_memory(value, kept):
                tensor = eval(ast.unparse(value), names, kept)
                if _is_small(tensor):
                    kept[name] = tensor
                else:
                    remaining.append(statement)
            case ast.Delete([ast.Name(name)]) if name in kept:
                pass
            case ast.Assign() | ast.Expr() | ast.Delete() | ast.Return():
                remaining.append(statement)
            case _:
                return None
    code = "\n    ".join(["def call(args):", *map(ast.unparse, remaining)])
    exec(code, names | kept, scope := dict[str, Any]())
    return cast("_Call", scope["call"])


def _is_small(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.untyped_storage().nbytes() <= _SMALL


def _keeps_memory(value: ast.expr, kept: Container[str]) -> bool:
    """Return whether an expression allocates a tensor, or is a kept tensor or a view of one."""
    match value:
        case ast.Name(name):
            return name in kept
        case ast.Call(ast.Name(name), [first, *_]):
            return name == _ALLOCATE or (name == _VIEW and _keeps_memory(first, kept))
    return False


# Compile the kernels of a graph in one C++ file, or in one file per processor.

# Two files are compiled in parallel if they are much longer than their headers.
_LONG = 100_000

_INCLUDES = """
#include <torch/csrc/inductor/cpp_prefix.h>
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cerrno>
#include <cstdlib>
#include <sstream>
"""
# Each kernel gets a separate namespace, and another name than Inductor gives all of them.
_PART = """
namespace part_{i} {{
#define kernel kernel_{i}
{source}
#undef kernel
{binding}
}}
"""


class _Kernel:
    """A kernel that is not compiled yet. If it is called, it is compiled separately."""

    def __init__(self, types: list[str], source: str) -> None:
        self.types, self.source = types, source
        self.run: Callable[..., None] | None = None

    def __call__(self, *args: object) -> None:
        if self.run is None:
            self.run = compat.kernel_cache().load_pybinding(self.types, self.source)
        self.run(*args)


@contextmanager
def in_one_file() -> Iterator[None]:
    """
    Compile all kernels of the graphs inside this context together, at its end.

    If this version of PyTorch does not support it, or the file cannot be compiled,
    kernels are compiled one by one, as Inductor does.
    """
    if "{entry_func}" not in getattr(compat.kernel_cache(), "suffix_template", ""):
        yield
        return
    with compat.deferred_kernels(_Kernel) as scopes:
        yield
    kernels = [k for scope in scopes for k in scope.values() if isinstance(k, _Kernel)]
    if len(kernels) < 2:
        return
    try:
        _compile(kernels)
    except Exception:
        return  # each separately, when it is called
    for scope in scopes:
        scope.update((n, k.run) for n, k in list(scope.items()) if isinstance(k, _Kernel))


def _compile(kernels: list[_Kernel]) -> None:
    cache = compat.kernel_cache()

    class First(cache):  # type: ignore[misc, valid-type]
        entry_function = "kernel_0"

    long = sum(len(k.source) for k in kernels) > _LONG and (os.cpu_count() or 1) > 1
    files = [kernels[::2], kernels[1::2]] if long else [kernels]
    loads = [First.load_async(_source(file, cache.suffix_template), "cpu") for file in files]
    with ThreadPoolExecutor(len(files)) as threads:  # the compiler runs in another process
        libraries = list(threads.map(lambda load: load(), loads))
    for library, file in zip(libraries, files, strict=True):
        for i, kernel in enumerate(file):
            # One file has the modules of all kernels, each with a separate init function.
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
