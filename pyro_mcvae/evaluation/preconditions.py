"""Programs whose evidence importance sampling cannot estimate are refused, before any weight."""

from __future__ import annotations

import logging
from collections.abc import Collection

from pyro_mcvae.coordinates.chain_checks import named
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.plates import is_subsampled
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_delta, is_latent, is_random, is_scored
from pyro_mcvae.structure import dependencies
from pyro_mcvae.truncated.draws import drawn_from_states

__all__ = [
    "check_blocks",
    "check_draws",
    "check_no_local_points",
    "check_no_minibatch",
    "check_observed",
    "check_points",
    "find_points",
]

_logger = logging.getLogger(__name__)


def find_points(programs: Programs, run: Run) -> frozenset[str]:
    """The guide's point masses, but for those that follow from a random draw of the guide."""
    sites = [t.site for t in run.terms if t.in_guide and is_latent(t.site)]
    points = {s["name"] for s in sites if is_delta(s["fn"])}
    names = frozenset(s["name"] for s in sites if is_random(s))
    if points and names:
        found = dependencies.find_dependencies(programs, names, run.subsamples)
        points = {n for n in points if not found.factors.get(FactorKey("guide", n), names)}
    return frozenset(points)


def check_observed(run: Run) -> None:
    """
    Log that a model observes nothing.

    :raises ValueError: where the guide does, as with model and guide exchanged.
    """
    factors = (t for term in run.terms if not term.in_guide for t in term.sites)
    if any(t.site["is_observed"] for t in factors):
        return
    nodes = run.guide_trace.nodes
    observed = [n for n, s in nodes.items() if is_scored(s) and s["is_observed"]]
    if observed:
        raise ValueError(
            f"the model observes nothing, and the guide observes site '{observed[0]}': pass "
            f"the model first and the guide second"
        )
    _logger.warning(
        "the model observes nothing, so that its log evidence is 0: pass obs= to pyro.sample, "
        "or use poutine.condition"
    )


def check_draws(run: Run, points: frozenset[str]) -> None:
    """
    :raises ValueError: for a guide of point masses alone. One that draws nothing is exact: the
        model has no latents but those that are summed. And for one that draws from a part of the
        posterior, whose weights would be equal and say nothing of the rest.
    """
    sites = [t.site for t in run.terms if t.in_guide]
    if points and not any(map(is_random, sites)):
        what = f" (its site{named(tuple(sorted(points)))} a point mass)"
        raise ValueError(
            f"the guide draws no random latent{what}, and importance sampling from a single "
            f"point says nothing about the evidence: log p(x, z) at the point, which AutoDelta "
            f"maximises, is no bound on log p(x). Use a guide that draws, such as AutoNormal, or "
            f"AutoLaplaceApproximation(model).laplace_approximation(...) around that point"
        )
    for name in (n for site in sites for n in drawn_from_states(site)):
        raise ValueError(
            f"site '{name}' is drawn from a TruncatedPosterior inside of another guide, of whose "
            f"states alone the weights would tell: pass the TruncatedPosterior as the guide, and "
            f"what draws the other latents as its guide="
        )


def check_points(reference: WeightedParticles, points: frozenset[str]) -> None:
    """
    :raises ValueError: for a point mass that each datum has.
    """
    structure = reference.structure
    blocks = {n: structure.block_of.get(FactorKey("guide", n)) for n in points}
    check_no_local_points(
        {n for n, b in blocks.items() if b is not None and structure.blocks[b].plates}
    )


def check_no_local_points(points: Collection[str]) -> None:
    """
    :raises ValueError: for any point mass inside of the data's plates.
    """
    for name in sorted(points):
        raise ValueError(
            f"site '{name}' of the guide is a point mass inside of the data's plates: "
            f"importance sampling never sees any other value of it. Give it a "
            f"distribution, or observe it in the model"
        )


def check_no_minibatch(run: Run, drawn: tuple[str, ...]) -> None:
    """
    :raises ValueError: for a part of the data, which all share the latents ``drawn``.
    """
    for term in run.terms:
        for frame in term.site["cond_indep_stack"]:
            if is_subsampled(frame):
                raise ValueError(
                    f"the guide's site{named(drawn)} shared by data of several minibatches, so "
                    f"that all data have one evidence together, but plate '{frame.name}' is "
                    f"subsampled ({frame.size} of {frame.full_size}). Pass the full data; or "
                    f"joint=False, for the evidence of each datum given one draw of "
                    f"{', '.join(map(repr, drawn))}"
                )


def check_blocks(reference: WeightedParticles) -> None:
    """
    :raises ValueError: where no latent can be weighed by itself.
    """
    if not reference.blocks:
        terms = reference.runs[0].terms
        plate = next(f for t in terms for f in t.site["cond_indep_stack"] if is_subsampled(f))
        raise ValueError(
            f"no latent of the guide can be weighed by itself, because the subsampled plate "
            f"'{plate.name}' ({plate.size} of {plate.full_size}) does not enclose them: pass "
            f"the full data"
        )
