"""A model replayed at other values of its latents, in one handler, with what its sites showed."""

from __future__ import annotations

from dataclasses import replace

from pyro.poutine.trace_struct import Trace

from pyro_mcvae.programs.execution import Programs, run_model, with_changes
from pyro_mcvae.programs.leading import ALONE, Leading
from pyro_mcvae.programs.messengers import Substitutes
from pyro_mcvae.programs.run import Run, model_factors
from pyro_mcvae.programs.terms import Term, guide_term, scored
from pyro_mcvae.programs.types import SiteChanges
from pyro_mcvae.programs.validation import unvalidated, was_checked


def replay_model(
    programs: Programs, run: Run, changes: SiteChanges, leading: Leading = ALONE
) -> tuple[Run, bool]:
    """
    Run the model with other values of the guide's draws, on the same minibatch.

    An execution that shows the sites and plates of ``run`` is of its structure, and what was found
    or checked there still holds.

    :param run: an execution of both programs; its guide depends on none of its draws. What its
        model drew apart from its sites is the same again.
    :param changes: by guide site, the fields that change.
    :param leading: the leading dims of ``run``, with a new plate for the model.
    :returns: the new execution, and whether it has the sites and plates of ``run``.
    """
    guide_trace = with_changes(run.guide_trace, changes)
    substitutes = Substitutes(run.subsamples, noise=run.noise)
    model_trace = run_model(programs, guide_trace, substitutes, leading)
    before = run.model_trace.nodes
    again = [s for s in scored(model_trace) if s["name"] in before]
    with unvalidated([s["fn"] for s in again if was_checked(before[s["name"]], s)]):
        of_model = model_factors(model_trace, run.state_dim)
    same = [t.form for t in of_model] == [t.form for t in run.terms if not t.in_guide]
    of_guide = [_guide_again(t, guide_trace) for t in run.terms if t.in_guide]
    traces = {"guide_trace": guide_trace, "model_trace": model_trace}
    return replace(run, **traces, terms=(*of_model, *of_guide)), same


def _guide_again(old: Term, guide_trace: Trace) -> Term:
    term = guide_term(guide_trace.nodes[old.key.name], old.key)
    return term.without_density() if old.left_out else term
