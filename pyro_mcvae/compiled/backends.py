"""Compile a recorded graph, and check that the compiled step agrees with the recording."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from pyro_mcvae.compiled.graph import quick
from pyro_mcvae.compiled.inductor import Run, compile_by_inductor
from pyro_mcvae.compiled.repeats import Outline, outline
from pyro_mcvae.ops.compat import (
    PUBLIC_ONLY,
    RANDOM_NUMBERS,
    inductor_options,
    storage_key,
    torch_compiled,
    tree_leaves,
    tree_map_only,
)
from pyro_mcvae.ops.tensors import Generators
from pyro_mcvae.programs.types import first_line

# Compare two computations of the same step.

# Rounding can flip a decision, such as a Metropolis test; the results then differ occasionally.
_ATTEMPTS = 3
# The allowed error of an output, in roundings of its largest entry; and as a multiple of its change
# if every parameter is moved by as many, and every intermediate result by two. Long chains magnify
# errors, and a sum near zero can have large terms. A sum of n terms in another order is off by up
# to about sqrt(n) roundings. Decisions between near ties, such as which states are the best, are
# counted instead.
_ROUNDINGS, _MAGNIFIED, _ROUNDINGS_OF_RESULTS = 32, 2, 2
# The errors of two results can cancel by chance: the largest change of so many runs counts.
_MOVES = 3

Pairs = Sequence[tuple[Tensor, Tensor]]


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN at the same entries."""
    return _is_close(actual, expected, torch.zeros(()))


def differing(pairs: Pairs, graph: GraphModule, moved: Callable[[int], list[Tensor]]) -> list[int]:
    """
    Return the outputs of a graph that differ from another computation by more than rounding.

    :param pairs: each output of the graph, with that of the other computation.
    :param moved: computes the graph's outputs again with other roundings, for a number that
        chooses them: see :func:`moved_outputs`.
    """
    layouts = [n.meta["layout"] for n in graph.graph.nodes if "layout" in n.meta]
    largest, eps = max((math.prod(v.shape) for v in layouts), default=1), _coarsest(graph)

    def error(expected: Tensor) -> Tensor:
        num_terms = largest / max(expected.numel(), 1)
        return max(_ROUNDINGS, math.sqrt(num_terms)) * eps * _largest(expected)

    allowed = [error(expected) for expected, _ in pairs]
    off = [i for i, (a, b) in enumerate(pairs) if not _is_close(b, a, allowed[i])]
    again = [moved(i) for i in range(_MOVES)] if off else []
    return [i for i in off if not _is_magnified(*pairs[i], [outputs[i] for outputs in again])]


def _is_magnified(expected: Tensor, actual: Tensor, moved: list[Tensor]) -> bool:
    """Return whether an output changes about as much with other intermediate roundings."""
    if expected.is_floating_point() or actual.shape != expected.shape:
        changes = [_largest(m.detach().double() - expected.detach().double()) for m in moved]
        return _is_close(actual, expected, _MAGNIFIED * max(changes))
    changed = max((m != expected).sum() for m in moved)
    return bool((actual != expected).sum() <= _MAGNIFIED * changed)


def moved_outputs(graph: GraphModule, inputs: list[Tensor], seed: int) -> list[Tensor]:
    """
    Compute the outputs of a graph with an error in each parameter and each intermediate result.

    If there are no parameters, each input has an error.

    :param seed: chooses the signs of the errors.
    """
    run, nodes = _Rounded(graph, seed), graph.graph.find_nodes(op="placeholder")
    trained = [not node.meta.get("stored", True) for node in nodes]
    pairs = zip(inputs, trained, strict=True)
    moved = [run.moved(t, _ROUNDINGS) if p or not any(trained) else t for t, p in pairs]
    outputs: list[Tensor] = run.run(*moved)
    return outputs


class _Rounded(Interpreter):
    """Runs a graph with an error in each result, such as other kernels may have."""

    def __init__(self, graph: GraphModule, seed: int) -> None:
        super().__init__(graph)
        # The program's own generators do not advance.
        self._eps, self._signs = _coarsest(graph), torch.Generator().manual_seed(seed)

    def moved(self, values: Tensor, roundings: int) -> Tensor:
        """Return values with an error of some roundings; masks, counts and indices are exact."""
        if not values.is_floating_point():
            return values
        whole = (values == values.round()) & (values.abs() < 1 / self._eps)
        if bool(whole.all()):
            return values
        signs = torch.empty(values.shape).bernoulli_(0.5, generator=self._signs) * 2 - 1
        error = signs.double().mul(roundings * self._eps).to(values.device)
        return values * (1 + error).to(values.dtype)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        known = {storage_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}

        def rounded(value: Tensor) -> Tensor:
            # A view, and a tensor that was written to, have the errors that they were made with.
            is_new = storage_key(value) not in known
            return self.moved(value, _ROUNDINGS_OF_RESULTS) if is_new else value

        return tree_map_only(Tensor, rounded, result)


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

        def moved(seed: int, again: Generators = again) -> list[Tensor]:
            again.put_back()
            return moved_outputs(graph, example, seed)

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


# Run a recorded graph, compiled or not.

_logger = logging.getLogger(__name__)

# Compiling takes about a second per hundred operations: minutes for a larger graph.
_MOST = 5000


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
            return quick(graph).forward
        count = len(graph.graph.nodes)
        begin, generators = time.perf_counter(), Generators()
        try:
            with torch.enable_grad():  # as in replays
                plain = self.name == "inductor" and not self.options
                outlined = outline(graph, example) if plain and not PUBLIC_ONLY else None
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
            generators.put_back()
            _logger.warning(
                "%s cannot compile the step, which is replayed without a compiler from now on: %s",
                self.name,
                first_line(getattr(error, "inner_exception", error)),
            )
            return quick(graph).forward
        _logger.warning("compiled in %.1f s", time.perf_counter() - begin)
        return run

    def _compile(self, graph: GraphModule, example: list[Tensor], outlined: Outline | None) -> Run:
        plain = self.name == "inductor" and not self.options
        with inductor_options(RANDOM_NUMBERS):
            if plain and not PUBLIC_ONLY:
                run = compile_by_inductor(graph, example, outlined)
            else:
                compiled = torch_compiled(graph, self.name, self.options)

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
