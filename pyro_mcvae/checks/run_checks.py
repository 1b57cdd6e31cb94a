"""The guards of runs: each looks once at each pair of programs, structure and sizes."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field

from pyro.infer.util import is_validation_enabled

from pyro_mcvae.checks.flows import check_flows
from pyro_mcvae.checks.leading_dims import LeadingDimsName
from pyro_mcvae.checks.states import check_states
from pyro_mcvae.checks.vectorization import check_count, check_vectorization
from pyro_mcvae.ops.recording import is_recording
from pyro_mcvae.programs.contract import check_batch_dims, check_run
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.mapping import Way
from pyro_mcvae.programs.run import Run
from pyro_mcvae.structure.blocks import GlobalSites
from pyro_mcvae.structure.cache import PairCache

__all__ = ["RunChecks"]

_logger = logging.getLogger(__name__)

# Programs of stochastic structure show ever new sizes: of a pair of programs, so many are compared
# at once, and of those that follow one in so many.
_AT_ONCE, _THEN_ONE_IN = 64, 16
# Before what was looked at is forgotten, and looked at again.
_MAX_SEEN = 1024


@dataclass
class _Seen:
    """What was looked at of one pair of programs."""

    runs: set[Hashable] = field(default_factory=set)
    compared: set[Hashable] = field(default_factory=set)


class RunChecks:
    """
    The guards of runs, each of which looks once at each pair of programs, structure and sizes.

    :param bool strict_enumeration: refuse guide sites that are marked for enumeration.
    """

    def __init__(self, strict_enumeration: bool) -> None:
        self.strict_enumeration = strict_enumeration
        self._seen: PairCache[_Seen] = PairCache(_Seen)

    def is_known(self, programs: Programs, run: Run, shared: GlobalSites) -> bool:
        """
        Whether such a run was looked at by all guards.

        :param shared: the guide's and the model's sites that all particles share.
        """
        if is_recording():
            return True  # plain steps of the same kind were looked at, and a look would be recorded
        return _shown(programs, run, shared) in self._seen.of(programs).runs

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

    def check_leading_dims(
        self,
        programs: Programs,
        run: Run,
        shared: GlobalSites,
        way: Way,
        name: LeadingDimsName,
        ran: bool = True,
        mixes: bool = True,
    ) -> None:
        """
        Check that leading dims are what a loop would be.

        :param way: how they are run.
        :param name: what stands in them.
        :param ran: whether ``run`` has them; otherwise it shows what is to be run with them.
        :param mixes: whether batch normalisation may take what stands in them for one batch.
        :raises LeadingDimsError: as :func:`check_count` and :func:`check_vectorization`.
        """
        for count in sorted(run.outer_sizes & run.inner_sizes):
            check_count(programs, run, count, shared, way, name)
        compared = self._seen.of(programs).compared
        # Not how many particles there are: they are compared in a number of their own.
        sizes = run.signature, run.sizes, shared, programs.flags, way
        if sizes in compared:
            return
        if len(compared) == _AT_ONCE:
            _logger.warning(
                "the programs have shown %d sets of sizes, each of which was compared with a loop "
                "over its %s; of those to come, one in %d is",
                _AT_ONCE,
                name.name,
                _THEN_ONE_IN,
            )
        if len(compared) < _AT_ONCE or len(compared) % _THEN_ONE_IN == 0:
            check_vectorization(programs, run, shared, way, name, ran, mixes)
        compared.add(sizes)

    def check_states(self, programs: Programs, run: Run) -> None:
        """Check that a run whose states are summed has the densities of single states."""
        compared = self._seen.of(programs).compared
        sizes = "states", run.signature, run.sizes, programs.flags
        if sizes not in compared:
            check_states(programs, run)
            compared.add(sizes)

    def remember(self, programs: Programs, run: Run, shared: GlobalSites) -> None:
        """Take a run for one that was looked at."""
        runs = self._seen.of(programs).runs
        if len(runs) >= _MAX_SEEN:
            runs.clear()
        runs.add(_shown(programs, run, shared))

    def forget(self, programs: Programs) -> None:
        """Look at all runs of a pair again, which are run in another way."""
        self._seen.of(programs).runs.clear()


def _shown(programs: Programs, run: Run, shared: GlobalSites) -> Hashable:
    """All of a run that guards look at."""
    layout = run.nesting, run.leading, shared
    return run.form, layout, programs.flags, is_validation_enabled()
