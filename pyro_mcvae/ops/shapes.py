"""Shapes of tensors."""

from __future__ import annotations

from torch import Tensor


def as_shape(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``value.reshape(shape)``, without a step in the graph where it changes nothing."""
    return value if value.shape == shape else value.reshape(shape)
