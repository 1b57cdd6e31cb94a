"""The transitions of an evaluator: a kernel and a schedule, adapted once and then frozen."""

from __future__ import annotations

import copy
from typing import Literal, get_args

import torch
from torch import Tensor

from pyro_mcvae.chains.annealing import Transition, anneal
from pyro_mcvae.chains.hmc import HMC
from pyro_mcvae.chains.kernel import Info, Kernel, State, Target
from pyro_mcvae.chains.schedules import Schedule, as_schedule
from pyro_mcvae.chains.step_size import AdaptiveStepSize
from pyro_mcvae.checks.angles import is_circular
from pyro_mcvae.compiled.transition import RecordedTransition
from pyro_mcvae.coordinates.chain_checks import named
from pyro_mcvae.coordinates.chain_density import ChainDensity
from pyro_mcvae.coordinates.coordinate import Coordinates
from pyro_mcvae.coordinates.whitened import WhitenedDensity, Whitening
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.progress import Progress


class Counted:
    """Transitions of chains, each of which is so much of the work."""

    def __init__(self, inner: Transition, progress: Progress, amount: float) -> None:
        self.adjusted = inner.adjusted
        self._inner, self._progress, self._amount = inner, progress, amount

    def step(self, state: State, target: Target) -> tuple[State, Info]:
        moved = self._inner.step(state, target)
        self._progress.step(self._amount)
        return moved


EvaluatorCoordinates = Literal["noise", "latent", "whitened"]

# Where a kernel is given without a schedule.
DEFAULT_STEPS = 10
# What a user who gave them leaves out, where the latents cannot be moved.
LEAVE_OUT = "leave out schedule and kernel, so that importance sampling weighs them"
# From how many transitions on a recording pays.
_LONG = 50
# Relative step of the adaptation in the first and in the second half of a warm-up.
_RATES = 0.3, 0.1


class Annealing:
    """
    A kernel along a schedule.

    Both are copies, so that an evaluation changes nothing of the user's.

    :param int warmup: chains that an adaptive step size is adapted with before the evaluation.
    :param str without: how the user does without chains, where the latents cannot be moved.
    :ivar whitens: whether white coordinates are to be found; ``whitening`` is what was found.
    """

    whitening: Whitening | None = None

    def __init__(
        self,
        kernel: Kernel,
        schedule: Schedule,
        coordinates: EvaluatorCoordinates,
        warmup: int,
        without: str,
    ) -> None:
        with torch.inference_mode(False):  # a step size that adapts is changed in place
            self.kernel = copy.deepcopy(kernel)
            self.betas = schedule().detach().clone()
        self.whitens = coordinates == "whitened"
        self.coordinates: Coordinates = "noise" if coordinates == "whitened" else coordinates
        self._recorded: RecordedTransition | None = None
        self.warmup = warmup
        self.without = without
        step_size = self.kernel.step_size
        self._chooses = isinstance(step_size, AdaptiveStepSize) and step_size.per_coordinate is None
        self.use(self.coordinates)

    def transition(self, programs: Programs, count: int | None = None) -> Transition:
        """
        What moves the chains: the kernel; for many transitions recorded once and replayed.

        :param count: how many there will be, if not those along the schedule.
        """
        if (self.num_steps if count is None else count) < _LONG:
            return self.kernel
        if self._recorded is None:
            self._recorded = RecordedTransition(self.kernel, (programs.model, programs.guide))
        return self._recorded

    def use(self, coordinates: Coordinates) -> None:
        """Move other coordinates; must come before the warm-up."""
        self.coordinates, self._recorded = coordinates, None
        if self._chooses:
            self.kernel.step_size.per_coordinate = coordinates == "latent"  # type: ignore[assignment]

    @property
    def num_steps(self) -> int:
        return len(self.betas) - 1

    @property
    def adapts(self) -> bool:
        """Whether the step size is still to be found."""
        step_size = self.kernel.step_size
        return isinstance(step_size, AdaptiveStepSize) and step_size.training and self.warmup > 0

    def adapt(self, turn: int, acceptance: Tensor, gradient: Tensor | None) -> None:
        """Learn from one chain of the warm-up, if there is something to learn."""
        step_size = self.kernel.step_size
        if not isinstance(step_size, AdaptiveStepSize):
            return
        step_size.rate = _RATES[0] if turn < self.warmup // 2 else _RATES[1]
        step_size.update(acceptance, gradient)

    def freeze(self) -> None:
        """From here on every chain is the same, which an unbiased estimate needs."""
        self.kernel.eval()


