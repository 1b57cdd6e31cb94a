"""Whether two log densities, entry by entry, differ by more than rounding."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["far_apart"]

# Runs of other shapes use other kernels, which add in another order.
_ROUNDING, _HALF = 2**12, 4
# Where programs compute in half precision, or iterate to a tolerance: relative to how much the
# entries differ among themselves.
_OF_SPREAD = 1e-3


def far_apart(found: Tensor, expected: Tensor) -> Tensor:
    """
    Return which entries of two log densities differ by more than rounding.

    The scale of an entry's rounding is the entry itself; that of a solver's or a network's in half
    precision the spread of the entries. Where a density is infinite or NaN rounding decides which.
    """
    try:
        found, expected = torch.broadcast_tensors(found.detach(), expected.detach())
    except RuntimeError:
        return torch.ones_like(expected, dtype=torch.bool)
    both = found.isfinite() & expected.isfinite()
    found, expected = torch.where(both, found, 0.0), torch.where(both, expected, 0.0)
    if not expected.numel():
        return torch.zeros_like(expected, dtype=torch.bool)
    spread = (expected.max() - expected.min()) * _OF_SPREAD
    # Under autocast the networks' numbers are those of a shorter type.
    shorter = torch.is_autocast_enabled(found.device.type)
    precision = torch.finfo(torch.bfloat16 if shorter else found.dtype).eps
    allowed = (_HALF if shorter else _ROUNDING) * precision * expected.abs().clamp(min=1.0) + spread
    return (found - expected).abs() > allowed
