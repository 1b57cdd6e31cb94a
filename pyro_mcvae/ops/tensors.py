"""Shapes, trees, random generators and graph helpers of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, cuda, nn

from pyro_mcvae.ops import compat
from pyro_mcvae.ops.compat import TreeSpec

# Shapes of tensors.


def as_shape(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``value.reshape(shape)``, without a node in the graph if the shape is the same."""
    return value if value.shape == shape else value.reshape(shape)


# Trees of tensors in tuples, lists and dicts.

_NESTED = (list, tuple, dict)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, or in nested lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, _NESTED):
        return []
    found: list[Tensor] = []
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, _NESTED):
            found += tensors_in(part)
    return found


@dataclass(frozen=True)
class Tree:
    """A hashable ``TreeSpec``, which has no hash in torch 2.5."""

    spec: TreeSpec

    def __hash__(self) -> int:
        return hash(self.spec.num_leaves)


# The uses at which results of earlier uses are checked.

_EVERY = 1024


def is_due(uses: int) -> bool:
    """
    Return whether an analysis or a recording is checked at this use.

    These are uses 1, 2, 4, ..., 1024, and then every 1024th.

    Example::

        >>> from pyro_mcvae.ops.tensors import is_due
        >>> [uses for uses in range(1, 3000) if is_due(uses)]
        [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    """
    return uses % _EVERY == 0 or (uses < _EVERY and uses & (uses - 1) == 0)


# Guards of recorded steps.


class Guards(list[Tensor]):
    """
    The conditions under which a recording holds.

    :ivar supports: whether they replace Pyro's validation of latents.
    """

    supports = False


# The guards of the steps that are being recorded, the innermost last.
recordings: list[Guards] = []


def is_recording() -> bool:
    """Return whether a step is being recorded, so that periodic checks must not run."""
    return bool(recordings) or (cuda.is_initialized() and cuda.is_current_stream_capturing())


def guard(condition: Tensor) -> bool:
    """
    Return whether a condition holds; while a step is recorded, add it as a guard and return True.

    :param ~torch.Tensor condition: a boolean scalar.

    Example::

        >>> from pyro_mcvae.ops.tensors import guard, recorded_guards
        >>> guard(torch.tensor(1.0) > 2)
        False
        >>> with recorded_guards() as guards:
        ...     guard(torch.tensor(1.0) > 2)
        True
        >>> guards
        [tensor(False)]
    """
    return True if add_guard(condition) else bool(condition)


def guard_finite(value: Tensor) -> bool:
    """Return whether a scalar is finite; add a guard while a step is recorded."""
    return guard(value - value == 0) if recordings else math.isfinite(value.item())


def guard_at_most(value: Tensor, limit: float) -> bool:
    """Return whether a scalar is at most ``limit``; add a guard while a step is recorded."""
    return guard(value <= limit) if recordings else value.item() <= limit


def add_guard(condition: Tensor) -> bool:
    """Add a condition as a guard if a step is being recorded; return whether one is."""
    if recordings:
        recordings[-1].append(condition.detach())
    return bool(recordings)


def fail_if_recording(reason: str) -> None:
    """
    Raise an error if a step is being recorded: the following code cannot be replayed.

    :raises RuntimeError: with the reason; the step then runs uncompiled.
    """
    if recordings:
        raise RuntimeError(reason)


@contextmanager
def recorded_guards(supports: bool = False) -> Iterator[Guards]:
    """Record a step inside; the yielded list receives its guards."""
    guards = Guards()
    guards.supports = supports
    recordings.append(guards)
    try:
        yield guards
    finally:
        recordings.pop()


# Devices: reading tensors without waiting, and moving modules to the device of a tensor.


def costs_nothing_to_read(value: Tensor) -> bool:
    """Return whether the host may read a value without waiting for a device."""
    return value.is_cpu


def read(*numbers: Tensor) -> list[float]:
    """Return tensors of one number as Python's numbers, in one transfer from a device."""
    if costs_nothing_to_read(numbers[0]):
        return [number.item() for number in numbers]
    widest = reduce(torch.promote_types, (n.dtype for n in numbers))
    values: list[float] = torch.stack([n.detach().reshape(()).to(widest) for n in numbers]).tolist()
    return values


def total_norm(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the sum of the tensors' norms, finite only if they are; None if there are none."""
    dense = [compat.stored_entries(t) if t.is_sparse else t.detach() for t in tensors]
    if not dense:
        return None
    widest = reduce(torch.promote_types, {t.dtype for t in dense}, torch.float32)
    return torch.stack(compat.norms(dense, dtype=widest)).sum()


def follow(module: nn.Module, like: Tensor) -> None:
    """
    Move parameters and buffers to the device of a tensor, and to its dtype if that is wider.

    As in :meth:`torch.nn.Module.to`, parameters remain the same objects, so that existing
    optimizers still refer to them.
    """

    def moved(t: Tensor) -> Tensor:
        dtype = torch.promote_types(t.dtype, like.dtype) if t.is_floating_point() else t.dtype
        return t.to(like.device, dtype)

    if any(moved(tensor) is not tensor for tensor in (*module.parameters(), *module.buffers())):
        compat.change_tensors(module, moved)


# The states of PyTorch's generators, to draw the same numbers again.


class Generators:
    """The states of PyTorch's default generators at construction."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda: list[Tensor] = []
        if cuda.is_initialized():
            self._cuda = cuda.get_rng_state_all()

    def put_back(self) -> None:
        """Restore the states, so that the same numbers are drawn again."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            cuda.set_rng_state_all(self._cuda)

    def have_moved(self) -> bool:
        """Return whether numbers were drawn since."""
        now = Generators()
        before, after = [self._cpu, *self._cuda], [now._cpu, *now._cuda]
        with compat.without_torch_function():  # not part of a recorded step
            return [t.numpy().tobytes() for t in before] != [t.numpy().tobytes() for t in after]


# A value with the gradient of another tensor.


def with_gradient_of(value: Tensor, surrogate: Tensor) -> Tensor:
    """
    Return minus a value, with the gradient of minus a surrogate, whose value is not used.

    Example::

        >>> from pyro_mcvae.ops.tensors import with_gradient_of
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> loss = with_gradient_of(torch.tensor(-7.0), x * float("inf") * 0 + 3 * x)
        >>> loss.item()
        7.0
    """
    loss: Tensor = _WithGradientOf.apply(value, surrogate)
    return loss


class _WithGradientOf(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, surrogate: Tensor) -> Tensor:
        return -value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, -gradient.to(ctx.dtype)
