"""
Whether data bypass the guide's draws: see its parameters, and no draw.

Pyro's ``VariationalGP`` and ``VariationalSparseGP`` integrate over their latent in closed form: the
density of the data is that under the guide's mean and covariance, whatever was drawn. In a mean of
log weights this is the ELBO. In a log of mean weights the draw meets its prior alone, of which the
mean is 1: the divergence vanishes, and what remains is no bound.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from pyro_mcvae.tracing.runs import Programs, Run
from pyro_mcvae.tracing.scout import Dependencies, find_dependencies
from pyro_mcvae.tracing.structure import FactorKey, Structure

__all__ = ["check_no_bypass", "find_bypass"]


def find_bypass(
    programs: Programs, run: Run, names: frozenset[str], known: Dependencies | None = None
) -> tuple[str, str] | None:
    """
    A guide site that reaches no data, and an observed site that has its parameters instead.

    :param names: the guide's random sites.
    :param known: what has been found out about them already.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # programs that cannot be tracked tell nothing
        found = known or find_dependencies(programs, names, run.subsamples)
    observed = {t.key for t in run.terms if not t.in_guide and t.site["is_observed"]}
    lost = names - _reaching(found, observed)
    for key in observed:
        if not lost or found.factors.get(key, names):
            continue
        for name in sorted(lost):
            own = found.parameters.get(FactorKey("guide", name), frozenset())
            if own & found.parameters.get(key, frozenset()):
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


def check_no_bypass(structure: Structure) -> None:
    """
    Check that the draws may be weighed.

    :raises ValueError: naming the site that has the guide's parameters in the place of its draws.
    """
    if structure.bypass is not None and structure.blocks:
        latent, data = structure.bypass
        raise ValueError(
            f"site '{data}' of the model has the parameters of the guide's site '{latent}' in it "
            f"and not its draws, as where the latent is integrated in closed form (VariationalGP, "
            f"VariationalSparseGP). Weights of such draws are no bound on the evidence: use "
            f"TraceSGVB_ELBO, or a model that reads its latent, as in x = f({latent})"
        )
