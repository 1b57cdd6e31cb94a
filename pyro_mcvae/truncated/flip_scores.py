"""What the gradient of the joint density says about the moves of discrete states."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_mcvae.truncated.joint import JointRuns, Leaves

__all__ = ["find_flip_scores"]


def find_flip_scores(
    runs: JointRuns, states: list[Tensor | None], count: int
) -> list[Tensor | None]:
    """
    The linearised change of the log joint under each move of some states.

    :param states: for each block, shape ``[E, C, D]``.
    :param count: how many, C.
    :returns: for each block, shape ``[E, C, M]``; None where the model passes no gradient.
    """
    leaves: Leaves = {}
    with torch.enable_grad():
        total = runs.run(states, count, leaves).log_weight
        total = total.masked_fill(~total.detach().isfinite(), 0.0).sum()
    if not leaves or not total.requires_grad:
        return [None] * len(states)
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    by_site = dict(zip(leaves, found, strict=True))
    result: list[Tensor | None] = []
    for layout, at, data_index in zip(runs.layouts.blocks, states, runs.data_index, strict=True):
        if layout is None or at is None or data_index is None:
            result.append(None)
            continue
        gradients: dict[str, Tensor | None] = {}
        for name in layout.sites:
            parts = [g for (n, _), g in by_site.items() if n == name]
            whole = [g for g in parts if g is not None]
            if parts and len(whole) == len(parts):
                gradients[name] = torch.stack(whole) if len(whole) > 1 else whole[0]
        result.append(layout.flip_scores(at, gradients, data_index))
    return result
