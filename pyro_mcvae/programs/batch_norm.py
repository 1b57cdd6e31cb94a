"""Batch normalisation, and that of instances, while a program is only looked at."""

from __future__ import annotations

from contextlib import ExitStack
from inspect import signature
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, instance_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from pyro_mcvae.programs.types import TorchFunction

__all__ = ["FixedStatistics", "batch_size"]


class FixedStatistics(TorchFunctionMode):
    """
    Batch normalisation by fixed statistics, which stay as they are.

    They are no data's: each channel has a mean of its own, so that a dim which is taken for the
    channels shows, also in a layer whose statistics are those that it began with. Nor are batches
    counted, by which layers with ``momentum=None`` weigh the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counters = ExitStack()

    def __enter__(self) -> FixedStatistics:
        counts, thread = list[Tensor | None](), get_ident()

        def before(module: nn.Module, args: object) -> None:
            if isinstance(module, _BatchNorm) and get_ident() == thread:
                count = module.num_batches_tracked
                counts.append(None if count is None else count.clone())

        def after(module: nn.Module, args: object, result: object) -> None:
            if isinstance(module, _BatchNorm) and get_ident() == thread:
                count = counts.pop()
                if count is not None and module.num_batches_tracked is not None:
                    module.num_batches_tracked.copy_(count)

        self._counters.enter_context(register_module_forward_pre_hook(before))
        self._counters.enter_context(register_module_forward_hook(after, always_call=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._counters.close()
        super().__exit__(*error)

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
    """How many numbers a call of ``batch_norm`` takes its statistics of; 0 if they are given."""
    call = _bound(batch_norm, args, kwargs)
    return int(call["input"].numel()) if call["training"] else 0


def _bound(func: TorchFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
