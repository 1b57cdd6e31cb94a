"""The parameters behind a loss, and their gradients before the hooks on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, has_proxy_slot

__all__ = ["gradients_of", "has_hooks", "is_recorded", "leaves_of"]


def has_hooks(leaf: Tensor) -> bool:
    """Whether something is called with the gradient of a parameter, or after it was accumulated."""
    after = getattr(leaf, "_post_accumulate_grad_hooks", None)
    return bool(leaf._backward_hooks or after)


def gradients_of(
    loss: Tensor, leaves: list[Tensor], gradient: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """The gradients of parameters, as they are before hooks; None where there is none."""
    with _without_hooks(leaves):
        return torch.autograd.grad(loss, leaves, gradient, retain_graph=True, allow_unused=True)


@contextmanager
def _without_hooks(leaves: list[Tensor]) -> Iterator[None]:
    held = [leaf._backward_hooks for leaf in leaves]
    for leaf in leaves:
        leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, hooks in zip(leaves, held, strict=True):
            leaf._backward_hooks = hooks


def is_recorded(tensor: Tensor) -> bool:
    """Whether a tensor is made by the step that is being recorded."""
    mode = get_proxy_mode()
    return mode is not None and has_proxy_slot(tensor, mode.tracer)


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The parameters behind a loss, in the order of their discovery."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and not is_recorded(variable):
            yield variable
        waiting += [following for following, _ in node.next_functions]
