"""Whether two ways to compute a step have the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from pyro_mcvae.ops.generators import Generators

# A decision that rounding turns, of a Metropolis test say, makes other numbers now and then.
_ATTEMPTS = 3
# How many roundings of its largest entry an output may be off, and how many times what one rounding
# of every parameter changes in it: a long chain magnifies errors, a sum near zero has large terms.
_ROUNDINGS, _MAGNIFIED = 32, 64
_EVERY = 1024

Pairs = Sequence[tuple[Tensor, Tensor]]


def is_due(uses: int) -> bool:
    """
    Whether a comparison is made at this use: at 1, 2, 4, ... 1024, then at every 1024th.

    Example::

        >>> from pyro_mcvae.compiled.agreement import is_due
        >>> [uses for uses in range(1, 3000) if is_due(uses)]
        [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    """
    return uses % _EVERY == 0 or (uses < _EVERY and uses & (uses - 1) == 0)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal, with NaN at the same entries."""
    return _is_close(found, expected, torch.zeros(()))


def differing(pairs: Pairs, graph: GraphModule, moved: Callable[[], list[Tensor]]) -> list[int]:
    """
    Find the outputs of a graph that another way to compute them does not share, but for rounding.

    :param pairs: each output of the graph, and the other's.
    :param moved: computes the graph's outputs once more, with every parameter rounded otherwise.
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
    """Return the inputs with a rounding error in each parameter; in each input if none is one."""
    known = any(t.requires_grad for t in inputs)
    eps, found = _coarsest(graph), []
    for t in inputs:
        if t.is_floating_point() and (t.requires_grad or not known):
            # The same signs each time, and no random numbers.
            signs = torch.arange(t.numel(), device=t.device).reshape(t.shape).sin().sign()
            t = t.detach() * (1 + eps * signs).to(t.dtype)
        found.append(t)
    return found


def check_kernels(
    run: Callable[..., list[Tensor]], graph: GraphModule, example: list[Tensor]
) -> None:
    """
    Compare compiled kernels with the graph that they were made of, at a few draws.

    :raises RuntimeError: if their numbers are others at each of them.
    """
    begin = Generators()
    for _ in range(_ATTEMPTS):
        again = Generators()
        found = run(*example)
        again.put_back()
        pairs = list(zip(graph(*example), found, strict=True))
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


def _is_close(found: Tensor, expected: Tensor, allowed: Tensor) -> bool:
    """Whether no entry is off by more than allowed; NaN and infinity are at the same entries."""
    if found.shape != expected.shape:
        return False
    found, expected = found.detach().to(expected.dtype), expected.detach()
    same = (found == expected) | (found.isnan() & expected.isnan())
    if expected.is_floating_point() and not bool(same.all()):
        same |= (found - expected).abs() <= allowed
    return bool(same.all())


def _largest(values: Tensor) -> Tensor:
    """The largest finite entry, by which the others are measured."""
    values = values.detach().double().abs()
    values = values.where(values.isfinite(), 0)
    return values.amax() if values.numel() else values.new_zeros(())


def _coarsest(graph: GraphModule) -> float:
    metas = [node.meta.get("tensor_meta") for node in graph.graph.nodes]
    types = {m.dtype for m in metas if isinstance(getattr(m, "dtype", None), torch.dtype)}
    return max((torch.finfo(t).eps for t in types if t.is_floating_point), default=1e-16)
