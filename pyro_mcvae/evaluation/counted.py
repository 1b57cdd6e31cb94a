"""Chains whose transitions are counted as work that is done."""

from __future__ import annotations

from pyro_mcvae.chains.annealing import Transition
from pyro_mcvae.chains.kernel import Info, State, Target
from pyro_mcvae.programs.progress import Progress

__all__ = ["Counted"]


class Counted:
    """Transitions of chains, each of which is so much of the work."""

    def __init__(self, inner: Transition, progress: Progress, amount: float) -> None:
        self.adjusted = inner.adjusted
        self._inner, self._progress, self._amount = inner, progress, amount

    def step(self, state: State, target: Target) -> tuple[State, Info]:
        moved = self._inner.step(state, target)
        self._progress.step(self._amount)
        return moved
