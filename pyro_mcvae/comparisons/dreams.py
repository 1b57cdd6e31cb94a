"""Data dreamt by a model: drawn from its joint density, and scored by the guide."""

from __future__ import annotations

import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.masks import counted_values
from pyro_mcvae.programs.messengers import Recorder, Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.nesting import nesting_of
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_delta, is_factor, is_latent, is_scored
from pyro_mcvae.programs.terms import guide_terms
from pyro_mcvae.programs.unconditioned import Unconditioned


def dream(programs: Programs, subsamples: Minibatch) -> Trace:
    """
    Draw latents and data from the model's joint density, on a given minibatch.

    :param subsamples: the indices of each plate.
    :raises ValueError: if the model cannot be drawn from.
    """
    try:
        with Recorder(Substitutes(Minibatch(subsamples))) as recorder, Unconditioned():
            programs.model(*programs.args, **programs.kwargs)
    except NotImplementedError as error:
        raise ValueError(
            f"the model cannot dream, because one of its distributions cannot be drawn from "
            f"({type(error).__name__}: {error}): give each site a proper distribution with sample()"
        ) from error
    return recorder.trace


def dreamt_values(model_trace: Trace, dreamt: Trace) -> dict[str, Tensor]:
    """
    The dream's data by site, with the model's own data where these are masked out.

    :param model_trace: a run of the model on the data.
    :raises ValueError: naming a site that was not dreamt, or in another shape than its data.
    """
    found = {}
    for name, site in model_trace.nodes.items():
        if not is_scored(site) or not site["is_observed"] or is_factor(site["fn"]):
            continue
        value = site["value"]
        new = dreamt.nodes[name]["value"] if name in dreamt else None
        if new is None or new.shape != torch.as_tensor(value).shape:
            what = "nothing" if new is None else f"a value of shape {tuple(new.shape)}"
            raise ValueError(
                f"the model observes site '{name}' in shape {tuple(torch.as_tensor(value).shape)}, "
                f"but drew {what} there when it dreamt: its plates and its distribution, expanded, "
                f"must give the data's shape, whatever the latents"
            )
        counted = counted_values(site)
        if counted is not None:
            new = torch.where(counted, new, value)
        found[name] = new.detach()
    return found


def recognize(programs: Programs, dreamt: Trace, subsamples: Minibatch) -> Run:
    """
    Run the guide on a dream: its terms are log q of the dreamt latents.

    :param programs: with arguments that hold the dreamt data.
    :raises ValueError: naming a site that the guide cannot recognize.
    """
    with Recorder(Substitutes(Minibatch(subsamples)), dreamt) as recorder:
        programs.guide(*programs.args, **programs.kwargs)
    guide_trace = recorder.trace
    _check(guide_trace, dreamt)
    terms = tuple(guide_terms(guide_trace))
    return Run(guide_trace, dreamt, terms, nesting_of(guide_trace, dreamt), None)


def _check(guide_trace: Trace, dreamt: Trace) -> None:
    for name, site in guide_trace.nodes.items():
        if not is_latent(site):
            continue
        if name not in dreamt:
            raise ValueError(
                f"the guide draws site '{name}', of which the model's dream has no value, so that "
                f"the guide's density there is not known: the sleep phase needs guides whose sites "
                f"are the model's own (no auxiliary sites, as AutoGuides and EasyGuide have)"
            )
        if is_delta(site["fn"]):
            raise ValueError(
                f"site '{name}' of the guide is a point mass, which gives a dreamt value no "
                f"density: give it a distribution that is spread out"
            )
