"""One call of a truncated posterior: its states are evaluated, searched and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.truncated.joint import JointRuns
from pyro_mcvae.truncated.proposals import propose
from pyro_mcvae.truncated.search import Populations, evaluate, evolve
from pyro_mcvae.truncated.searched_sites import GuideDraws

if TYPE_CHECKING:
    from pyro_mcvae.truncated.guide import TruncatedPosterior

__all__ = ["EStep"]


class EStep:
    """
    The states of a :class:`TruncatedPosterior` for one minibatch. The first call finds the
    structure and makes the first states.

    :param guide: the truncated posterior; that of ``programs`` may stand in wrappers.
    :param programs: the model, which others may have wrapped, and its arguments.
    :param sampler: runs the model.
    :param given: draws of the guide's own ``guide`` that are made already.
    :ivar runs: the joint density of this call.
    """

    def __init__(
        self,
        guide: TruncatedPosterior,
        programs: Programs,
        sampler: ParticleSampler,
        given: GuideDraws | None = None,
    ) -> None:
        self.guide = guide
        model, args, kwargs = programs.model, programs.args, dict(programs.kwargs)
        layouts = guide._layouts(model, sampler, args, kwargs)
        self.runs = JointRuns(sampler, layouts, model, guide.guide, args, kwargs, given)

    def agree(self) -> None:
        """Take the first states of rank 0: each rank of a distributed run has drawn others."""
        self.guide._agree(self.runs)

    def evaluate(self, searched: bool = False) -> tuple[Populations, WeightedParticles]:
        """
        The states as they are, with their log joint.

        :param searched: whether states will be searched for these data, and kept.
        :raises ValueError: where states are kept for other data, and are not searched for these.
        """
        guide, runs = self.guide, self.runs
        populations, sample = evaluate(runs, guide._minibatch, guide.num_states)
        if guide.fixed_data:
            guide._record.compare(runs, sample, guide.num_states, searched)
        return populations, sample

    def search(self, populations: Populations) -> Populations:
        """Better states, which are not kept yet."""
        if self.guide.proposals is not None:
            populations = propose(self.runs, populations, self.guide.proposals)
        return evolve(self.runs, populations, self.guide.evolution)

    def keep(self, populations: Populations, shared: bool = False) -> None:
        """
        Keep the states of the minibatch.

        :param bool shared: where every rank has all states, keep also those of the other ranks'
            minibatches, and let them have these.
        """
        self.guide._store(self.runs, populations, shared)
        self.guide._record.keep(self.runs)
