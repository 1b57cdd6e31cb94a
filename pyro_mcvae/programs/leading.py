"""What stands to the left of the plates of a run."""

from __future__ import annotations

from typing import NamedTuple

from pyro_mcvae.programs.messengers import ParticlePlate


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


ALONE = Leading()
