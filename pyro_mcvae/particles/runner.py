"""Run model and guide with particles in one batch, under vmap or one by one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.poutine.trace_struct import Trace
from torch.utils.checkpoint import _StopRecomputationError

from pyro_mcvae.checks.faults import check_flows
from pyro_mcvae.checks.vectorization import (
    ENUMERATED,
    PARTICLES,
    LeadingDimsName,
    LeadingRun,
    compare_leading_dims,
    compare_states,
    not_settled,
    not_vectorizable,
)
from pyro_mcvae.ops.tensors import is_recording
from pyro_mcvae.programs.contract import (
    check_batch_dims,
    check_nesting,
    check_run,
    checked_run,
    nesting_of,
    single_run,
)
from pyro_mcvae.programs.enumeration import has_unsummed_states
from pyro_mcvae.programs.isolation import rewindable
from pyro_mcvae.programs.messengers import ALONE, Leading, Minibatch, Substitutes
from pyro_mcvae.programs.run import Programs, Run, is_messenger, run_pair, terms_of
from pyro_mcvae.programs.types import LeadingDimsError, SiteError
from pyro_mcvae.programs.vmap import Way, particle_plates
from pyro_mcvae.structure.blocks import GlobalSites
from pyro_mcvae.structure.cache import Analyses
from pyro_mcvae.structure.finder import without_auxiliary

# What a runner is asked to run, and where the leading dims of a run stand.

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
    :ivar nesting: how many batch dims belong to plates, where that is known.
    :ivar compared: the pair whose runs with and without leading dims are compared, where it is
        another one; ``execute`` then checks the contract of the programs itself.
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
        """The pair that is checked."""
        return self.compared or self.programs


def never(layout: Layout) -> Run:
    """Of an execution that is checked and not run."""
    raise NotImplementedError("a run that was made elsewhere")


# The place that runs programs with leading dims: particles, chains, slots, states, evaluators.

_logger = logging.getLogger(__name__)

_WAY, _NESTING, _SUMS = ("way",), ("nesting",), ("sums",)
_AT_ONCE = Way.BATCHED, Way.MAPPED, Way.BOTH_MAPPED
_IN_WORDS = {
    Way.BATCHED: "in a leading dim",
    Way.MAPPED: "under vmap",
    Way.BOTH_MAPPED: "under vmap, the guide too",
}
# How often a step is begun again when its structure turns out to be another than assumed.
_MAX_ATTEMPTS = 3


class Runner:
    """
    Makes the runs of one objective or evaluator, and knows how many batch dims their plates occupy.

    Whatever runs with leading dims runs here, and only here it is checked: whether programs that
    fail do so without leading dims too, have other plates than before, or cannot be vectorised;
    whether particles are taken for data of which there are as many; whether their densities are
    those of a loop.

    :param max_plate_nesting: how many batch dims belong to plates; infinite to find out.
    :param bool strict_enumeration: refuse guide sites that are marked for enumeration.
    :param vectorize: True to refuse programs that have to be looped over; False to loop.
    :param analyses: what is known of the programs.
    """

    def __init__(
        self,
        max_plate_nesting: float = math.inf,
        strict_enumeration: bool = True,
        vectorize: bool | None = None,
        analyses: Analyses | None = None,
    ) -> None:
        check_nesting(max_plate_nesting)
        self.declared_nesting = max_plate_nesting
        self.analyses = analyses or Analyses()
        self.strict_enumeration = strict_enumeration
        self._vectorize = vectorize
        # Whether chains have moved latents of a bounded support, or None before the first.
        self.bounded: bool | None = None
        self._has_run = False

    @property
    def refuses_loops(self) -> bool:
        """Whether programs that have to be looped over are refused."""
        return self._vectorize is True

    def way(self, programs: Programs) -> Way | None:
        """How the particles of a pair are run; None before it was found out."""
        if self._vectorize is False:
            return Way.LOOPED
        # Programs that are run at once with all of their particles, and only so, may rely on it.
        # And plain steps come before one that is recorded, and a look would be recorded.
        at_once = (self.refuses_loops and not self._is_open) or is_recording()
        way: Way | None = self.analyses.of(programs).get(_WAY, Way.BATCHED if at_once else None)
        return way

    def together(self, execution: Execution) -> bool:
        """
        Whether several particles share one run; found out at the first of a pair of programs.

        :param execution: of the programs; its ``execute`` is not called.
        :raises LeadingDimsError: for programs that have to be looped over, if that is refused.
        """
        way = self.way(execution.key) or self._choose(execution, self._look(execution))
        return way is not Way.LOOPED

    def run_together(self, execution: Execution, count: int) -> Run | None:
        """One run for all of several particles; None where they are to be run one by one."""
        if not self.together(execution):
            return None
        try:
            return self.run(execution, count)
        except LeadingDimsError:
            if self.together(execution):
                raise
            return None

    def run(self, execution: Execution, count: int | None) -> Run:
        """
        Make one run.

        :param count: the size of the particles' dim; None for a run without one.
        :raises LeadingDimsError: for programs that cannot be run with leading dims, or are others
            with them, naming the remedy.
        """
        shared, before, attempt = execution.shared, Minibatch(execution.subsamples), 1
        with rewindable(not self._has_run or self._is_new(execution)) as rewind:
            while True:
                try:
                    return self._attempt(execution, count, shared)
                except _UnsettledError as other:
                    if count is not None and attempt == _MAX_ATTEMPTS:
                        raise not_settled(attempt, other.names) from None
                    shared, attempt = other.shared, attempt + 1
                    if rewind():
                        # The generators draw the same minibatch again.
                        _set_back(execution.subsamples, before)
                except LeadingDimsError as error:
                    rewind()  # one seed, one number
                    _set_back(execution.subsamples, before)
                    self._change_way(execution, count, error)
                    shared = execution.shared

    def _attempt(self, execution: Execution, count: int | None, shared: GlobalSites) -> Run:
        """A run that all guards have looked at, if it has the shared sites that were assumed."""
        sums = bool(self._known(execution.key, _SUMS)) and not execution.several
        if count is None and not execution.several and not sums:
            run, known = self._execute(execution, Layout(None, None, shared))
        else:
            run, known = self._leading(execution, count, shared, sums)
        found = shared if execution.find_shared is None else execution.find_shared(run)
        if found != shared and (execution.depends or run.leading is not None):
            # Shared sites were drawn once per particle, or others once: to be run again.
            raise _UnsettledError(found)
        self._has_run = True
        settled = self.without_auxiliary(execution.programs, run)
        if not known:
            self._look_at(execution, settled, shared)
        return settled

    def _change_way(self, execution: Execution, count: int | None, error: LeadingDimsError) -> None:
        """Choose another way to run particles together, or raise what is wrong with this one."""
        looped = count is None or self.way(execution.key) is Way.LOOPED
        if looped or self._choose(execution, self._look(execution), error) is Way.LOOPED:
            raise error

    def check(
        self,
        programs: Programs,
        run: Run,
        shared: GlobalSites,
        name: LeadingDimsName = PARTICLES,
    ) -> None:
        """Look at a run that was made elsewhere, if none of its structure and sizes was."""
        if self._is_known(programs, run, shared):
            return
        leads = run.leading is not None
        depth = run.nesting + 1 if leads else self.declared_nesting
        self._check_promises(run, depth, leads)
        self._look_at(Execution(programs, never, name=name), run, shared)

    def without_auxiliary(self, programs: Programs, run: Run) -> Run:
        """A run without the density of auxiliary draws that are no latents."""
        return without_auxiliary(programs, run, self.analyses.of(programs))

    def check_nesting(self, nesting: int) -> None:
        """
        :raises ValueError: if the programs have more plates than ``max_plate_nesting`` says.
        """
        if nesting > self.declared_nesting:
            raise ValueError(
                f"max_plate_nesting={int(self.declared_nesting)}, but the programs have plates in "
                f"{nesting} batch dims: pass max_plate_nesting={nesting} or leave it out"
            )

    def _look_at(self, execution: Execution, run: Run, shared: GlobalSites) -> None:
        """Compare a run with a loop, if it has leading dims, and take it for one that is known."""
        programs, analysis = execution.key, self.analyses.of(execution.key)
        if run.leading is not None or (execution.several and run.outer_sizes):
            # Without particles other leading dims stand by themselves, as those of slots do.
            way = Way.BATCHED if run.leading is None else self.way(programs) or Way.BATCHED
            one = _without_slots(run) if run.leading is None else shared
            leading = LeadingRun(programs, run, one, way, execution.name)
            compare_leading_dims(analysis, leading, self.refuses_loops)
        if any(t.members for t in run.terms):
            compare_states(analysis, programs, run)
        if execution.check is not None:
            execution.check(run)
        analysis.put(_shown(run, shared), True)

    def _leading(
        self, execution: Execution, count: int | None, shared: GlobalSites, sums: bool
    ) -> tuple[Run, bool]:
        """A run with leading dims; again, where plates or the way have changed."""
        way = Way.BATCHED
        if count is not None:
            way = self.way(execution.key) or self._choose(execution, self._look(execution))
        nesting = self._nesting(execution)
        before = Minibatch(execution.subsamples)
        while True:
            try:
                return self._execute(execution, Layout(count, nesting, shared, way, sums))
            except (SiteError, _UnsettledError, _StopRecomputationError):
                raise
            except Exception as error:
                nesting, way = self._recovered(execution, count, nesting, way, error)
            _set_back(execution.subsamples, before)

    def _execute(self, execution: Execution, layout: Layout) -> tuple[Run, bool]:
        """A run, and whether all guards have seen its like."""
        run = execution.execute(layout)
        known = self._is_known(execution.key, run, layout.shared)
        if not known and execution.compared is None:
            self._check_contract(execution, layout, run)
        return run, known

    def _is_known(self, programs: Programs, run: Run, shared: GlobalSites) -> bool:
        """Whether such a run was checked by all guards."""
        if is_recording():
            return True  # plain steps of the same kind were checked, and a check would be recorded
        return self.analyses.of(programs).get(_shown(run, shared)) is not None

    def _check_promises(self, run: Run, depth: float, leads: bool) -> None:
        """
        Check what the programs promise each other, and where the particles stand.

        :param depth: how many batch dims may belong to plates and leading dims.
        :param leads: whether the run has particles in a leading dim, and no slots.
        """
        check_run(run, depth, self.strict_enumeration)
        check_flows(run)
        if leads:
            check_batch_dims(run.terms, run.nesting)

    def _check_contract(self, execution: Execution, layout: Layout, run: Run) -> None:
        if layout.nesting is None:
            self.check_nesting(run.nesting)
        elif nesting_of(run.guide_trace, run.model_trace) > layout.nesting:
            # Plates without a declared dim have taken dims to the left of the particles'.
            raise ValueError("the programs have more plates than max_plate_nesting says")
        may_sum = not (layout.sums or execution.several or is_messenger(execution.programs))
        if may_sum and has_unsummed_states(run.guide_trace, run.model_trace):
            self._keep(execution.key, _SUMS, True)
            raise _UnsettledError(layout.shared)
        depth = self.declared_nesting
        if layout.nesting is not None:
            depth = layout.nesting + (layout.count is not None)
        leads = layout.count is not None and not execution.several
        self._check_promises(run, depth, leads)

    def _recovered(
        self, execution: Execution, count: int | None, nesting: int, way: Way, error: Exception
    ) -> tuple[int, Way]:
        """Another nesting or way to run with, or what is wrong with the programs."""
        # Either they fail without particles too (then this raises their own error), or their
        # plates have changed since the last step, or they cannot be vectorised in this way.
        actual = self._checked_run(execution.programs).nesting
        self.check_nesting(actual)
        if execution.nesting is None and self._is_open and actual != nesting:
            self._keep(execution.key, _NESTING, actual)
            return actual, way
        sums = count is None and self._known(execution.key, _SUMS)
        name = ENUMERATED if sums else execution.name
        wrong = not_vectorizable(name, count, nesting, error)
        if count is None:
            raise wrong from error
        run = self._look(execution)
        other = self._choose(execution, run)
        if other is way is not Way.BATCHED:
            # What a few particles without gradients can do may be refused of a step: statistics of
            # a batch are written into a buffer.
            other = self._choose(execution, run, wrong)
        if other is Way.LOOPED or other is way:
            raise wrong from error
        return nesting, other

    def _nesting(self, execution: Execution) -> int:
        if execution.nesting is not None:
            return execution.nesting
        if not self._is_open:
            return int(self.declared_nesting)
        nesting = self._known(execution.key, _NESTING)
        if nesting is None:
            nesting = self._checked_run(execution.programs).nesting
            self._keep(execution.key, _NESTING, nesting)
        return int(nesting)

    def _known(self, programs: Programs, key: tuple[str]) -> Any:
        """What this analysis, or the one before, has found."""
        analysis = self.analyses.of(programs)
        return analysis.get(key, analysis.before(key))

    def _keep(self, programs: Programs, key: tuple[str], value: object) -> None:
        self.analyses.of(programs).put(key, value)

    def _choose(self, execution: Execution, run: Run, error: LeadingDimsError | None = None) -> Way:
        """
        Choose how particles are run: the fastest way that has a loop's numbers.

        Tried with a few particles before there are many: programs that broadcast them against each
        other may need memory for the square of their number. What was chosen stays, until other
        sizes show that it is not right for them.

        :param run: shows the programs' plates and sizes.
        :param error: what is wrong with the present way, if it is known.
        :raises LeadingDimsError: if only a loop is right, and is refused.
        """
        programs, name, find = execution.key, execution.name, execution.find_shared
        analysis = self.analyses.of(programs)
        shared = execution.shared if find is None else find(run)
        # What a fresh analysis tries first is the way that the last one chose.
        before: Way | None = self._known(programs, _WAY)
        errors = {} if error is None else {before or Way.BATCHED: error}
        ways = [Way.BATCHED] if is_messenger(programs) else [*_AT_ONCE]
        if before is not None:
            ways = [] if before is Way.LOOPED else ways[ways.index(before) + len(errors) :]
        for way in ways:
            leading = LeadingRun(programs, run, shared, way, name, False, self.refuses_loops)
            try:
                compare_leading_dims(analysis, leading, False)
            except LeadingDimsError as found:
                errors[way] = found
                continue
            break
        else:
            way = Way.LOOPED
            if self.refuses_loops and errors:
                raise next(iter(errors.values()))
        analysis.forget("run")  # all runs are checked again, which are run in another way
        analysis.compared(_WAY, lambda: way)
        analysis.put(_WAY, way)
        if way is not before:
            _tell(programs, way, name, errors)
        return way

    def _look(self, execution: Execution) -> Run:
        """A run without leading dims that shows the plates and sizes to be run with them."""
        programs = execution.programs
        if execution.compared is None:
            run = self._checked_run(programs)
            self.check_nesting(run.nesting)
            if self._is_open:
                self._keep(programs, _NESTING, run.nesting)
            states = has_unsummed_states(run.guide_trace, run.model_trace)
            if states and not (execution.several or is_messenger(programs)):
                self._keep(programs, _SUMS, True)
                run = single_run(programs, self._nesting(execution))
        else:
            run = single_run(execution.compared)
        return replace(run, nesting=self._nesting(execution))

    def _is_new(self, execution: Execution) -> bool:
        return not is_recording() and self.analyses.of(execution.key).is_new

    @property
    def _is_open(self) -> bool:
        return self.declared_nesting == math.inf

    def _checked_run(self, programs: Programs) -> Run:
        return checked_run(programs, self.strict_enumeration)


class _UnsettledError(Exception):
    """Programs share other sites among particles than assumed, or have sites to be summed."""

    def __init__(self, shared: GlobalSites) -> None:
        self.shared, self.names = shared, shared.guide | shared.model


def _without_slots(run: Run) -> GlobalSites:
    """The guide's sites of which a run without particles has one value: others have slots."""
    shared = set()
    for t in (t for t in run.terms if t.in_guide):
        inner = run.nesting + t.site["fn"].event_dim
        if t.site["value"].shape[: -inner or None].numel() == 1:
            shared.add(t.key.name)
    return GlobalSites(frozenset(shared), frozenset(shared))


def _set_back(subsamples: Minibatch, before: Minibatch) -> None:
    subsamples.clear()
    subsamples.update(before)


def _shown(run: Run, shared: GlobalSites) -> tuple[Hashable, ...]:
    """All of a run that guards check."""
    return "run", run.form, run.nesting, run.leading, shared, is_validation_enabled()


def _tell(
    programs: Programs, way: Way, name: LeadingDimsName, errors: dict[Way, LeadingDimsError]
) -> None:
    model = poutine.unwrap(programs.model)
    # Of the two under vmap the first says what the user may mend.
    told = [w for w in errors if w is not Way.BOTH_MAPPED or Way.MAPPED not in errors]
    why = "; ".join(f"{_IN_WORDS[w]}: {errors[w].reason}" for w in told)
    _logger.log(
        logging.WARNING if way is Way.LOOPED else logging.INFO,
        "%s of %s are run %s (%s)",
        name.name,
        getattr(model, "__qualname__", type(model).__qualname__),
        way.value,
        why or "with the densities of a loop",
    )
    for error in errors.values():
        _logger.debug("%s", error)
