"""What a runner is asked to run, and where the leading dims of a run stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pyro.poutine.trace_struct import Trace

from pyro_mcvae.checks.leading_dims import PARTICLES, LeadingDimsName
from pyro_mcvae.programs.execution import Programs, run_pair
from pyro_mcvae.programs.leading import ALONE, Leading
from pyro_mcvae.programs.mapping import Way, particle_plates
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.nesting import nesting_of
from pyro_mcvae.programs.run import Run, terms_of
from pyro_mcvae.structure.blocks import GlobalSites

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

    def leading(self) -> Leading:
        """The leading dims of one run, with new plates of the particles."""
        if self.nesting is None:
            return ALONE
        dim = -self.nesting - 1
        state_dim = dim - (self.count is not None) if self.sums else None
        if self.count is None:
            return Leading(state_dim=state_dim)
        return particle_plates(self.way, self.count, dim, self.shared, state_dim)

    def run(self, programs: Programs, substitutes: Substitutes) -> Run:
        """Run both programs; ``substitutes`` are what they do not draw."""
        leading = self.leading()
        return self.run_of(*run_pair(programs, substitutes, leading), leading, substitutes)

    def run_of(
        self, guide_trace: Trace, model_trace: Trace, leading: Leading, substitutes: Substitutes
    ) -> Run:
        """The run that two traces are, of programs that ran in these leading dims."""
        nesting = nesting_of(guide_trace, model_trace) if self.nesting is None else self.nesting
        terms = terms_of(guide_trace, model_trace, leading.state_dim)
        shown = nesting, self.count, substitutes.subsamples, leading.state_dim
        return Run(guide_trace, model_trace, terms, *shown, substitutes.noise, self.way)


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
