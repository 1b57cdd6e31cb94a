"""Batch and instance normalisation with fixed statistics, for runs beside a step."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch.nn.functional import batch_norm, instance_norm
from torch.overrides import TorchFunctionMode

from pyro_mcvae.programs.types import TorchFunction


class FixedStatistics(TorchFunctionMode):
    """
    Batch normalisation by fixed statistics, which stay as they are.

    Each channel has a mean of its own, so that a dim which is taken for the channels changes the
    result, also in a layer whose statistics are those that it began with.
    """

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func not in (batch_norm, instance_norm):
            return func(*args, **(kwargs or {}))
        call = _bound(func, args, kwargs or {})
        if func is instance_norm:
            if call["use_input_stats"]:
                # By each instance's own statistics, of which none are kept.
                call |= {"running_mean": None, "running_var": None}
            return func(**call)
        call["training"] = False
        x = call["input"]
        mean, variance = call["running_mean"], call["running_var"]
        like = x if mean is None else mean
        shift = torch.linspace(-0.5, 0.5, x.shape[1], dtype=like.dtype, device=like.device)
        call["running_mean"] = shift if mean is None else mean + shift
        call["running_var"] = like.new_ones(x.shape[1]) if variance is None else variance
        return func(**call)


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return of how many numbers a call of ``batch_norm`` takes its statistics, 0 if none."""
    call = _bound(batch_norm, args, kwargs)
    return int(call["input"].numel()) if call["training"] else 0


def _bound(func: TorchFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
