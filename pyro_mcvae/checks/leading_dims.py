"""Looks at every run with leading dims, once for each pair of programs and the sizes it shows."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from pyro_mcvae.checks.vectorization import check_count, check_vectorization
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.run import Run
from pyro_mcvae.structure.blocks import GlobalSites
from pyro_mcvae.structure.cache import StructureCache

__all__ = ["PARTICLES", "SLOTS", "STATES", "LeadingDimsCheck", "LeadingDimsName"]

_logger = logging.getLogger(__name__)

# Programs of stochastic structure show ever new sizes: of a pair of programs, so many are compared
# at once, and of those that follow one in so many.
_AT_ONCE, _THEN_ONE_IN = 64, 16
# Before what was looked at is forgotten, and looked at again.
_MAX_SEEN = 1024


class LeadingDimsName(NamedTuple):
    """
    What stands in leading dims, for errors.

    :ivar remedy: what to do without them, to be followed by another remedy.
    """

    name: str
    remedy: str


PARTICLES = LeadingDimsName("vectorised particles", "Pass vectorize_particles=False, or")
STATES = LeadingDimsName("states side by side", "Pass vectorize_particles=False, or")
SLOTS = LeadingDimsName(
    "slots (several values of a discrete site) and of vectorised particles",
    "Pass num_categories=0, num_samples=1 and vectorize_particles=False, or",
)


@dataclass
class _Seen:
    """What was looked at of one pair of programs."""

    runs: set[Hashable] = field(default_factory=set)
    compared: set[Hashable] = field(default_factory=set)


class LeadingDimsCheck:
    """
    The guards of runs with leading dims: the sizes that could be taken for each other, and the
    densities of particles run one by one. Looked at once for each structure and sizes.
    """

    def __init__(self) -> None:
        self._seen: StructureCache[_Seen] = StructureCache()

    def check(
        self,
        programs: Programs,
        run: Run,
        shared: GlobalSites,
        name: LeadingDimsName,
    ) -> None:
        """
        Check a run.

        :param shared: the guide's and the model's sites that all particles share.
        :param name: what stands in the leading dims.
        :raises RuntimeError: as :func:`check_count` and :func:`check_vectorization`.
        """
        seen = self._seen.of(programs, None, _Seen, renew=False)
        shown = run.signature, run.sizes, shared, run.leading
        if shown not in seen.runs:
            self._look(programs, run, shared, name, seen)
            if len(seen.runs) >= _MAX_SEEN:
                seen.runs.clear()
            seen.runs.add(shown)

    def _look(
        self,
        programs: Programs,
        run: Run,
        shared: GlobalSites,
        name: LeadingDimsName,
        seen: _Seen,
    ) -> None:
        for count in sorted(run.outer_sizes & run.inner_sizes):
            check_count(programs, run, count, shared, *name)
        # Not how many particles there are: they are compared in a number of their own.
        sizes = run.signature, run.sizes, shared
        if sizes in seen.compared:
            return
        number = len(seen.compared)
        if number == _AT_ONCE:
            _logger.warning(
                "the programs have shown %d sets of sizes, each of which was compared with a loop "
                "over its %s; of those to come, one in %d is",
                _AT_ONCE,
                name.name,
                _THEN_ONE_IN,
            )
        if number < _AT_ONCE or number % _THEN_ONE_IN == 0:
            check_vectorization(programs, run, shared, *name)
        seen.compared.add(sizes)
