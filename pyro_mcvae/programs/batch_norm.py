"""Batch normalisation while a program is only looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pyro_mcvae.programs.types import TorchFunction

__all__ = ["FixedStatistics"]


class FixedStatistics(TorchFunctionMode):
    """
    Batch normalisation by fixed statistics, which stay as they are.

    They are no data's: each channel has a mean of its own, so that a dim which is taken for the
    channels shows, also in a layer whose statistics are those that it began with.
    """

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is not torch.nn.functional.batch_norm:
            return func(*args, **(kwargs or {}))
        call = {**dict(zip(_BATCH_NORM, args, strict=False)), **(kwargs or {}), "training": False}
        x = call["input"]
        mean, variance = call["running_mean"], call["running_var"]
        like = x if mean is None else mean
        shift = torch.linspace(-0.5, 0.5, x.shape[1], dtype=like.dtype, device=like.device)
        call["running_mean"] = shift if mean is None else mean + shift
        call["running_var"] = like.new_ones(x.shape[1]) if variance is None else variance
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