def make_annealing(
    schedule: Schedule | Tensor | int | None,
    kernel: Kernel | None,
    coordinates: EvaluatorCoordinates,
    warmup: int,
    without: str = LEAVE_OUT,
) -> Annealing | None:
    """
    An :class:`Annealing` of what a user gave; None if that is nothing.

    :param str without: as in :class:`Annealing`.
    :raises ValueError: for what is no kernel or schedule.
    """
    if kernel is not None and not isinstance(kernel, Kernel):
        raise ValueError(f"kernel must be a Kernel such as HMC(), got {kernel!r}")
    if coordinates not in get_args(EvaluatorCoordinates):
        raise ValueError(
            f"coordinates must be 'noise', 'latent' or 'whitened', got {coordinates!r}"
        )
    warmup = check_count("warmup", warmup, int(coordinates == "whitened"))
    if schedule is None and kernel is None:
        return None
    schedule = as_schedule(schedule, DEFAULT_STEPS if schedule is None else None)
    with torch.inference_mode(False):
        kernel = HMC() if kernel is None else kernel
    return Annealing(kernel, schedule, coordinates, warmup, without)


# Chains for each coordinate, and the fewest and the most of a weight.
_PER_COORDINATE, _FEWEST, _MOST = 2, 50, 1000
# Transitions between two looks at the population.
MOVES = 5
# Numbers of the factors of all weights, above which correlations are left out.
_LARGEST = 1 << 24


def population(dim: int) -> int:
    """How many chains show the covariance of so many coordinates."""
    return min(_MOST, max(_FEWEST, _PER_COORDINATE * dim))


def whiten(density: ChainDensity, annealing: Annealing, transition: Transition) -> Whitening:
    r"""
    The map to white coordinates, after ``annealing.warmup`` windows of five transitions.

    The chains begin at the guide's draws and move with respect to the posterior itself. After each
    window coordinates are white with respect to where they stand then, and the step size has
    adapted; so the chains spread as far as the posterior does, window by window.

    :param transition: by the kernel.
    :raises ValueError: for discrete sites of the guide, and for angles.
    """
    discrete = density.log_weight.plan.discrete
    if discrete:
        raise ValueError(
            f"coordinates='whitened' moves all latents, but the guide's site{named(discrete)} "
            f"discrete: use coordinates='noise', where they stay as they were drawn"
        )
    angles = [n for n, fn in density.log_weight.unconstrained.items() if is_circular(fn)]
    if angles:
        raise ValueError(
            f"coordinates='whitened' fits a normal density on the line, but the guide's site"
            f"{named(tuple(angles))} an angle, which has no end there: use coordinates='noise'"
        )
    position, movable = density.log_weight.coordinates.detach(), density.log_weight.movable
    dense = position[0].numel() * position.shape[-1] <= _LARGEST
    found = Whitening.none(position, movable, dense)
    betas = position.new_ones(MOVES + 1)
    for turn in range(annealing.warmup):
        white = WhitenedDensity(density, found)
        chain = anneal(white(found.white(position)), betas, transition, white, movable)
        if not chain.infos:
            break  # nothing can move
        annealing.adapt(turn, chain.mean_acceptance, None)
        position = found.position(chain.state.position)
        found = found.refined(chain.state.position)
    return found
