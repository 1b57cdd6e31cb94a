"""The place that runs programs with leading dims: particles, chains, slots, states, judges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.utils.checkpoint import _StopRecomputationError

from pyro_mcvae.checks.run_checks import ENUMERATED, PARTICLES, LeadingDimsName, RunChecks
from pyro_mcvae.particles.layout import Layout
from pyro_mcvae.programs.contract import check_nesting
from pyro_mcvae.programs.enumeration import shows_states
from pyro_mcvae.programs.errors import SiteError
from pyro_mcvae.programs.execution import Programs, is_messenger
from pyro_mcvae.programs.isolation import rewindable
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.nesting import find_nesting
from pyro_mcvae.programs.run import Run
from pyro_mcvae.structure.auxiliary import AuxiliaryDraws
from pyro_mcvae.structure.blocks import GlobalSites

__all__ = ["Execution", "Runner"]

# How often a step is begun again when its structure turns out to be another than assumed.
_MAX_ATTEMPTS = 3
_NONE = GlobalSites()


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


class Runner:
    """
    Makes the runs of one objective or judge, and knows how many batch dims their plates occupy.

    Whatever runs with leading dims runs here, and only here it is looked at: whether programs that
    fail do so without leading dims too, have other plates than before, or cannot be vectorised;
    whether particles are taken for data of which there are as many; whether their densities are
    those of a loop.

    :param max_plate_nesting: how many batch dims belong to plates; infinite to find out.
    :param bool strict_enumeration: refuse guide sites that are marked for enumeration.
    """

    def __init__(
        self, max_plate_nesting: float = math.inf, strict_enumeration: bool = True
    ) -> None:
        check_nesting(max_plate_nesting)
        self.declared_nesting = max_plate_nesting
        self.checks = RunChecks(strict_enumeration)
        self.auxiliary = AuxiliaryDraws()
        self._found_nesting: int | None = None
        # Whether a model has shown sites to be summed. Then all run so, and the first run, which
        # did not, has been made again.
        self._sums = self._has_run = False

    def run(self, execution: Execution, count: int | None) -> Run:
        """
        Make one run.

        :param count: the size of the particles' dim; None for a run without one.
        :raises RuntimeError: for programs that cannot be run with leading dims, or are others with
            them, naming the remedy.
        """
        shared, before = execution.shared, Minibatch(execution.subsamples)
        with rewindable(execution.rewinds or not self._has_run) as rewind:
            for attempt in itertools.count(1):
                try:
                    run, known = self._attempt(execution, count, shared)
                except _StatesFound:
                    self._sums = True
                    if rewind():
                        _set_back(execution.subsamples, before)
                    continue
                found = shared if execution.find_shared is None else execution.find_shared(run)
                if found == shared:
                    break
                if count is not None and attempt == _MAX_ATTEMPTS:
                    raise _unsettled(found)
                # Shared sites were drawn once per particle, or others once: run again on the same
                # minibatch, which the generators draw again if they are set back.
                shared = found
                if rewind():
                    _set_back(execution.subsamples, before)
        self._has_run = True
        settled = self.auxiliary.settle(execution.programs, run)
        if not known:
            programs = execution.compared or execution.programs
            if count is not None or (execution.several and run.outer_sizes):
                self.checks.check_leading_dims(programs, settled, shared, execution.name)
            if any(t.members for t in run.terms):
                self.checks.check_states(programs, run)
            self.checks.remember(programs, run, shared)
        return settled

    def check(
        self,
        programs: Programs,
        run: Run,
        shared: GlobalSites,
        name: LeadingDimsName = PARTICLES,
    ) -> None:
        """Look at a run that was made elsewhere, if none of its structure and sizes was."""
        if self.checks.is_known(programs, run, shared):
            return
        leads = run.leading is not None
        depth = run.nesting + 1 if leads else self.declared_nesting
        self.checks.check_contract(run, depth, leads)
        if leads:
            self.checks.check_leading_dims(programs, run, shared, name)
        self.checks.remember(programs, run, shared)

    def check_nesting(self, nesting: int) -> None:
        """
        :raises ValueError: if the programs have more plates than ``max_plate_nesting`` says.
        """
        if nesting > self.declared_nesting:
            raise ValueError(
                f"max_plate_nesting={int(self.declared_nesting)}, but the programs have plates in "
                f"{nesting} batch dims: pass max_plate_nesting={nesting} or leave it out"
            )

    def _attempt(
        self, execution: Execution, count: int | None, shared: GlobalSites
    ) -> tuple[Run, bool]:
        """A run, and whether all guards have seen its like."""
        sums = self._sums and not execution.several
        if count is None and not execution.several and not sums:
            return self._execute(execution, Layout(None, None, shared))
        nesting = self._nesting(execution)
        before = Minibatch(execution.subsamples)
        try:
            return self._execute(execution, Layout(count, nesting, shared, sums))
        except (SiteError, _StatesFound, _StopRecomputationError):
            raise
        except Exception as error:
            actual = self._recovered(execution, count, nesting, error)
            _set_back(execution.subsamples, before)
        return self._execute(execution, Layout(count, actual, shared, sums))

    def _execute(self, execution: Execution, layout: Layout) -> tuple[Run, bool]:
        run = execution.execute(layout)
        if layout.nesting is None:
            self.check_nesting(run.nesting)
        programs = execution.compared or execution.programs
        known = self.checks.is_known(programs, run, layout.shared)
        if not known and execution.compared is None:
            if not (layout.sums or execution.several or is_messenger(execution.programs)):
                _look_for_states(run)
            depth = self.declared_nesting
            if layout.nesting is not None:
                depth = layout.nesting + (layout.count is not None)
            leads = layout.count is not None and not execution.several
            self.checks.check_contract(run, depth, leads)
        return run, known

    def _recovered(
        self, execution: Execution, count: int | None, nesting: int, error: Exception
    ) -> int:
        """Another nesting to run with, or what is wrong with the programs."""
        # Either they fail without particles too (then this raises their own error), or their
        # plates have changed since the last step, or they cannot be vectorised.
        actual = self._find_nesting(execution.programs)
        self.check_nesting(actual)
        if execution.nesting is None and self._is_open and actual != nesting:
            self._found_nesting = actual
            return actual
        name = ENUMERATED if self._sums and count is None else execution.name
        raise _not_vectorizable(name, count, nesting, error) from error

    def _nesting(self, execution: Execution) -> int:
        if execution.nesting is not None:
            return execution.nesting
        if not self._is_open:
            return int(self.declared_nesting)
        if self._found_nesting is None:
            self._found_nesting = self._find_nesting(execution.programs)
        return self._found_nesting

    @property
    def _is_open(self) -> bool:
        return self.declared_nesting == math.inf

    def _find_nesting(self, programs: Programs) -> int:
        return find_nesting(programs, self.checks.strict_enumeration)


class _StatesFound(Exception):
    """A model has drawn sites that are to be summed."""


def _look_for_states(run: Run) -> None:
    if shows_states(run.guide_trace, run.model_trace):
        raise _StatesFound


def _unsettled(shared: GlobalSites) -> RuntimeError:
    return RuntimeError(
        f"the programs show other global sites in each of {_MAX_ATTEMPTS} runs on the same "
        f"minibatch (now {sorted(shared.guide | shared.model)}), so the particles cannot be "
        f"vectorised: pass vectorize_particles=False"
    )


def _not_vectorizable(
    name: LeadingDimsName, count: int | None, nesting: int, error: Exception
) -> RuntimeError:
    several = f"{count} {name.name}" if count is not None else name.name
    return RuntimeError(
        f"the model or the guide cannot be run with {several} in batch dim {-nesting - 1}, to the "
        f"left of its plates, though it runs with one. {name.remedy} make it broadcast over "
        f"leading dims: index from the right, as in z[..., 0], or means[..., group] in the place "
        f"of means[group] (Vindex for tables). {name.sizes if 'must match' in str(error) else ''}"
        f"The error was: {type(error).__name__}: {error}"
    )


def _set_back(subsamples: Minibatch, before: Minibatch) -> None:
    subsamples.clear()
    subsamples.update(before)
