"""What a runner is asked to run, and where the leading dims of a run stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pyro.poutine.trace_struct import Trace

from pyro_mcvae.checks.leading_dims import PARTICLES, LeadingDimsName
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.mapping import Plates, Way, particle_plates, unbatched
from pyro_mcvae.programs.messengers import SubstituteMessenger
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.nesting import nesting_of
from pyro_mcvae.programs.run import Run, collect
from pyro_mcvae.structure.blocks import GlobalSites

__all__ = ["Execution", "Layout", "never"]

_NONE = GlobalSites()


@dataclass(frozen=True)
class Layout:
    """
    Where the leading dims of a run stand.

    :ivar count: the size of the particles' dim, or None for a run without one.
    :ivar nesting: how many batch dims belong to plates; None, in a run without leading dims, for
        as many as it shows.
    :ivar shared: the guide's and the model's sites that all particles share.
    :ivar way: how the particles are run.
    :ivar sums: whether the model's enumerated sites are summed; then ``nesting`` is known.
    """

    count: int | None
    nesting: int | None
    shared: GlobalSites = _NONE
    way: Way = Way.BATCHED
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
        return particle_plates(self.way, self.count, -self.nesting - 1, self.shared)

    def collect(
        self,
        guide_trace: Trace,
        model_trace: Trace,
        plates: Plates,
        substitute: SubstituteMessenger,
    ) -> Run:
        """
        The run that two traces are.

        :param plates: those of the particles that the programs ran in.
        :param substitute: what gave the run its minibatch and values.
        :raises ValueError: where the programs have more plates than there is room for.
        """
        nesting = nesting_of(guide_trace, model_trace)
        if self.nesting is not None:
            if nesting > self.nesting:
                # Plates without a declared dim have taken dims to the left of the particles'.
                raise ValueError("the programs have more plates than max_plate_nesting says")
            nesting = self.nesting
        found = unbatched(plates)
        shown = nesting, self.count, substitute.subsamples, found, self.state_dim, substitute.noise
        return collect(guide_trace, model_trace, *shown)


@dataclass(frozen=True)
class Execution:
    """
    What is to be run.

    :ivar programs: the pair that is run.
    :ivar execute: makes the run for a layout, on the minibatch below.
    :ivar subsamples: the minibatch; set back before another attempt.
    :ivar shared: the sites that all particles share, as far as that is known.
    :ivar find_shared: finds them out from a run; None where they are settled. A run whose sites
        turn out to be others is made again.
    :ivar rewinds: whether the random number generators are set back for that, too.
    :ivar name: what stands in the leading dims.
    :ivar several: whether there may be leading dims although ``count`` is None, as of slots.
    :ivar nesting: how many batch dims belong to plates, where that is settled.
    :ivar compared: the pair whose runs with and without leading dims are compared, where it is
        another one; ``execute`` then looks at the contract of the programs itself.
    :ivar check: a further look at a run that is not known.
    """

    programs: Programs
    execute: Callable[[Layout], Run]
    subsamples: Minibatch = field(default_factory=Minibatch)
    shared: GlobalSites = _NONE
    find_shared: Callable[[Run], GlobalSites] | None = None
    rewinds: bool = False
    name: LeadingDimsName = PARTICLES
    several: bool = False
    nesting: int | None = None
    compared: Programs | None = None
    check: Callable[[Run], object] | None = None

    @property
    def key(self) -> Programs:
        """The pair that is looked at."""
        return self.compared or self.programs


def never(layout: Layout) -> Run:
    """Of an execution that is looked at and not run."""
    raise NotImplementedError("a run that was made elsewhere")
