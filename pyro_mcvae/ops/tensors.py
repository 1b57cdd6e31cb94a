"""Shapes, trees, random generators and graph helpers of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

# Shapes of tensors.


def as_shape(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``value.reshape(shape)``, without a step in the graph where it changes nothing."""
    return value if value.shape == shape else value.reshape(shape)


# How tensors are put together in tuples, lists and dicts.


@dataclass(frozen=True)
class Tree:
    """A part of a key: a ``TreeSpec`` has no hash in torch 2.5."""

    spec: TreeSpec

    def __hash__(self) -> int:
        return hash(self.spec.num_leaves)


# What code on tensors has to know while a step of it is recorded.

_open: list[list[Tensor]] = []


def is_recording() -> bool:
    """Whether a step is being recorded, so that nothing may be looked at from time to time."""
    return bool(_open) or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def holds(condition: Tensor) -> bool:
    """
    Whether a condition holds; True while a step is recorded, whose replays check it.

    :param ~torch.Tensor condition: one truth value.

    Example::

        >>> from pyro_mcvae.ops.tensors import assumptions, holds
        >>> holds(torch.tensor(1.0) > 2)
        False
        >>> with assumptions() as assumed:
        ...     holds(torch.tensor(1.0) > 2)
        True
        >>> assumed
        [tensor(False)]
    """
    return True if assume(condition) else bool(condition)


def assume(condition: Tensor) -> bool:
    """Assume a condition, if a step is being recorded; whether one is."""
    if _open:
        _open[-1].append(condition.detach())
    return bool(_open)


def refuse(reason: str) -> None:
    """
    Say that what comes now cannot be replayed.

    :raises RuntimeError: with the reason, if a step is being recorded, which then runs uncompiled.
    """
    if _open:
        raise RuntimeError(reason)


@contextmanager
def assumptions() -> Iterator[list[Tensor]]:
    """A step is recorded within; the list fills with what it assumes."""
    found: list[Tensor] = []
    _open.append(found)
    try:
        yield found
    finally:
        _open.pop()


# Where tensors are: what reading them costs, and modules that go where they are.


def costs_nothing_to_read(value: Tensor) -> bool:
    """Whether the host may read a value without waiting for a device."""
    return value.is_cpu


def read(*numbers: Tensor) -> list[float]:
    """Return tensors of one number as Python's numbers, in one transfer from a device."""
    if costs_nothing_to_read(numbers[0]):
        return [number.item() for number in numbers]
    wide = torch.float32 if numbers[0].device.type == "mps" else torch.float64
    found: list[float] = torch.stack([n.detach().reshape(()).to(wide) for n in numbers]).tolist()
    return found


def follow(module: nn.Module, like: Tensor) -> None:
    """
    Move parameters and buffers to the device of a tensor, and to its dtype if that is wider.

    Parameters stay the same objects, as in :meth:`torch.nn.Module.to`, so that an optimizer that
    holds them goes on with them.
    """

    def moved(own: Tensor) -> Tensor:
        dtype = torch.promote_types(own.dtype, like.dtype) if own.is_floating_point() else own.dtype
        return own.to(like.device, dtype)

    if any(moved(own) is not own for own in (*module.parameters(), *module.buffers())):
        module._apply(moved)


# PyTorch's generators: to draw the same numbers once more.


class Generators:
    """PyTorch's default generators as they are when this is made, to be put back."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda: list[Tensor] = []
        if torch.cuda.is_initialized():
            self._cuda = torch.cuda.get_rng_state_all()

    def put_back(self) -> None:
        """Draw the same numbers once more."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def have_moved(self) -> bool:
        """Whether numbers were drawn since."""
        now = Generators()
        before, after = [self._cpu, *self._cuda], [now._cpu, *now._cuda]
        with torch._C.DisableTorchFunction():  # no number of the step, if that is recorded
            return [t.numpy().tobytes() for t in before] != [t.numpy().tobytes() for t in after]


# A value with the gradient of another tensor; what is done after a backward pass.


def with_gradient_of(value: Tensor, surrogate: Tensor) -> Tensor:
    """
    Return a loss with the gradient of minus a surrogate, whatever the surrogate's own value is.

    Example::

        >>> from pyro_mcvae.ops.tensors import with_gradient_of
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
