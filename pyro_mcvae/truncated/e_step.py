"""One call of a truncated posterior: its states are evaluated, searched and kept."""

from __future__ import annotations

from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.truncated.buffers import StateBuffers
from pyro_mcvae.truncated.data_record import DataRecord
from pyro_mcvae.truncated.evolution import EvolutionaryUpdate
from pyro_mcvae.truncated.joint import JointRuns
from pyro_mcvae.truncated.proposals import PriorDraws, Proposals, propose
from pyro_mcvae.truncated.search import Populations, evaluate, evolve

__all__ = ["EStep"]


class EStep:
    """
    The states of a truncated posterior for one minibatch.

    :param runs: the joint density of this call.
    :param states: all that are kept.
    :param record: of the data that they were searched for; None where these may change.
    :param evolution: one way to better states.
    :param proposals: another one, before it.
    """

    def __init__(
        self,
        runs: JointRuns,
        states: StateBuffers,
        record: DataRecord | None,
        evolution: EvolutionaryUpdate,
        proposals: PriorDraws | Proposals | None,
    ) -> None:
        self.runs = runs
        self._states, self._record = states, record
        self._evolution, self._proposals = evolution, proposals

    def agree(self) -> None:
        """Take the first states of rank 0: each rank of a distributed run has drawn others."""
        self._states._agree(self.runs)

    def evaluate(self, searched: bool = False) -> tuple[Populations, WeightedParticles]:
        """
        The states as they are, with their log joint.

        :param searched: whether states will be searched for these data, and kept.
        :raises ValueError: where states are kept for other data, and are not searched for these.
        """
        count = self._states.num_states
        populations, sample = evaluate(self.runs, self._states._minibatch, count)
        if self._record is not None:
            self._record.compare(self.runs, sample, count, searched)
        return populations, sample

    def search(self, populations: Populations) -> Populations:
        """Better states, which are not kept yet."""
        if self._proposals is not None:
            populations = propose(self.runs, populations, self._proposals)
        return evolve(self.runs, populations, self._evolution)

    def keep(self, populations: Populations, shared: bool = False) -> None:
        """
        Keep the states of the minibatch.

        :param bool shared: where every rank has all states, keep also those of the other ranks'
            minibatches, and let them have these.
        """
        self._states._store(self.runs, populations, shared)
        if self._record is not None:
            self._record.keep(self.runs)
