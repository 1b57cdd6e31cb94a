"""The log weight of a pair of programs as a density that chains move in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyro_mcvae.chains.kernel import State, finite
from pyro_mcvae.coordinates.gradient import GradientMode
from pyro_mcvae.coordinates.log_weight import Evaluation, LogWeight
from pyro_mcvae.ops.recording import holds
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.run import Run

# A chain that diverges gets no further than this: programs there raise errors of their own (an
# infinite mean, say) for all data at once. Such a state has weight zero, so that it is rejected by
# adjusted kernels and reported by unadjusted ones.
_FAR = 1e6


class ChainDensity:
    r"""
    :math:`(\log \text{base}, \log w)` with their gradients, as a function from positions to states.

    :param LogWeight log_weight: with the gradients that the kernel and the bound ask for, made
        where gradients are enabled if there are any.
    :param bool again: whether to evaluate the first draw again, whose gradients are not those that
        move the chain.
    """

    def __init__(self, log_weight: LogWeight, again: bool = False) -> None:
        self.log_weight = log_weight
        # Forward and reverse moves must follow one gradient: the partial derivatives.
        self._again = again or log_weight.plan.entangled
        self.gradient = log_weight.gradient
        self._full = GradientMode.CHAIN in self.gradient
        # None of vectors that are empty, where a guide draws nothing but what is held.
        moves = log_weight.coordinates.shape[-1] > 0
        self._kernel_gradient = moves and GradientMode.COORDINATES in self.gradient
        self._latest = log_weight.first

    @property
    def runs(self) -> list[Run]:
        """The first and the last evaluation, to name a site that is not finite."""
        return [*self.log_weight.first.sample.runs, *self._latest.sample.runs]

    def start(self) -> State:
        """The first draw."""
        if self._kernel_gradient and self._again:
            return self(self.log_weight.coordinates)
        with torch.set_grad_enabled(bool(self.gradient)):
            state = self._state(self.log_weight.coordinates, self.log_weight.first)
            if not (_may_read(state.position) and _are_finite(state, values=False)):
                state, _ = _mended(state)
            return state

    def __call__(self, position: Tensor) -> State:
        with torch.set_grad_enabled(self._full or self._kernel_gradient):
            if not self._full:
                position = position.detach()
            if self._kernel_gradient and not position.requires_grad:
                position = position.clone().requires_grad_()
            near, reads = position.detach().abs() <= _FAR, _may_read(position)
            all_near = reads and holds(near.all())
            # A tensor of its own: transforms remember what they made of one that they know.
            own = position.view_as(position) if all_near else torch.where(near, position, 0.0)
            state = self._at(position, own)
            # Where no graph is kept nothing but gradients is mended.
            if not (all_near and _are_finite(state, values=self._full)):
                state = self._mended(state, near, reads)
            return state

    def _mended(self, state: State, near: Tensor, reads: bool) -> State:
        """The state without what is not finite, and without what lies too far off."""
        state, regular = _mended(state, near.all(-1))
        if self._full and reads and not holds(regular.all()):
            return self._with_constants(state, regular)
        return state

    def _at(self, position: Tensor, moved: Tensor) -> State:
        self._latest = self.log_weight(moved)
        return self._state(position, self._latest)

    def _with_constants(self, state: State, regular: Tensor) -> State:
        """
        The same state, as a constant at the data where something is not finite.

        A rejected move there would leave 0 * NaN in the gradient of every parameter.
        """
        first, home = self._latest, self.log_weight.coordinates.detach()
        position = torch.where(regular.unsqueeze(-1), state.position, home)
        again, _ = _mended(self._at(position, position))
        self._latest = first
        fields: dict[str, Tensor] = {}
        for name, old in state._asdict().items():
            if old is not None and name != "position":
                where = regular.reshape(regular.shape + (1,) * (old.dim() - regular.dim()))
                fields[name] = torch.where(where, getattr(again, name), old.detach())
        return state._replace(**fields)

    def _state(self, position: Tensor, at: Evaluation) -> State:
        """What the programs say there, finite or not; without a graph that the bound is not for."""
        state = State(position, at.log_base, at.log_weight)
        if self._kernel_gradient:
            state = State(*state[:3], *self.log_weight.gradients(at, self._full))
        if self._full:
            return state
        return State(*(None if t is None else t.detach() for t in state))  # type: ignore[arg-type]


def _may_read(value: Tensor) -> bool:
    """Whether a value may be looked at: it costs nothing, or validation does so anyway."""
    return costs_nothing_to_read(value) or is_validation_enabled()


def costs_nothing_to_read(value: Tensor) -> bool:
    """Whether the host may look at a value without waiting for its device."""
    return not value.is_cuda


def _are_finite(state: State, values: bool) -> bool:
    """Whether gradients, and with ``values`` densities, are finite; sums that overflow are not."""
    with torch.no_grad():
        density = state.log_base + state.log_weight if values else None
        sums = [part.sum() for part in (density, state.grad_joint) if part is not None]
        # isfinite() takes twice the operations.
        return not sums or holds((total := sum(sums[1:], sums[0])) - total == 0)


def _mended(state: State, near: Tensor | None = None) -> tuple[State, Tensor]:
    """
    The state without steps that are not finite, and the data at which it was so already.

    :param near: at which data the position is one where the programs have been run.
    """
    regular = state.log_weight.detach().isfinite() & state.log_base.detach().isfinite()
    if near is not None:
        state = state._replace(log_weight=torch.where(near, state.log_weight, -math.inf))
    gradient = state.grad_joint
    if gradient is not None:
        regular = regular & gradient.detach().isfinite().all(-1)
        parts = {name: getattr(state, name) for name in ("grad_base", "grad_weight")}
        state = state._replace(**{name: finite(part) for name, part in parts.items()})
    return state, regular


@contextmanager
def outside_inference_mode(programs: Programs) -> Iterator[Programs]:
    """Chains differentiate, which inference mode forbids: leave it, with copies of the data."""
    inside = torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inside else nullcontext():
        yield _copied(programs) if inside else programs


def _copied(programs: Programs) -> Programs:
    args, kwargs = tree_map_only(Tensor, Tensor.clone, (programs.args, programs.kwargs))
    return replace(programs, args=args, kwargs=kwargs)
