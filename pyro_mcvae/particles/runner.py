"""Run model and guide with particles in one batch, under vmap or one by one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.poutine.trace_struct import Trace

from pyro_mcvae.checks.faults import check_flows
from pyro_mcvae.checks.vectorization import (
    ENUMERATED,
    PARTICLES,
    BatchCheck,
    Entries,
    compare_leading_dims,
    compare_states,
    not_vectorizable,
    unstable_sharing,
)
from pyro_mcvae.ops.compat import StopRecomputation
from pyro_mcvae.ops.tensors import is_recording
from pyro_mcvae.programs.contract import (
    check_batch_dims,
    check_nesting,
    check_run,
    nesting_of,
    single_run,
)
from pyro_mcvae.programs.enumeration import has_unsummed_states
from pyro_mcvae.programs.messengers import ALONE, LeadingDims, Minibatch, Substitutes
from pyro_mcvae.programs.run import Programs, Run, is_messenger, run_pair, terms_of
from pyro_mcvae.programs.types import LeadingDimsError, SiteError
from pyro_mcvae.programs.vmap import Mode, particle_plates
from pyro_mcvae.structure.blocks import GlobalSites
from pyro_mcvae.structure.cache import HOW_RUNS, Analyses
from pyro_mcvae.structure.finder import without_auxiliary
from pyro_mcvae.structure.marked import checked_marked_run

# The requested execution, and the layout of its leading dims.

_NONE = GlobalSites()


@dataclass(frozen=True)
class Layout:
    """
    The layout of the leading dims of a run.

    :ivar count: the size of the particles' dim, or None for a run without one.
    :ivar nesting: the number of batch dims of plates; None, in a run without leading dims, to infer
        it from the run.
    :ivar shared: the guide's and the model's sites that all particles share.
    :ivar mode: how the particles are vectorized.
    :ivar sums: whether the model's enumerated sites are summed; then ``nesting`` is known.
    """

    count: int | None
    nesting: int | None
    shared: GlobalSites = _NONE
    mode: Mode = Mode.BATCHED
    sums: bool = False

    def leading(self) -> LeadingDims:
        """Return the leading dims of one run, with new particle plates."""
        if self.nesting is None:
            return ALONE
        dim = -self.nesting - 1
        state_dim = dim - (self.count is not None) if self.sums else None
        if self.count is None:
            return LeadingDims(state_dim=state_dim)
        return particle_plates(self.mode, self.count, dim, self.shared, state_dim)

    def run(self, programs: Programs, substitutes: Substitutes) -> Run:
        """Run both programs with ``substitutes``."""
        leading = self.leading()
        return self.run_of(*run_pair(programs, substitutes, leading), leading, substitutes)

    def run_of(
        self, guide_trace: Trace, model_trace: Trace, leading: LeadingDims, substitutes: Substitutes
    ) -> Run:
        """Return the run of two traces, recorded with these leading dims."""
        nesting = nesting_of(guide_trace, model_trace) if self.nesting is None else self.nesting
        terms = terms_of(guide_trace, model_trace, leading.state_dim, substitutes.defers)
        options = nesting, self.count, substitutes.subsamples, leading.state_dim
        return Run(guide_trace, model_trace, terms, *options, substitutes.noise, self.mode)


@dataclass(frozen=True)
class Execution:
    """
    A requested run of a model and guide.

    :ivar programs: the model and guide.
    :ivar execute: makes the run for a layout, on the minibatch below; None if it is only checked.
    :ivar subsamples: the minibatch; restored before another attempt.
    :ivar shared: the sites that all particles are assumed to share.
    :ivar find_shared: finds these sites from a run; None if they are certain. If they differ from
        the assumed ones, the run is repeated.
    :ivar guesses: whether the assumed sites may be others, although the operations are known.
    :ivar depends: whether a run without leading dims depends on these sites, too.
    :ivar name: what the entries of the leading dims are, for errors.
    :ivar several: whether there may be leading dims (of slots) although ``count`` is None.
    :ivar nesting: the number of batch dims of plates, if known.
    :ivar compared: another model and guide, whose runs with and without leading dims are compared;
        ``execute`` then checks the contract of the programs itself.
    :ivar check: another check of new runs.
    """

    programs: Programs
    execute: Callable[[Layout], Run] | None = None
    subsamples: Minibatch = field(default_factory=Minibatch)
    shared: GlobalSites = _NONE
    find_shared: Callable[[Run], GlobalSites] | None = None
    guesses: bool = False
    depends: bool = True
    name: Entries = PARTICLES
    several: bool = False
    nesting: int | None = None
    compared: Programs | None = None
    check: Callable[[Run], object] | None = None

    @property
    def key(self) -> Programs:
        """Return the model and guide that are checked."""
        return self.compared or self.programs


# Batched execution, for particles, chains, slots, states and evaluators.

_logger = logging.getLogger(__name__)

_MODE, _NESTING, _SUMS = ((kind,) for kind in HOW_RUNS)
_AT_ONCE = Mode.BATCHED, Mode.MAPPED, Mode.BOTH_MAPPED
_IN_WORDS = {
    Mode.BATCHED: "in a leading dim",
    Mode.MAPPED: "under vmap",
    Mode.BOTH_MAPPED: "under vmap, the guide too",
}
# The number of attempts of a step whose structure differs from the assumed one: the operations, the
# nesting, the sums over enumerated sites and the shared sites may each differ once.
_MAX_ATTEMPTS = 5


class Runner:
    """
    Runs all batched executions of one objective or evaluator, and checks them.

    If programs fail, it determines whether they also fail without leading dims, whether their
    plates have changed, or whether they cannot be vectorized. It checks that particles are not
    mistaken for data of the same number, and that their densities are those of a loop.

    :param max_plate_nesting: the number of batch dims of plates; infinite to infer it.
    :param bool strict_enumeration: reject guide sites that are marked for enumeration.
    :param vectorize: True to reject programs that need a loop; False to always loop.
    :param analyses: the cached analyses of the programs.
    """

    def __init__(
        self,
        max_plate_nesting: float,
        strict_enumeration: bool,
        vectorize: bool | None,
        analyses: Analyses,
    ) -> None:
        check_nesting(max_plate_nesting)
        self.declared_nesting = max_plate_nesting
        self.analyses = analyses
        self.strict_enumeration = strict_enumeration
        self._vectorize = vectorize

    @property
    def refuses_loops(self) -> bool:
        """Return whether programs that need a loop are rejected."""
        return self._vectorize is True

    def mode(self, programs: Programs) -> Mode | None:
        """Return how the particles of a model and guide are vectorized; None if not yet chosen."""
        if self._vectorize is False:
            return Mode.LOOPED
        # With vectorize=True, programs may rely on leading dims. And uncompiled steps precede a
        # recorded one, and a check would be recorded.
        at_once = (self.refuses_loops and not self._is_open) or is_recording()
        analysis = self.analyses.of(programs)
        default = (analysis.latest(_MODE) or Mode.BATCHED) if at_once else None
        mode: Mode | None = analysis.get(_MODE, default)
        return mode

    def together(self, execution: Execution) -> bool:
        """
        Return whether several particles share one run, determined at the first execution.

        :param execution: an execution of the programs; its ``execute`` is not called.
        :raises LeadingDimsError: for programs that need a loop, if loops are rejected.
        """
        mode = self.mode(execution.key) or self._choose(execution)
        return mode is not Mode.LOOPED

    def run_together(self, execution: Execution, count: int) -> Run | None:
        """Return one run of several particles; None if they need a loop."""
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
        :raises LeadingDimsError: for programs that cannot run with leading dims, or whose
            densities change with leading dims. The message names the remedy.
        """
        shared, before, attempt = execution.shared, Minibatch(execution.subsamples), 1
        with self.analyses.rewindable(execution.key, execution.guesses) as rewind:
            while True:
                try:
                    result = self._attempt(execution, self._layout(execution, count, shared))
                except LeadingDimsError as error:
                    rewind()  # one seed, one number
                    _restore(execution.subsamples, before)
                    looped = count is None or self.mode(execution.key) is Mode.LOOPED
                    if looped or self._choose(execution, error) is Mode.LOOPED:
                        raise
                    shared = execution.shared
                    continue
                if isinstance(result, Run):
                    return result
                if count is not None and attempt == _MAX_ATTEMPTS:
                    raise unstable_sharing(attempt, result.guide | result.model)
                shared, attempt = result, attempt + 1
                if rewind():
                    # The generators draw the same minibatch again.
                    _restore(execution.subsamples, before)

    def _layout(self, execution: Execution, count: int | None, shared: GlobalSites) -> Layout:
        """Return the layout of a run of ``count`` particles."""
        sums = bool(self.analyses.of(execution.key).latest(_SUMS)) and not execution.several
        if count is None and not execution.several and not sums:
            return Layout(None, None, shared)
        mode = Mode.BATCHED
        if count is not None:
            mode = self.mode(execution.key) or self._choose(execution)
        return Layout(count, self._nesting(execution), shared, mode, sums)

    def _attempt(self, execution: Execution, layout: Layout) -> Run | GlobalSites:
        """Return a checked run; the sites to share if it has to be repeated."""
        shared = layout.shared
        kind = layout.count is None, layout.mode, layout.sums, execution.compared is None
        assert execution.execute is not None
        try:
            run = self.analyses.run(execution.key, kind, partial(execution.execute, layout))
            checked = run is not None and self._is_known(execution.key, run, shared)
            fits = checked or execution.compared is not None
            if run is None or not (fits or self._keeps_contract(execution, layout, run)):
                return shared
        except (SiteError, LeadingDimsError, StopRecomputation):
            raise
        except Exception as error:
            if layout.nesting is None or not self._is_outdated(execution, layout, error):
                raise
            return shared
        actual = shared if execution.find_shared is None else execution.find_shared(run)
        if actual != shared and (execution.depends or run.leading is not None):
            # The wrong sites were drawn once for all particles.
            return actual
        final = without_auxiliary(execution.programs, run, self.analyses)
        if not checked:
            self._check_run(execution, final, shared)
        return final

    def _is_outdated(self, execution: Execution, layout: Layout, error: Exception) -> bool:
        """
        Return whether programs failed with leading dims because they have changed.

        Otherwise the error is their own, or another is raised.

        :raises LeadingDimsError: for programs that fail only with leading dims.
        """
        actual = self._checked_run(execution.programs).nesting
        self.check_nesting(actual)
        if execution.nesting is None and self._is_open and actual != layout.nesting:
            self.analyses.of(execution.key).put(_NESTING, actual)
            return True
        if layout.count is not None:
            single = self._single(execution)
            ran = self.analyses.of(execution.key).latest(_ran_key(single, layout.count))
            if ran or (ran is False and not torch.is_grad_enabled()):
                # What ran at these sizes fails at the values of this step, or is something else.
                batch = BatchCheck(
                    execution.key, single, layout.shared, layout.mode, execution.name
                )
                return batch.fails() and self.analyses.renew(execution.key)
        assert layout.nesting is not None
        name = ENUMERATED if layout.count is None and layout.sums else execution.name
        raise not_vectorizable(name, layout.count, layout.nesting, error) from error

    def check(self, programs: Programs, run: Run, shared: GlobalSites) -> None:
        """Check a run from elsewhere, unless a run of the same structure and sizes was checked."""
        if self._is_known(programs, run, shared):
            return
        leads = run.leading is not None
        depth = run.nesting + 1 if leads else self.declared_nesting
        self._check_pair(run, depth, leads)
        self._check_run(Execution(programs), run, shared)

    def check_nesting(self, nesting: int) -> None:
        """
        Check the number of plate dims against ``max_plate_nesting``.

        :raises ValueError: if the programs have more plates.
        """
        if nesting > self.declared_nesting:
            raise ValueError(
                f"max_plate_nesting={int(self.declared_nesting)}, but the programs have plates in "
                f"{nesting} batch dims: pass max_plate_nesting={nesting} or leave it out"
            )

    def _check_run(self, execution: Execution, run: Run, shared: GlobalSites) -> None:
        """Compare a run with a loop, if it has leading dims, and record it as checked."""
        programs, analysis = execution.key, self.analyses.of(execution.key)
        if run.leading is not None or (execution.several and run.outer_sizes):
            # A run without particles may have other leading dims (of slots), which are compared
            # separately.
            mode = Mode.BATCHED if run.leading is None else self.mode(programs) or Mode.BATCHED
            one = _without_slots(run) if run.leading is None else shared
            batch = BatchCheck(programs, run, one, mode, execution.name)
            compare_leading_dims(analysis, batch, self.refuses_loops)
            if run.leading is not None:
                analysis.put(_MODE, mode)  # the next fresh analysis begins with it
        if any(t.members for t in run.terms):
            compare_states(analysis, programs, run)
        if execution.check is not None:
            execution.check(run)
        analysis.put(_run_key(run, shared), True)
        analysis.put(_ran_key(run, run.leading), torch.is_grad_enabled())

    def _is_known(self, programs: Programs, run: Run, shared: GlobalSites) -> bool:
        """Return whether a run of this form was checked before."""
        if is_recording():
            return True  # uncompiled steps were checked, and a check would be recorded
        return self.analyses.of(programs).get(_run_key(run, shared)) is not None

    def _check_pair(self, run: Run, depth: float, leads: bool) -> None:
        """
        Check that model and guide fit each other, and that particles lie in the leading dim.

        :param depth: the number of batch dims that may belong to plates and leading dims.
        :param leads: whether the run has particles in a leading dim, and no slots.
        """
        check_run(run, depth, self.strict_enumeration)
        check_flows(run)
        if leads:
            check_batch_dims(run.terms, run.nesting)

    def _keeps_contract(self, execution: Execution, layout: Layout, run: Run) -> bool:
        """Check a new run; return whether it has no enumerated sites that another one sums."""
        if layout.nesting is None:
            self.check_nesting(run.nesting)
        elif nesting_of(run.guide_trace, run.model_trace) > layout.nesting:
            # Plates without a declared dim were placed to the left of the particles.
            raise ValueError("the programs have more plates than max_plate_nesting")
        may_sum = not (layout.sums or execution.several or is_messenger(execution.programs))
        if may_sum and has_unsummed_states(run.guide_trace, run.model_trace):
            self.analyses.of(execution.key).put(_SUMS, True)
            self.analyses.forget_run(execution.key)
            return False
        depth = self.declared_nesting
        if layout.nesting is not None:
            depth = layout.nesting + (layout.count is not None)
        leads = layout.count is not None and not execution.several
        self._check_pair(run, depth, leads)
        return True

    def _nesting(self, execution: Execution) -> int:
        if execution.nesting is not None:
            return execution.nesting
        if not self._is_open:
            return int(self.declared_nesting)
        nesting = self.analyses.of(execution.key).latest(_NESTING)
        if nesting is None:
            nesting = self._checked_run(execution.programs).nesting
            self.analyses.of(execution.key).put(_NESTING, nesting)
        return int(nesting)

    def _choose(self, execution: Execution, error: LeadingDimsError | None = None) -> Mode:
        """
        Choose the fastest vectorization that has the densities of a loop.

        Each vectorization is tried with a few particles first, because programs that broadcast
        particles against each other need memory for the square of their number. The choice is kept
        until it fails for other sizes.

        :param error: the error of the present vectorization, if any.
        :raises LeadingDimsError: if only a loop is correct, and loops are rejected.
        """
        programs, name, find = execution.key, execution.name, execution.find_shared
        run = self._single(execution)
        analysis = self.analyses.of(programs)
        shared = execution.shared if find is None else find(run)
        # A fresh analysis first tries the choice of the last one.
        before: Mode | None = analysis.latest(_MODE)
        errors = {} if error is None else {before or Mode.BATCHED: error}
        modes = [Mode.BATCHED] if is_messenger(programs) else [*_AT_ONCE]
        if before is not None:
            modes = [] if before is Mode.LOOPED else modes[modes.index(before) + len(errors) :]
        for mode in modes:
            batch = BatchCheck(programs, run, shared, mode, name, False, self.refuses_loops)
            try:
                compare_leading_dims(analysis, batch, False)
            except LeadingDimsError as failure:
                errors[mode] = failure
                continue
            break
        else:
            mode = Mode.LOOPED
            if self.refuses_loops and errors:
                raise next(iter(errors.values()))
        analysis.forget("run")  # check all runs again with the new vectorization
        analysis.compared(_MODE, lambda: mode)
        analysis.put(_MODE, mode)
        if mode is not before:
            _log_choice(programs, mode, name, errors)
        return mode

    def _single(self, execution: Execution) -> Run:
        """Return a run without leading dims, with the plates and sizes for them."""
        programs = execution.programs
        if execution.compared is None:
            run = self._checked_run(programs)
            self.check_nesting(run.nesting)
            if self._is_open:
                self.analyses.of(programs).put(_NESTING, run.nesting)
            states = has_unsummed_states(run.guide_trace, run.model_trace)
            if states and not (execution.several or is_messenger(programs)):
                self.analyses.of(programs).put(_SUMS, True)
                run = single_run(programs, self._nesting(execution))
        else:
            run = single_run(execution.compared)
        return replace(run, nesting=self._nesting(execution))

    @property
    def _is_open(self) -> bool:
        return self.declared_nesting == math.inf

    def _checked_run(self, programs: Programs) -> Run:
        return checked_marked_run(programs, self.strict_enumeration)


