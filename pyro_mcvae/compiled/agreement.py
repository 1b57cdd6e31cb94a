"""Whether two ways to compute a step have the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule

from pyro_mcvae.ops.generators import Generators

__all__ = ["check_kernels", "is_close"]

# A decision that rounding turns, of a Metropolis test say, makes other numbers now and then.
_ATTEMPTS = 3


def is_close(found: Tensor, expected: Tensor, tolerance: float | None = None) -> bool:
    """
    Whether two tensors are the same but for rounding.

    :param tolerance: how much of their norm may be rounding; by default by their type, for the same
        operations in the same order.
    """
    if found.shape != expected.shape:
        return False
    found, expected = found.detach().to(expected.dtype), expected.detach()
    if not expected.is_floating_point():
        return bool((found == expected).all())
    if tolerance is None:
        # Rounding, which a long chain magnifies.
        tolerance = 64 * torch.finfo(expected.dtype).eps ** 0.75
    error, size = (found - expected).norm(), expected.norm()
    return bool((error <= tolerance * (1 + size)) | ~(error + size).isfinite())


def check_kernels(
    run: Callable[..., list[Tensor]], graph: GraphModule, example: list[Tensor]
) -> None:
    """
    Compare compiled kernels with the graph that they were made of, at a few draws.

    :raises RuntimeError: if their numbers are others at each of them.
    """
    # Sums in another order: of the gradients of five Metropolis transitions in single precision up
    # to a thousandth is rounding.
    begin, tolerance = Generators(), 32 * _coarsest(graph) ** 0.5
    for _ in range(_ATTEMPTS):
        again = Generators()
        found = run(*example)
        again.put_back()
        pairs = list(zip(found, graph(*example), strict=True))
        wrong = [i for i, (a, b) in enumerate(pairs) if not is_close(a, b, tolerance)]
        if not wrong:
            break
    else:
        raise RuntimeError(
            f"its kernels compute other numbers than the recording, at output {wrong[0]} of "
            f"{len(pairs)}"
        )
    begin.put_back()


def _coarsest(graph: GraphModule) -> float:
    metas = [node.meta.get("tensor_meta") for node in graph.graph.nodes]
    types = {m.dtype for m in metas if isinstance(getattr(m, "dtype", None), torch.dtype)}
    return max((torch.finfo(t).eps for t in types if t.is_floating_point), default=1e-16)
