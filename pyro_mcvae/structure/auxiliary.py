"""Draws of a guide that the model does not have: whether their density is one of its latents."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

from pyro.poutine.trace_struct import Trace

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_delta, is_latent, is_random, known_support
from pyro_mcvae.structure.cache import Analysis
from pyro_mcvae.structure.dependencies import dependencies_of


def without_auxiliary(programs: Programs, run: Run, analysis: Analysis) -> Run:
    r"""
    A run without the density of auxiliary draws that are no latents.

    AutoGuides draw u and make :math:`z = f(u)` of it, a point mass with the logarithm of f's
    Jacobian: log q(u) is part of log q(z). But a guide that draws u, and then z from q(z | u), has
    the marginal :math:`\int q(u) q(z \mid u)\, du`. With log q(u) in the weight each u would count
    for the latents once more: a mixture of M components would have M times the evidence. Without
    it, the weight p(x, z) / q(z | u) has the mean p(x) for every u whose q(z | u) reaches all z.
    """
    drawn = tuple(t.key.name for t in run.terms if t.in_guide and is_random(t.site))
    left_out = frozenset(drawn) - _latents(run.model_trace)
    points = tuple(_points(run)) if left_out else ()
    if points:
        left_out -= analysis.once(
            ("auxiliary", drawn, points), lambda: _behind(programs, run, frozenset(drawn), points)
        )
    if not left_out:
        return run
    terms = (t.without_density() if t.in_guide and t.key.name in left_out else t for t in run.terms)
    return replace(run, terms=tuple(terms))


def _latents(trace: Trace) -> set[str]:
    return {name for name, site in trace.nodes.items() if is_latent(site)}


def _points(run: Run) -> Iterator[str]:
    latents = _latents(run.model_trace)
    for term in run.terms:
        point = term.in_guide and is_latent(term.site) and is_delta(term.site["fn"])
        if point and term.key.name in latents:
            yield term.key.name


def _behind(
    programs: Programs, run: Run, drawn: frozenset[str], points: tuple[str, ...]
) -> frozenset[str]:
    """The draws from which point masses of their own kind, discrete or not, were computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing changes where it cannot be traced
        found = dependencies_of(programs, drawn, run)
    guide, model = run.guide_trace.nodes, run.model_trace.nodes
    behind: set[str] = set()
    for point in points:
        # A label that only chooses among maps of another draw is no part of a density in z.
        discrete = known_support(model[point]["fn"]).is_discrete
        parents = found.factors.get(FactorKey("guide", point), drawn)
        behind |= {n for n in parents if known_support(guide[n]["fn"]).is_discrete == discrete}
    return frozenset(behind)
