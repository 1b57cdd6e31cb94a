"""The guards of runs: each looks once at each pair of programs, structure and sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from pyro.infer.util import is_validation_enabled

from pyro_mcvae.checks.flows import check_flows
from pyro_mcvae.checks.leading_dims import NotComparedError
from pyro_mcvae.checks.vectorization import LeadingRun, check_states
from pyro_mcvae.ops.recording import is_recording
from pyro_mcvae.programs.contract import check_batch_dims, check_run
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.run import Run
from pyro_mcvae.structure.blocks import GlobalSites
from pyro_mcvae.structure.cache import Analyses

__all__ = ["RunChecks"]

_logger = logging.getLogger(__name__)

# Programs of stochastic structure show ever new sizes: so many are compared at once, and of those
# that follow one in so many.
_AT_ONCE, _THEN_ONE_IN = 64, 16


class RunChecks:
    """
    The guards of runs, each of which looks once at each structure and size of an analysis.

    :param bool strict_enumeration: refuse guide sites that are marked for enumeration.
    :param analyses: what is known of the programs.
    :param bool declared: whether the user says that the programs broadcast over leading dims, which
        is trusted, with a warning, where they cannot be compared with runs of one.
    """

    def __init__(
        self, strict_enumeration: bool, analyses: Analyses, declared: bool = False
    ) -> None:
        self.strict_enumeration = strict_enumeration
        self._analyses, self._declared = analyses, declared

    def is_known(self, programs: Programs, run: Run, shared: GlobalSites) -> bool:
        """
        Return whether such a run was checked by all guards.

        :param shared: the guide's and the model's sites that all particles share.
        """
        if is_recording():
            return True  # plain steps of the same kind were checked, and a check would be recorded
        return self._analyses.of(programs).get(_shown(run, shared)) is not None

    def check_contract(self, run: Run, depth: float, leads: bool) -> None:
        """
        Check what the programs promise each other, and where the particles stand.

        :param depth: how many batch dims may belong to plates and leading dims.
        :param leads: whether the run has particles in a leading dim, and no slots.
        """
        check_run(run, depth, self.strict_enumeration)
        check_flows(run)
        if leads:
            check_batch_dims(run.terms, run.nesting)

    def check_leading_dims(self, leading: LeadingRun) -> None:
        """
        Check that leading dims are what a loop would be.

        :raises LeadingDimsError: as :class:`LeadingRun`.
        """
        programs, run = leading.programs, leading.run
        for count in sorted(run.outer_sizes & run.inner_sizes):
            leading.check_count(count)
        # Not how many particles there are: they are compared in a number of their own.
        key = "compared", run.signature, run.sizes, leading.shared, leading.way

        def compare() -> None:
            try:
                leading.check(thorough=not self._analyses.of(programs).before(key))
            except NotComparedError as error:
                if not (self._declared and leading.ran):
                    raise
                _logger.warning("%s (vectorize_particles=True is trusted)", error)

        self._once_of_many(programs, key, compare, leading.name.name)

    def check_states(self, programs: Programs, run: Run) -> None:
        """Check that a run whose states are summed has the densities of single states."""
        key = "compared", "states", run.signature, run.sizes
        self._once_of_many(programs, key, lambda: check_states(programs, run), "states")

    def _once_of_many(
        self, programs: Programs, key: tuple[Hashable, ...], compare: Callable[[], None], name: str
    ) -> None:
        analysis = self._analyses.of(programs)
        if analysis.get(key) is not None:
            return
        number = analysis.count("compared")
        if number == _AT_ONCE:
            _logger.warning(
                "the programs have shown %d sets of sizes, each of which was compared with a loop "
                "over its %s; of those to come, one in %d is",
                _AT_ONCE,
                name,
                _THEN_ONE_IN,
            )
        if number < _AT_ONCE or number % _THEN_ONE_IN == 0:
            compare()
        analysis.put(key, True)

    def remember(self, programs: Programs, run: Run, shared: GlobalSites) -> None:
        """Take a run for one that was checked."""
        self._analyses.of(programs).put(_shown(run, shared), True)

    def forget(self, programs: Programs) -> None:
        """Check all runs of a pair again, which are run in another way."""
        self._analyses.of(programs).forget("run")


def _shown(run: Run, shared: GlobalSites) -> tuple[Hashable, ...]:
    """All of a run that guards check."""
    return "run", run.form, run.nesting, run.leading, shared, is_validation_enabled()
