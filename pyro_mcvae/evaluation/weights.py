"""Weights of mean p(x) per datum, drawn again and again: what every judge asks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pyro_mcvae.programs.contract import nonfinite_sites
from pyro_mcvae.programs.sites import is_random, known_support

if TYPE_CHECKING:
    from pyro_mcvae.evaluation.annealing import Annealing
    from pyro_mcvae.evaluation.weight_summary import WeightSummary
    from pyro_mcvae.particles.weighted import WeightedParticles
    from pyro_mcvae.programs.execution import Programs
    from pyro_mcvae.programs.progress import Progress
    from pyro_mcvae.programs.run import Run

__all__ = ["Weighed", "Weights", "shared_factors"]


class Weighed(NamedTuple):
    """
    :ivar log_weight: ``[count, *plates]``.
    :ivar runs: of the programs, to tell where a weight is not a number.
    :ivar acceptance: of each transition, where chains were moved.
    """

    log_weight: Tensor
    runs: list[Run]
    acceptance: Tensor | None = None


class Weights(ABC):
    """
    The weights of one minibatch.

    :ivar programs: those that are weighed.
    :ivar reference: a run of both, for its plates.
    :ivar given: latents whose values are held: point masses, and globals that were drawn once.
    :ivar annealing: chains, where these weigh.
    :ivar remedy: what helps where their tails are heavy.
    """

    programs: Programs
    reference: WeightedParticles
    given: tuple[str, ...]
    progress: Progress
    annealing: Annealing | None = None
    remedy = "Use chains (schedule=10, and more), or num_transitions"

    @property
    @abstractmethod
    def chunk_size(self) -> int:
        """How many particles fit one chunk."""

    @abstractmethod
    def weigh(self, count: int) -> Weighed:
        """So many weights of each datum, independent of each other."""

    @abstractmethod
    def shared(self) -> Tensor:
        """What belongs to no single datum: the factors outside of the blocks, without the draws."""

    @abstractmethod
    def annealed(self, annealing: Annealing) -> Weights:
        """The same, by chains."""

    @abstractmethod
    def on(self, programs: Programs, joint: bool = False) -> Weights:
        """
        Of other programs, on the same minibatch.

        :param joint: weigh everything together, also where this one does not.
        """

    @property
    def loops(self) -> bool:
        """Whether each particle is a run of its own."""
        return False

    @property
    @abstractmethod
    def holds_draws(self) -> bool:
        """Whether posterior draws share latents, until :meth:`renew` draws them anew."""

    @abstractmethod
    def renew(self) -> None:
        """Draw the latents that are held anew, on the same minibatch."""

    def bound(self, summary: WeightSummary) -> Tensor:
        """The guide's bound on the log evidence, after these weights were drawn."""
        return summary.mean_log.to(self.reference.log_weight.dtype)

    def pareto_k(self, summary: WeightSummary) -> Tensor:
        """The tail of the weights, NaN where they say nothing of it."""
        return summary.pareto_k

    @property
    def plates(self) -> tuple[str, ...]:
        """The names of the weights' plates."""
        return self.reference.plate_names

    @property
    def discrete(self) -> tuple[str, ...]:
        """The guide's discrete sites."""
        sites = (t.site for t in self.reference.runs[0].terms if t.in_guide and is_random(t.site))
        return tuple(s["name"] for s in sites if known_support(s["fn"]).is_discrete)

    @property
    def scale(self) -> float | Tensor:
        """N/B of each weight."""
        return self.reference.scale

    @property
    def elements(self) -> int:
        """How many weights one particle has."""
        return math.prod(self.reference.log_weight.shape[1:])

    def chunks(self, count: int) -> Iterator[int]:
        """The sizes of the chunks that ``count`` particles are drawn in."""
        self.progress.expect(count)
        while count > 0:
            size = min(self.chunk_size, count)
            yield size
            if self.annealing is None:  # whose transitions are counted
                self.progress.step(size)
            count -= size

    def check(self, log_weight: Tensor, runs: list[Run]) -> None:
        """
        :raises ValueError: naming the sites, where a log weight is NaN or plus infinity.
        """
        if bool((log_weight.isnan() | log_weight.isposinf()).any()):
            lines = nonfinite_sites(runs) or ["every site is finite: their sum overflows"]
            raise ValueError("a log weight is not a number, because of\n  " + "\n  ".join(lines))


def shared_factors(sample: WeightedParticles, without: Collection[str]) -> Tensor:
    """The factors outside of the blocks, but for those of some sites."""
    total = sample.log_weight.new_zeros(())
    for term in sample.global_terms():
        if term.key.name not in without:
            sign = -1.0 if term.in_guide else 1.0
            total = total + sign * torch.as_tensor(term.log_prob).sum() * term.plate_scale
    return total
