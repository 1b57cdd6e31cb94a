"""A value with the gradient of another tensor; what is done after a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_gradient_of(value: Tensor, surrogate: Tensor) -> Tensor:
    """
    Return a loss with the gradient of minus a surrogate, whatever the surrogate's own value is.

    Example::

        >>> from pyro_mcvae.ops.autograd import with_gradient_of
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> loss = with_gradient_of(torch.tensor(7.0), x * float("inf") * 0 + 3 * x)
        >>> loss.item()
        7.0
    """
    found: Tensor = _WithGradientOf.apply(value, surrogate)
    return found


class _WithGradientOf(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, surrogate: Tensor) -> Tensor:
        return value.detach().clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, -gradient.to(ctx.dtype)


def after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is going on, whose errors it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
