"""A model replayed at other values of its latents, in one handler, with what its sites showed."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import replace

from pyro.poutine.trace_struct import Trace

from pyro_mcvae.programs.execution import Programs, run_model, with_changes
from pyro_mcvae.programs.messengers import ParticlePlate, Substitutes
from pyro_mcvae.programs.run import Run, terms_of
from pyro_mcvae.programs.state_sums import summed_terms
from pyro_mcvae.programs.terms import (
    Term,
    guide_term,
    model_term,
    scored,
    site_form,
)
from pyro_mcvae.programs.types import Site, SiteChanges
from pyro_mcvae.programs.validation import unvalidated, was_checked

__all__ = ["replay_model"]


def replay_model(
    programs: Programs,
    run: Run,
    changes: SiteChanges,
    leading: ParticlePlate | None = None,
) -> tuple[Run, bool]:
    """
    Run the model with other values of the guide's draws, on the same minibatch.

    An execution that shows the sites and plates of ``run`` is of its structure, and what was found
    or checked there still holds; only the densities are computed. Another one is collected in full.

    :param run: an execution of both programs; its guide depends on none of its draws. What its
        model drew apart from its sites is the same again.
    :param changes: by guide site, the fields that change.
    :param leading: the particles' plate for the model.
    :returns: the new execution, and whether it has the sites and plates of ``run``.
    """
    guide_trace = with_changes(run.guide_trace, changes)
    substitutes = Substitutes(run.subsamples, noise=run.noise)
    model_trace = run_model(programs, guide_trace, substitutes, leading, run.state_dim)
    again = _again if run.state_dim is None else _summed_again
    of_model = again([t for t in run.terms if not t.in_guide], model_trace)
    if of_model is None:
        terms = terms_of(guide_trace, model_trace, run.state_dim)
    else:
        of_guide = [_guide_again(t, guide_trace) for t in run.terms if t.in_guide]
        terms = (*of_model, *of_guide)
    traces = {"guide_trace": guide_trace, "model_trace": model_trace}
    return replace(run, **traces, terms=terms), of_model is not None


def _again(before: list[Term], model_trace: Trace) -> list[Term] | None:
    """The terms of sites like those before, or None where the sites are others."""
    sites = list(scored(model_trace))
    if [*map(site_form, sites)] != [t.form for t in before]:
        return None
    pairs = [(t, _term_again(t, s)) for t, s in zip(before, sites, strict=True)]
    same = all(new.log_prob.shape == old.log_prob.shape for old, new in pairs)
    return [new for _, new in pairs] if same else None


def _term_again(old: Term, site: Site) -> Term:
    checked = was_checked(old.site, site)
    with unvalidated(site["fn"]) if checked else nullcontext():
        return model_term(site, old.key)


def _summed_again(before: list[Term], model_trace: Trace) -> list[Term] | None:
    terms = summed_terms(model_trace)
    return terms if [*map(_shown, terms)] == [*map(_shown, before)] else None


def _shown(term: Term) -> Hashable:
    return term.signature, term.sizes, term.log_prob.shape


def _guide_again(old: Term, guide_trace: Trace) -> Term:
    term = guide_term(guide_trace.nodes[old.key.name], old.key)
    return term.without_density() if old.left_out else term
