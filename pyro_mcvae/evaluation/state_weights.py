"""The evidence of a truncated posterior: the part of its states, exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from pyro import poutine
from torch import Tensor

from pyro_mcvae.evaluation.annealing import Annealing
from pyro_mcvae.evaluation.arguments import Options
from pyro_mcvae.evaluation.importance_sampler import (
    ImportanceSampler,
    check_no_local_points,
    shared_factors,
)
from pyro_mcvae.evaluation.weights import Weighed, WeightSummary
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.impossible import with_impossible_data
from pyro_mcvae.programs.progress import Progress
from pyro_mcvae.programs.sites import is_delta, is_latent
from pyro_mcvae.programs.terms import scored
from pyro_mcvae.truncated.guide import TruncatedPosterior, new_posterior
from pyro_mcvae.truncated.posterior import StatePosterior


class StateWeights(ImportanceSampler):
    """
    The states of a truncated posterior, whose weights are all their part of :math:`p(x_n)`.

    Other states are not drawn: the evidence is a lower bound, and its Pareto k is not known, unless
    all states are kept.

    :ivar guide: the truncated posterior.
    :ivar posterior: its states.
    :raises ValueError: for a truncated posterior of another model, and for one whose own ``guide``
        draws further latents.
    """

    remedy = "Search on (guide.fit(..., num_steps=100)), or keep more states (num_states=)"

    def __init__(self, programs: Programs, options: Options, progress: Progress) -> None:
        self.guide = _with_states(programs)
        self.programs = replace(programs, model=with_impossible_data(programs.model))
        self.progress, self._options, self.annealing = progress, options, None
        self.posterior = self.guide.posterior(*programs.args, **programs.kwargs)
        self.reference = self.posterior.particles
        self.given = _points(self.posterior)

    loops = False

    @property
    def chunk_size(self) -> int:
        return self._options.chunk(self.posterior.free_energy.numel())

    def weigh(self, count: int) -> Weighed:
        bound = self.posterior.free_energy
        return Weighed(bound.expand(count, *bound.shape), [])

    def bound(self, summary: WeightSummary) -> Tensor:
        """The exact part."""
        return self.posterior.free_energy

    def pareto_k(self, summary: WeightSummary) -> Tensor:
        all_kept = self.posterior.population.space.cardinality == self.guide.num_states
        return summary.pareto_k if all_kept else torch.full_like(summary.pareto_k, math.nan)

    def shared(self) -> Tensor:
        return shared_factors(self.reference, ())

    def annealed(self, annealing: Annealing) -> ImportanceSampler:
        raise ValueError(
            "the states of a TruncatedPosterior are discrete, and no chain moves them: leave out "
            "schedule and kernel"
        )

    def on(self, programs: Programs, joint: bool = False) -> ImportanceSampler:
        options = replace(self._options, joint=joint or self._options.joint)
        found = ImportanceSampler(programs, options, self.progress)
        mine, theirs = self.reference.subsamples, found.reference.subsamples
        for name in mine.keys() & theirs.keys():
            if not torch.equal(mine[name], theirs[name]):
                raise ValueError(f"plate '{name}' draws a minibatch of its own")
        return found


def _with_states(programs: Programs) -> TruncatedPosterior:
    """The guide, or one like it for any data if it has no states yet."""
    guide = poutine.unwrap(programs.guide)
    assert isinstance(guide, TruncatedPosterior)
    if programs.model != guide.model:
        raise ValueError(
            "the TruncatedPosterior is of another model than the one that is evaluated: pass the "
            "model that it was made with"
        )
    return guide if guide.has_states else new_posterior(guide, guide.model).eval()


def _points(posterior: StatePosterior) -> tuple[str, ...]:
    """
    The point masses of the posterior's own ``guide``.

    :raises ValueError: for latents that it draws, and for point masses in the data's plates.
    """
    sites = [s for s in scored(posterior.runs.guide_trace) if is_latent(s)]
    for site in sites:
        if not is_delta(site["fn"]):
            raise ValueError(
                f"the guide= of the TruncatedPosterior draws site '{site['name']}', and the "
                f"evaluators take only its states: average guide.posterior(...).free_energy over "
                f"such draws for a lower bound, or make the site a point mass"
            )
    sample = posterior.particles
    local = {t.key.name for t in sample.runs[0].terms if t.in_guide and sample.is_local(t)}
    points = tuple(sorted(s["name"] for s in sites))
    check_no_local_points(local.intersection(points))
    return points
