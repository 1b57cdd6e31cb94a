"""Whether two log densities differ by more than rounding."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["beyond_rounding", "is_close", "moved"]

# Relative to a density in each precision.
_TOLERANCE = {torch.float64: 1e-6}
_SINGLE = 2e-3
# Runs of other shapes round in other ways, most where a network computes in half precision or a
# solver stops at a tolerance: as if the latents had moved by so much.
_ROUNDING = {torch.float64: 1e-4}
_SINGLE_ROUNDING = 0.02


def moved(value: Tensor) -> Tensor:
    """A latent that differs by rounding."""
    if not value.is_floating_point():
        return value
    return value * (1 + _ROUNDING.get(value.dtype, _SINGLE_ROUNDING))


def beyond_rounding(found: Tensor, expected: Tensor, elsewhere: Tensor | None) -> bool:
    """
    Whether a density differs by more than rounding would make it.

    :param elsewhere: the expected density at latents that were :func:`moved`.
    """
    if elsewhere is None or elsewhere.shape != expected.shape:
        return True
    rounding, difference = (elsewhere - expected).abs(), (found - expected).abs()
    return not bool((difference <= 2 * rounding.max()).all())


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two log densities are equal to rounding, where both are finite."""
    try:
        found, expected = torch.broadcast_tensors(found.detach(), expected.detach())
    except RuntimeError:
        return True  # not comparable
    # Where a density is infinite or NaN (the step says so itself), rounding decides which.
    both = found.isfinite() & expected.isfinite()
    found, expected = torch.where(both, found, 0.0), torch.where(both, expected, 0.0)
    tolerance = _TOLERANCE.get(found.dtype, _SINGLE)
    allowed = tolerance * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
    return torch.allclose(found, expected, rtol=tolerance, atol=allowed)
