"""What stands to the left of the plates of a run."""

from __future__ import annotations

from typing import NamedTuple

from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.messengers import ParticlePlate

__all__ = ["ALONE", "Leading"]


class Leading(NamedTuple):
    """
    The leading dims of one run.

    :ivar guide: the particles' plate around the guide; None without particles.
    :ivar model: that around the model.
    :ivar state_dim: the first batch dim for the values of the model's enumerated sites; None to
        draw these.
    """

    guide: ParticlePlate | None = None
    model: ParticlePlate | None = None
    state_dim: int | None = None

    @property
    def unbatched(self) -> frozenset[FactorKey]:
        """The factors whose distribution did not have the particles' dim by itself."""
        plates = ("guide", self.guide), ("model", self.model)
        found = [(program, plate.unbatched) for program, plate in plates if plate is not None]
        return frozenset(FactorKey(program, name) for program, names in found for name in names)


ALONE = Leading()
