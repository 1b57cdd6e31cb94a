"""Steps from one value of a discrete entry to another, by which states near others are proposed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["draw_steps", "log_step"]


def draw_steps(values: Tensor, sizes: Tensor, ordinal: Tensor) -> Tensor:
    r"""
    Another value of each entry.

    Where values have no order, a uniform one. A count goes up or down, each with probability 1/2
    where both ways lead to a value, by a distance

    .. math:: P(j) = \log \frac{j + 1}{j} / \log(m + 1), \quad j = 1, \dots, m,

    with m the farthest value: all scales of distance have about the same chance, so that counts
    without an upper bound are proposed near those that are likely, and every other may be.

    :param values: int64, shape ``[..., D]``.
    :param sizes: how many values each entry has, ``[D]``.
    :param ordinal: which entries are counts, ``[D]``.
    :returns: of that shape; the same value where an entry has one only.
    """
    uniform = torch.rand(values.shape, device=values.device)
    step = torch.minimum(1 + (uniform * (sizes - 1)).long(), sizes - 1)
    other = (values + step) % sizes
    if not bool(ordinal.any()):
        return other
    above = sizes - 1 - values
    farthest = torch.maximum(above, values)
    distance = (farthest + 1).double().pow(uniform).long()
    distance = torch.minimum(distance.clamp_min(1), farthest)
    up = torch.rand(values.shape, device=values.device) < 0.5
    up = (up & (distance <= above)) | (distance > values)
    return torch.where(ordinal, values + torch.where(up, distance, -distance), other)


def log_step(begun: Tensor, reached: Tensor, size: int, ordinal: bool) -> Tensor | float:
    """
    The log probability of :func:`draw_steps` for one entry, where the two values differ.

    :param begun: int64, and ``reached`` likewise; they broadcast.
    """
    if not ordinal:
        return -math.log(size - 1)
    above = size - 1 - begun
    distance = (reached - begun).abs().clamp_min(1)
    # The other way does not lead to a value.
    alone = distance > torch.where(reached > begun, begun, above)
    chance = (1 / distance).log1p() / torch.maximum(above, begun).log1p()
    return chance.log() - math.log(2) * ~alone
