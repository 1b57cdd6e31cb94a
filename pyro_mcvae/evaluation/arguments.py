"""The arguments of a pair of programs, made of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["as_arguments"]


def as_arguments(batch: Any, device: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """
    Positional and keyword arguments: those of a tuple or a list, of a mapping, or a single one.

    :param device: where to move the tensors, if anywhere.
    """
    if device is not None:
        batch = tree_map_only(Tensor, lambda t: t.to(device), batch)
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})
