"""Weights of mean p(x) per datum, drawn again and again: what every judge asks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_mcvae.ops.pareto import pareto_k, tail_length
from pyro_mcvae.programs.contract import nonfinite_sites
from pyro_mcvae.programs.sites import is_latent, is_random, known_support
from pyro_mcvae.programs.types import Site

if TYPE_CHECKING:
    from pyro_mcvae.evaluation.annealing import Annealing
    from pyro_mcvae.particles.weighted import WeightedParticles
    from pyro_mcvae.programs.execution import Programs
    from pyro_mcvae.programs.progress import Progress
    from pyro_mcvae.programs.run import Run

__all__ = ["Weighed", "WeightSummary", "Weights", "shared_factors"]


class WeightSummary:
    r"""
    What :math:`K` weights per datum say together, in memory that does not grow with K, but for the
    :math:`3 \sqrt K` largest per datum, to which the tail is fitted.

    :param int num_particles: K, all chunks together.

    Example::

        >>> summary = WeightSummary(4)
        >>> for chunk in torch.tensor([0.0, 0.0, 0.0, 0.0]).split(2):
        ...     summary.add(chunk)
        >>> summary.log_mean.item(), summary.effective_sample_size.item()
        (0.0, 4.0)
    """

    def __init__(self, num_particles: int) -> None:
        self.num_particles = num_particles
        self.count = 0
        self._tail = tail_length(num_particles) + 1
        self._largest: Tensor | None = None
        self._top: Tensor | None = None
        # Sums of w and of its square, relative to the largest w so far; and of log w.
        self._sum: Tensor | None = None
        self._squares: Tensor | None = None
        self._logs: Tensor | None = None

    def add(self, log_weight: Tensor) -> None:
        """
        :param log_weight: a chunk, shape ``[k, *plates]``.
        """
        chunk = log_weight.detach().double()
        if self._largest is None:
            self._largest = torch.full_like(chunk[0], torch.finfo(chunk.dtype).min)
            self._sum = torch.zeros_like(chunk[0])
            self._squares, self._logs = self._sum, self._sum
            self._top = chunk[:0]
        assert self._sum is not None
        assert self._squares is not None
        assert self._logs is not None
        assert self._top is not None
        largest = torch.maximum(self._largest, chunk.amax(0))
        shrink = (self._largest - largest).exp()
        relative = (chunk - largest).exp()
        self._sum = self._sum * shrink + relative.sum(0)
        self._squares = self._squares * shrink.square() + relative.square().sum(0)
        self._logs = self._logs + chunk.sum(0)
        self._largest = largest
        top = torch.cat([self._top, chunk])
        self._top = top.topk(min(self._tail, len(top)), dim=0).values
        self.count += len(chunk)

    @property
    def log_mean(self) -> Tensor:
        """The logarithm of the mean weight, shape ``[*plates]``; all results are float64."""
        assert self._sum is not None
        assert self._largest is not None
        return self._largest + self._sum.log() - math.log(self.count)

    @property
    def mean_log(self) -> Tensor:
        """The mean of the log weights."""
        assert self._logs is not None
        return self._logs / self.count

    @property
    def effective_sample_size(self) -> Tensor:
        """Kish's number of equally weighted draws; 0 where every weight is zero."""
        assert self._sum is not None
        assert self._squares is not None
        return torch.where(self._sum > 0, self._sum.square() / self._squares, 0.0)

    @property
    def standard_error(self) -> Tensor:
        r"""
        Of the logarithm of the mean, :math:`\text{sd}(w) / (\sqrt K\, \bar w)`; infinite where
        every weight is zero, NaN for one weight.
        """
        if self.count < 2:
            return torch.full_like(self.log_mean, math.nan)
        spread = 1 / self.effective_sample_size - 1 / self.count
        return (spread.clamp_min(0.0) * self.count / (self.count - 1)).sqrt()

    @property
    def pareto_k(self) -> Tensor:
        """The shape of the weights' tail, see :func:`~pyro_mcvae.ops.pareto.pareto_k`."""
        assert self._top is not None
        return pareto_k(self._top, self.count)


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

    def of_prior(self) -> Weights:
        """Those of the model's own prior, which sums what the guide leaves to be summed."""
        run = self.reference.runs[0]
        nodes = run.model_trace.nodes
        drawn = frozenset(n for n, s in nodes.items() if is_latent(s) and n in run.guide_trace)
        prior = poutine.block(self.programs.model, hide_fn=lambda s: _is_hidden(s, drawn))
        return self.on(replace(self.programs, guide=prior), joint=self.elements == 1)

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


def _is_hidden(site: Site, drawn: frozenset[str]) -> bool:
    return site["type"] == "sample" and not site_is_subsample(site) and site["name"] not in drawn
