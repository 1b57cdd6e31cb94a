"""Whether a model can dream: what it says of factors, and of data read from its arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pyro.ops.provenance import ProvenanceTensor, detach_provenance, get_provenance
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_mcvae.tracing import scout
from pyro_mcvae.tracing.dreams import dream, dreamt_values, is_factor
from pyro_mcvae.tracing.runs import Programs, Run
from pyro_mcvae.tracing.sites import is_random, is_scored
from pyro_mcvae.tracing.structure import FactorKey
from pyro_mcvae.tracing.substitute import substitute

__all__ = ["check_factors", "check_reads"]


def check_factors(programs: Programs, run: Run) -> None:
    """
    Check that no factor of the model depends on a latent: a dream could not take account of it.

    :raises ValueError: naming the factor.
    """
    factors = [n for n, s in run.model_trace.nodes.items() if _is_scored_factor(s)]
    if not factors:
        return
    tracked = frozenset(t.key.name for t in run.terms if t.in_guide and is_random(t.site))
    found = scout.find_dependencies(programs, tracked, run.subsamples).factors
    for name in factors:
        parents = found.get(FactorKey("model", name), tracked)
        if parents:
            raise ValueError(
                f"the model's factor '{name}' depends on {', '.join(map(repr, sorted(parents)))}, "
                f"so that the model's density is not the one that it draws from, and it cannot "
                f"dream: write the factor as a distribution of an observed site, or train with "
                f"another objective, such as TraceSGVB_ELBO"
            )


def check_reads(programs: Programs, run: Run) -> None:
    """
    Check that the model does not read its observed values from the arguments, beside ``obs=``.

    A dream would mix with the data there. Found by running the model once more, with the observed
    tensors among the arguments tracked.

    :raises ValueError: naming a site whose distribution depends on observed values.
    """
    with scout.aside():
        with torch.no_grad():
            values = dreamt_values(run.model_trace, dream(programs, run.subsamples))
            changed = substitute(programs, run.model_trace.nodes, values, run.subsamples)
        tracked, marks = _tracked(programs, changed)
        try:
            with torch.enable_grad(), scout.Escapes():
                trace = dream(tracked, run.subsamples)
                names = [n for n, s in trace.nodes.items() if _reads(s, marks)]
        except Exception:
            # A model that does not take tracked tensors cannot be looked at in this way.
            return
    if names:
        raise ValueError(
            f"the distribution of site '{names[0]}' of the model depends on observed values that "
            f"the model reads from its arguments, so that in a dream it would mix with the data: "
            f"use the values that pyro.sample returns, pass covariates as other tensors than the "
            f"observed ones, or make the guide's arguments by dream_args"
        )


def _is_scored_factor(site: Any) -> bool:
    return is_scored(site) and site["is_observed"] and is_factor(site["fn"])


def _tracked(programs: Programs, changed: Programs) -> tuple[Programs, frozenset[int]]:
    """The arguments with marks on the tensors that a dream changes, and the marks' identities."""
    old, new = (tree_leaves((p.args, p.kwargs)) for p in (programs, changed))
    marks = {id(a): _mark(a) for a, b in zip(old, new, strict=True) if a is not b}
    call = (programs.args, programs.kwargs)
    args, kwargs = tree_map_only(Tensor, lambda t: marks.get(id(t), t), call)
    return replace(programs, args=args, kwargs=kwargs), frozenset(map(id, marks.values()))


def _mark(tensor: Tensor) -> Tensor:
    # Gradients tell more exactly than provenance, which also follows shapes, as in zeros_like.
    if tensor.is_floating_point():
        return tensor.detach().clone().requires_grad_()
    return ProvenanceTensor(tensor, frozenset({"data"}))


def _reads(site: Any, marks: frozenset[int]) -> bool:
    """Whether a site's distribution was computed from marked tensors."""
    if not is_scored(site) or is_factor(site["fn"]):
        return False
    log_prob = site["fn"].log_prob(detach_provenance(site["value"]).detach())
    if get_provenance(log_prob):
        return True
    log_prob = detach_provenance(log_prob)
    return log_prob.requires_grad and not marks.isdisjoint(scout.leaves_behind(log_prob))
