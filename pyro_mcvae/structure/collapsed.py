"""Guide sites whose draws reach no data, which see the guide's parameters instead."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.run import Run
from pyro_mcvae.structure.dependencies import Dependencies, dependencies_of


def find_collapsed(
    programs: Programs, run: Run, names: frozenset[str], known: Dependencies | None = None
) -> tuple[str, str] | None:
    """
    A guide site that reaches no data, and an observed site that has its parameters instead.

    :param names: the guide's random sites.
    :param known: what has been found out about them already.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # programs that cannot be tracked tell nothing
        found = known or dependencies_of(programs, names, run)
    observed = {
        t.key
        for t in run.terms
        if not t.in_guide and any(factor.site["is_observed"] for factor in t.sites)
    }
    lost = names - _reaching(found, observed)
    if not lost:
        return None
    own = {n: found.parameters.get(FactorKey("guide", n), frozenset()) for n in names}
    # What a draw that reaches data has too says nothing: networks of several sites, tied weights.
    others = frozenset().union(*(own[n] for n in names - lost))
    for key in observed:
        for name in sorted(lost):
            if (own[name] - others) & found.parameters.get(key, frozenset()):
                return name, key.name
    return None


def _reaching(found: Dependencies, observed: set[FactorKey]) -> set[str]:
    """The draws that some data depend on, if through others in the model."""
    factors: Mapping[FactorKey, frozenset[str]] = found.factors
    reached = {name for key in observed for name in factors.get(key, frozenset())}
    before = -1
    while len(reached) != before:
        before = len(reached)
        for parents in factors.values():
            if parents & reached:
                reached |= parents
    return reached
