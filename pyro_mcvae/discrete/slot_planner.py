"""Finds out which slots the programs of a step have, and keeps it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

from pyro_mcvae.discrete.site_options import SiteOptions, SlotError
from pyro_mcvae.discrete.slot_choice import is_discrete
from pyro_mcvae.discrete.slot_draws import SlotDraws, SlotsChangedError
from pyro_mcvae.discrete.slot_plan import SlotPlan, make_plan
from pyro_mcvae.ops.notices import WarnOnce
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.isolation import isolated, rewindable
from pyro_mcvae.programs.sites import is_scored

_logger = logging.getLogger(__name__)

# The slots of the programs, and whether these change from one step to the next, as where data name
# the sites.
_PLAN, _CHANGING = ("slot plan",), ("slots change",)

# How often a step is begun again when its discrete sites turn out to be others than assumed.
_MAX_ATTEMPTS = 4
_UNSTEADY = (
    f"the guide shows other discrete sites in each of {_MAX_ATTEMPTS} runs, so that their values "
    f"make no slots: draw them always, and mask them where they do not count, or weigh whole draws "
    f"with TraceIWAE_ELBO"
)

T = TypeVar("T")

# Makes what a step begins with, at given slots or without, and a sample that shows its sites.
Make = Callable[["SlotDraws | None"], tuple[T, WeightedParticles]]


class SlotPlanner:
    """
    The slots of one objective's programs, found out from a step without slots.

    :param options: for all sites that do not say otherwise.
    :param common: whether particles share the discrete draws, and what these depend on.
    """

    def __init__(self, options: SiteOptions, common: bool) -> None:
        self.options, self.common = options, common
        self._tell = WarnOnce(_logger)

    def sample(
        self, sampler: ParticleSampler, programs: Programs
    ) -> tuple[WeightedParticles, SlotDraws | None]:
        """
        A sample whose rows are slots times particles.

        :raises SlotError: as :meth:`begin`, and for other sites without reparameterization.
        """

        def make(draws: SlotDraws | None) -> tuple[WeightedParticles, WeightedParticles]:
            if draws is None:
                sample = sampler.sample(programs)
            else:
                sample = sampler.sample(programs, draws.make_sample_fn, count=draws.count)
            return sample, sample

        sample, draws = self.begin(sampler, programs, make)
        if draws is not None:
            _check_scores(sample, draws)
        return sample, draws

    def begin(
        self, sampler: ParticleSampler, programs: Programs, make: Make[T]
    ) -> tuple[T, SlotDraws | None]:
        """
        Begin a step; again, where its discrete sites are others than assumed.

        :returns: that, and its draws; None for programs without discrete local sites.
        :raises SlotError: naming a site that cannot have the slots that are asked for.
        """
        analysis = sampler.analyses.of(programs)
        known, plan = analysis.get(_PLAN, False) is not False, analysis.get(_PLAN)
        with rewindable(not known or analysis.get(_CHANGING)) as rewind:
            for _ in range(_MAX_ATTEMPTS):
                draws = plan and SlotDraws(plan, self.options, sampler.num_particles, self._tell)
                try:
                    found, sample = make(draws)
                    if draws is not None and len(sample.runs) > 1:
                        _check_rows(sample)
                    shown = self._plan_of(programs, sample)
                    if shown.fits(plan) if shown else plan is None:
                        analysis.put(_PLAN, plan)
                        return found, draws
                except SlotsChangedError as changed:
                    shown = changed.plan
                analysis.put(_PLAN, plan := shown)
                if not rewind():  # The next runs would have other minibatches, with other sites.
                    analysis.put(_CHANGING, True)
                    return self.begin(sampler, programs, make)
        raise SlotError(_UNSTEADY)

    def _plan_of(self, programs: Programs, sample: WeightedParticles) -> SlotPlan | None:
        """The plan of a structure, which is made once."""
        notes: dict[Hashable, SlotPlan | None] = sample.structure.notes
        if make_plan not in notes:
            with isolated(programs.owners):  # slots are chosen to be counted, and draws with them
                made = make_plan(programs, sample, self.options, self.common, self._tell)
            notes[make_plan] = made
        return notes[make_plan]


def _check_rows(sample: WeightedParticles) -> None:
    """
    Check that all rows that were run by themselves have the same discrete sites.

    :raises SlotError: naming a site that comes and goes with the values of others.
    """
    nodes = [run.guide_trace.nodes for run in sample.runs]
    names = [{n for n, s in found.items() if is_scored(s) and is_discrete(s)} for found in nodes]
    for name in sorted(set().union(*names) - set.intersection(*names)):
        raise SlotError(
            f"guide site '{name}' is drawn for some values of other discrete sites and not for "
            f"others, so that its values make no slots: draw it always, and mask it where it does "
            f"not count, or use TraceSGVB_ELBO or TraceIWAE_ELBO, which draw whole executions"
        )


def _check_scores(sample: WeightedParticles, draws: SlotDraws) -> None:
    """Refuse other sites without reparameterization beside slots."""
    for term in sample.runs[0].terms:
        rough = isinstance(term.score, Tensor) and term.key.name not in draws.held
        if rough and sample.is_local(term):
            raise SlotError(
                f"guide site '{term.key.name}' ({type(term.site['fn']).__name__}) is not "
                f"reparameterized, beside discrete sites that are summed: use a distribution with "
                f"rsample, or leave out num_categories, num_samples and budget"
            )
