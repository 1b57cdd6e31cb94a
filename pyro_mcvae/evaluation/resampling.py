"""Sampling importance resampling: one of several candidates, by their weights."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["choose", "take_chosen"]


def choose(log_weight: Tensor) -> Tensor:
    """The index of one candidate per draw and datum, ``[count, *plates]``."""
    # Where every candidate has weight zero, none is better than another.
    hopeless = log_weight.isneginf().all(1, keepdim=True)
    logits = torch.where(hopeless, 0.0, log_weight)
    noise = -torch.empty_like(logits).exponential_().log()
    return (logits + noise).argmax(1)


def take_chosen(value: Tensor, chosen: Tensor) -> Tensor:
    """Of ``[count * candidates, *plates, ...]`` the chosen ones, ``[count, *plates, ...]``."""
    grouped = value.unflatten(0, (len(chosen), -1))
    index = chosen.unsqueeze(1)
    index = index.reshape(index.shape + (1,) * (grouped.dim() - index.dim()))
    return grouped.gather(1, index.expand(-1, -1, *grouped.shape[2:])).squeeze(1)
