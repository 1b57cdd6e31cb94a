"""Where the leading dims of a run stand: particles, and states of enumerated sites."""

from __future__ import annotations

from dataclasses import dataclass

from pyro.poutine.trace_struct import Trace

from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.messengers import ParticlePlate
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.nesting import nesting_of
from pyro_mcvae.programs.run import Run, collect
from pyro_mcvae.structure.blocks import GlobalSites

__all__ = ["Layout", "Plates"]

# The particles' plates of the guide and of the model.
Plates = tuple[ParticlePlate, ParticlePlate] | tuple[None, None]
_NONE = GlobalSites()


@dataclass(frozen=True)
class Layout:
    """
    Where the leading dims of a run stand.

    :ivar count: the size of the particles' dim, or None for a run without one.
    :ivar nesting: how many batch dims belong to plates; None, in a run without leading dims, for
        as many as it shows.
    :ivar shared: the guide's and the model's sites that all particles share.
    :ivar sums: whether the model's enumerated sites are summed; then ``nesting`` is known.
    """

    count: int | None
    nesting: int | None
    shared: GlobalSites = _NONE
    sums: bool = False

    @property
    def state_dim(self) -> int | None:
        """The first batch dim for the values of enumerated sites; None where these are drawn."""
        if not self.sums or self.nesting is None:
            return None
        return -self.nesting - 1 - (self.count is not None)

    def plates(self) -> Plates:
        """New plates of the particles, for the guide and for the model."""
        if self.count is None or self.nesting is None:
            return None, None
        dim = -self.nesting - 1
        guide, model = (ParticlePlate(self.count, dim, names) for names in self.shared)
        return guide, model

    def collect(
        self, guide_trace: Trace, model_trace: Trace, plates: Plates, subsamples: Minibatch
    ) -> Run:
        """
        The run that two traces are.

        :param plates: those of the particles that the programs ran in.
        :raises ValueError: where the programs have more plates than there is room for.
        """
        nesting = nesting_of(guide_trace, model_trace)
        if self.nesting is not None:
            if nesting > self.nesting:
                # Plates without a declared dim have taken dims to the left of the particles'.
                raise ValueError("the programs have more plates than max_plate_nesting says")
            nesting = self.nesting
        found = _unbatched(plates)
        dim = self.state_dim
        return collect(guide_trace, model_trace, nesting, self.count, subsamples, found, dim)


def _unbatched(plates: Plates) -> frozenset[FactorKey]:
    """The factors whose distribution did not have the particles' dim by itself."""
    guide, model = plates
    if guide is None or model is None:
        return frozenset()
    names = ("guide", guide.unbatched), ("model", model.unbatched)
    return frozenset(FactorKey(program, n) for program, found in names for n in found)
