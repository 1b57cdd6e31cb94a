"""Batch normalisation while a program is only looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["FixedStatistics"]


class FixedStatistics(TorchFunctionMode):
    """Batch normalisation by fixed statistics, which stay as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.batch_norm:
            return func(*args, **(kwargs or {}))
        call = {**dict(zip(_BATCH_NORM, args, strict=False)), **(kwargs or {}), "training": False}
        if call["running_mean"] is None or call["running_var"] is None:
            x = call["input"]
            call["running_mean"] = x.new_zeros(x.shape[1])
            call["running_var"] = x.new_ones(x.shape[1])
        return func(**call)


_BATCH_NORM = (
    "input",
    "running_mean",
    "running_var",
    "weight",
    "bias",
    "training",
    "momentum",
    "eps",
)
