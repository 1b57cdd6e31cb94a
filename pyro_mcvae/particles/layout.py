"""What a runner is asked to run, and where the leading dims of a run stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace

from pyro_mcvae.checks.leading_dims import PARTICLES, LeadingDimsName
from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.mapping import Plates, Way, particle_plates, unbatched
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.nesting import nesting_of
from pyro_mcvae.programs.run import Run, terms_of
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

    def run(
        self, programs: Programs, substitutes: Substitutes, inside: Messenger | None = None
    ) -> Run:
        """
        Run both programs.

        :param substitutes: what they do not draw.
        :param inside: a further handler around the guide.
        """
        plates = self.plates()
        traces = run_pair(programs, substitutes, plates, inside, self.state_dim)
        return self.run_of(*traces, plates, substitutes)

    def run_of(
        self, guide_trace: Trace, model_trace: Trace, plates: Plates, substitutes: Substitutes
    ) -> Run:
        """The run that two traces are, of programs that ran in these plates of the particles."""
        nesting = nesting_of(guide_trace, model_trace) if self.nesting is None else self.nesting
        shown = nesting, self.count, unbatched(plates), substitutes.subsamples, self.state_dim
        terms = terms_of(guide_trace, model_trace, self.state_dim)
        return Run(guide_trace, model_trace, terms, *shown, noise=substitutes.noise)


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
    :ivar depends: whether a run without leading dims depends on these sites, too.
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
    depends: bool = True
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
