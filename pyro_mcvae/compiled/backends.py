"""Compile a recorded graph, and check that the compiled step agrees with the recording."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pyro_mcvae.compiled.graph import owns_outputs
from pyro_mcvae.compiled.repeats import Outline, outline
from pyro_mcvae.ops.tensors import Generators
from pyro_mcvae.programs.types import first_line

# Compare two computations of the same step.

# Rounding can flip a decision, such as a Metropolis test; the results then differ occasionally.
_ATTEMPTS = 3
# The allowed error of an output, in roundings of its largest entry; and as a multiple of its change
# if every parameter is rounded differently. Long chains magnify errors, and a sum near zero can
# have
# large terms.
_ROUNDINGS, _MAGNIFIED = 32, 64
_EVERY = 1024

Pairs = Sequence[tuple[Tensor, Tensor]]


def is_due(uses: int) -> bool:
    """
    Return whether this use is compared: uses 1, 2, 4, ... 1024, then every 1024th.

    Example::

        >>> from pyro_mcvae.compiled.backends import is_due
        >>> [uses for uses in range(1, 3000) if is_due(uses)]
        [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    """
    return uses % _EVERY == 0 or (uses < _EVERY and uses & (uses - 1) == 0)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN at the same entries."""
    return _is_close(actual, expected, torch.zeros(()))


def differing(pairs: Pairs, graph: GraphModule, moved: Callable[[], list[Tensor]]) -> list[int]:
    """
    Return the outputs of a graph that differ from another computation by more than rounding.

    :param pairs: each output of the graph, with that of the other computation.
    :param moved: computes the graph's outputs again, with every parameter rounded differently.
    """
    eps = _coarsest(graph)
    allowed = [_ROUNDINGS * eps * _largest(expected) for expected, _ in pairs]
    off = [i for i, (a, b) in enumerate(pairs) if not _is_close(b, a, allowed[i])]
    again = moved() if off else []
    for i in off:
        change = again[i].detach().double() - pairs[i][0].detach().double()
        allowed[i] = _MAGNIFIED * _largest(change)
    return [i for i in off if not _is_close(*pairs[i], allowed[i])]


def perturbed(inputs: list[Tensor], graph: GraphModule) -> list[Tensor]:
    """
    Return the inputs with a rounding error in each parameter, or in each input if there are none.
    """
    known = any(t.requires_grad for t in inputs)
    eps, moved = _coarsest(graph), []
    for t in inputs:
        if t.is_floating_point() and (t.requires_grad or not known):
            # The signs are the same each time, and use no random numbers.
            signs = torch.arange(t.numel(), device=t.device).reshape(t.shape).sin().sign()
            t = t.detach() * (1 + eps * signs).to(t.dtype)
        moved.append(t)
    return moved


def check_kernels(
    run: Callable[..., list[Tensor]], graph: GraphModule, example: list[Tensor]
) -> None:
    """
    Compare compiled kernels with their graph, at a few draws.

    :raises RuntimeError: if the results differ at every draw.
    """
    begin = Generators()
    for _ in range(_ATTEMPTS):
        again = Generators()
        actual = run(*example)
        again.put_back()
        pairs = list(zip(graph(*example), actual, strict=True))
        after = Generators()

        def moved(again: Generators = again) -> list[Tensor]:
            again.put_back()
            outputs: list[Tensor] = graph(*perturbed(example, graph))
            return outputs

        wrong = differing(pairs, graph, moved)
        after.put_back()
        if not wrong:
            begin.put_back()
            return
    raise RuntimeError(
        f"its kernels compute other numbers than the recording, at output {wrong[0]} of "
        f"{len(pairs)}"
    )


def _is_close(actual: Tensor, expected: Tensor, allowed: Tensor) -> bool:
    """
    Return whether all entries are within the tolerance, with NaN and infinity at the same entries.
    """
    if actual.shape != expected.shape:
        return False
    actual, expected = actual.detach().to(expected.dtype), expected.detach()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if expected.is_floating_point() and not bool(same.all()):
        same |= (actual - expected).abs() <= allowed
    return bool(same.all())


def _largest(values: Tensor) -> Tensor:
    """Return the largest finite entry, the scale of the tolerance."""
    values = values.detach().double().abs()
    values = values.where(values.isfinite(), 0)
    return values.amax() if values.numel() else values.new_zeros(())


def _coarsest(graph: GraphModule) -> float:
    metas = [node.meta.get("layout") for node in graph.graph.nodes]
    types = {m.dtype for m in metas if isinstance(getattr(m, "dtype", None), torch.dtype)}
    return max((torch.finfo(t).eps for t in types if t.is_floating_point), default=1e-16)


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
    Compile all kernels of the graphs inside this context together, at its end.

    If this version of PyTorch does not support it, or the file cannot be compiled,
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
        return  # each separately, when it is called
    for scope in scopes:
        scope.update((n, k.run) for n, k in list(scope.items()) if isinstance(k, _Kernel))


def _compile(kernels: list[_Kernel]) -> None:
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    class First(Cache):
        entry_function = "kernel_0"

    long = sum(len(k.source) for k in kernels) > _LONG and (os.cpu_count() or 1) > 1
    files = [kernels[::2], kernels[1::2]] if long else [kernels]
    loads = [First.load_async(_source(file, Cache.suffix_template), "cpu") for file in files]
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


# Run a recorded graph, compiled or not.

_logger = logging.getLogger(__name__)

Run = Callable[..., list[Tensor]]

# Compiling takes about a second per hundred operations: minutes for a larger graph.
_MOST = 5000

_aten = torch.ops.aten
# A call through torch.ops looks up its schema, which takes 1 to 2 of about 5 microseconds.
_OVERLOADS = {
    "Tensor": "add sub mul div pow eq ne lt le gt ge",
    "Scalar": "eq ne lt le gt ge",
    "Tensor_Scalar": "pow",
    "dim_IntList": "sum",
    "dim": "squeeze all any",
    "int": "select transpose",
    "self": "where",
    "default": "abs addmm all cat clone exp expm1 isfinite log log1p mm neg randn randn_like "
    "reciprocal rsqrt sigmoid sqrt stack sum t tanh unsqueeze",
}
_QUICK: dict[object, Callable[..., object]] = {
    getattr(getattr(_aten, name), overload): getattr(torch, name)
    for overload, names in _OVERLOADS.items()
    for name in names.split()
    if hasattr(getattr(_aten, name), overload)
}
_QUICK |= {_aten.expand.default: Tensor.expand, _aten.view.default: Tensor.view}


def quick(graph: GraphModule) -> GraphModule:
    """Return a graph that calls the same kernels in the fastest way."""
    module = GraphModule(torch.nn.Module(), copy.deepcopy(graph.graph))
    for node in module.graph.nodes:
        node.target = _QUICK.get(node.target, node.target)
    module.recompile()
    return module


class Backend:
    """
    Compiles a graph to a function.

    :param str name: ``"eager"``, ``"inductor"`` or another backend of :func:`torch.compile`.
    :param options: of :func:`torch.compile`.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.options = name, options
        self.replays = name == "eager"

    def compile(self, graph: GraphModule, example: list[Tensor]) -> Run:
        """Return the graph's function; the graph itself if the compiler fails, which is logged."""
        if self.replays:
            return quick(graph)
        count = len(graph.graph.nodes)
        begin = time.perf_counter()
        try:
            with torch.no_grad():
                plain = self.name == "inductor" and not self.options
                outlined = outline(graph, example) if plain else None
                if (size := outlined.size if outlined else count) > _MOST:
                    raise RuntimeError(f"to compile {size} operations would take minutes")
                _logger.warning(
                    "compiling a step of %d operations%s once, by %s; training goes on when that "
                    "is done (backend='eager' needs no compiler)",
                    count,
                    f", {size} without those that repeat," if outlined else "",
                    self.name,
                )
                run = self._compile(graph, example, outlined)
        except Exception as error:
            _logger.warning(
                "%s cannot compile the step, which is replayed without a compiler from now on: %s",
                self.name,
                first_line(getattr(error, "inner_exception", error)),
            )
            return quick(graph)
        _logger.warning("compiled in %.1f s", time.perf_counter() - begin)
        return run

    def _compile(self, graph: GraphModule, example: list[Tensor], outlined: Outline | None) -> Run:
        from torch._inductor import config

        plain = self.name == "inductor" and not self.options
        # With the random numbers of PyTorch's operations a compiled step draws those of the plain
        # one. Measured, they cost no more than Inductor's. Before PyTorch 2.13 the pass for
        # locality changes the order of the draws.
        with config.patch({"fallback_random": True, "reorder_for_locality": False}):
            if plain:
                with in_one_file():
                    run = (
                        _driver(outlined, example)
                        if outlined
                        else _unboxed(_inductor(graph, example), contextlib.nullcontext())
                    )
            else:
                compiled = torch.compile(graph, backend=self.name, fullgraph=True, **self.options)

                def run(*inputs: Tensor) -> list[Tensor]:
                    # CUDA graphs write each step's results to the same memory, and the gradients
                    # and weights of a step may be used after the next one.
                    return [output.clone() for output in compiled(*inputs)]

            # torch.compile compiles in the first call.
            generators = Generators()
            outputs = run(*example)
            generators.put_back()
        (output,) = (n for n in graph.graph.nodes if n.op == "output")
        if len(outputs) != len(output.args[0]):
            raise RuntimeError(f"it returns {len(outputs)} of {len(output.args[0])} tensors")
        if plain:
            check_kernels(run, graph, example)
        return run


def _inductor(graph: GraphModule, example: list[Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    kernels: list[Any] = []

    def remembered(*args: Any, **kwargs: Any) -> Any:
        kernels.append(compile_fx_inner(*args, **kwargs))
        return kernels[-1]

    owns = owns_outputs(graph.graph)
    run: Any = compile_fx(graph, list(example), inner_compile=remembered)
    # The wrapper of the compiled function joins views of inputs with their updates.
    # Without any it does nothing, but takes a tenth of the time of a small graph.
    if owns and len(kernels) == 1:
        return getattr(kernels[0], "current_callable", kernels[0])
    return lambda inputs: run(*inputs)


def _driver(outlined: Outline, example: list[Tensor]) -> Run:
    """Return the function of a graph, with each repeated body compiled once."""
    from torch._inductor import config

    def compile(graph: GraphModule, example: list[Tensor], inner: bool) -> Callable[[], Run]:
        with config.patch({n: False for n in _ASSERTS if hasattr(config, n)}):
            call = _inductor(graph, example)
        return lambda: _unboxed(call, _Memory(call) if inner else contextlib.nullcontext())

    driver, layouts = quick(outlined.driver(compile)), _layouts(example)

    def checked(*inputs: Tensor) -> list[Tensor]:
        if _layouts(inputs) != layouts:  # bodies do not check layouts
            raise RuntimeError("an input has another layout than when the step was recorded")
        return driver(*inputs)

    return checked


def _layouts(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(t.shape, t.stride()) for t in tensors]


def _unboxed(
    call: Callable[[list[Tensor]], list[Tensor]], around: contextlib.AbstractContextManager[Any]
) -> Run:
    def run(*inputs: Tensor) -> list[Tensor]:
        with around:
            return call(list(inputs))

    return run


# The layout checks of bodies, which take a tenth of their time. Larger tensors are not kept.
_ASSERTS, _SMALL = ("size_asserts", "alignment_asserts"), 16_384


class _Memory:
    """
    Lets a compiled function reuse its small tensors in each step, because allocating them takes
    half of its time. Its results are not used after the step.
    """

    def __init__(self, call: Callable[..., object]) -> None:
        self._names = getattr(getattr(call, "__func__", call), "__globals__", {})
        self._allocate: Any = self._names.get(_ALLOCATE)
        self._kept: list[Tensor | None] = []

    def __enter__(self) -> None:
        take = iter(self._kept).__next__

        def again(*layout: Any) -> Tensor:
            tensor = take()
            return self._allocate(*layout) if tensor is None else tensor

        if self._allocate is not None:
            self._names[_ALLOCATE] = again if self._kept else self._first

    def _first(self, *layout: Any) -> Tensor:
        tensor: Tensor = self._allocate(*layout)
        self._kept.append(tensor if tensor.nbytes <= _SMALL else None)
        return tensor

    def __exit__(self, error: object, *_: object) -> None:
        if self._allocate is not None:
            self._names[_ALLOCATE] = self._allocate
        if error is not None:
            self._kept.clear()


# The functions that the code generated by Inductor calls.
_ALLOCATE = "empty_strided_cpu"