def _without_slots(run: Run) -> GlobalSites:
    """Return the guide's sites without slots in a run without particles."""
    inner = ((t, run.nesting + t.site["fn"].event_dim) for t in run.terms if t.in_guide)
    shared = (t.key.name for t, n in inner if t.site["value"].shape[: -n or None].numel() == 1)
    return GlobalSites(*[frozenset(shared)] * 2)


def _restore(subsamples: Minibatch, before: Minibatch) -> None:
    subsamples.clear()
    subsamples.update(before)


def _run_key(run: Run, shared: GlobalSites) -> tuple[Hashable, ...]:
    """Return the cache key of a checked run: everything that the checks depend on."""
    return "run", run.form, run.nesting, run.leading, shared, is_validation_enabled()


def _ran_key(run: Run, count: int | None) -> tuple[Hashable, ...]:
    """Return the key under which runs of several particles are known to work."""
    return "run", run.signature, count


def _log_choice(
    programs: Programs, mode: Mode, name: Entries, errors: dict[Mode, LeadingDimsError]
) -> None:
    model = poutine.unwrap(programs.model)
    # The first vmap error is usually the one that the user can fix.
    reported = [w for w in errors if w is not Mode.BOTH_MAPPED or Mode.MAPPED not in errors]
    why = "; ".join(f"{_IN_WORDS[w]}: {errors[w].reason}" for w in reported)
    _logger.log(
        logging.WARNING if mode is Mode.LOOPED else logging.INFO,
        "%s of %s run %s (%s)",
        name.name,
        getattr(model, "__qualname__", type(model).__qualname__),
        mode.value,
        why or "this gives the densities of a loop",
    )
    for error in errors.values():
        _logger.debug("%s", error)
