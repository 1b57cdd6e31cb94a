"""The comparisons of runs: once for each structure and size of an analysis."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from pyro_mcvae.checks.leading_dims import NotComparedError
from pyro_mcvae.checks.vectorization import LeadingRun, check_states
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.run import Run
from pyro_mcvae.structure.cache import Analysis

_logger = logging.getLogger(__name__)

# Programs of stochastic structure show ever new sizes: so many are compared at once, and of those
# that follow one in so many.
_AT_ONCE, _THEN_ONE_IN = 64, 16


def compare_leading_dims(analysis: Analysis, leading: LeadingRun, trusted: bool) -> None:
    """
    Check that leading dims are what a loop would be.

    :param bool trusted: whether the user says that the programs broadcast over leading dims; then
        a warning tells if they cannot be compared with runs of one.
    :raises LeadingDimsError: as :class:`LeadingRun`.
    """
    run = leading.run
    for count in sorted(run.outer_sizes & run.inner_sizes):
        leading.check_count(count)
    # Not how many particles there are: they are compared in a number of their own.
    key = "compared", run.signature, run.sizes, leading.shared, leading.way

    def compare() -> None:
        try:
            leading.check(thorough=not analysis.before(key))
        except NotComparedError as error:
            if not (trusted and leading.ran):
                raise
            _logger.warning("%s (vectorize_particles=True is trusted)", error)

    _once_of_many(analysis, key, compare, leading.name.name)


def compare_states(analysis: Analysis, programs: Programs, run: Run) -> None:
    """Check that a run whose states are summed has the densities of single states."""
    key = "compared", "states", run.signature, run.sizes
    _once_of_many(analysis, key, lambda: check_states(programs, run), "states")


def _once_of_many(
    analysis: Analysis, key: tuple[Hashable, ...], compare: Callable[[], None], name: str
) -> None:
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
