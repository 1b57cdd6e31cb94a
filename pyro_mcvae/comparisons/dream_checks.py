"""Whether a model can dream: what it says of factors, and of data read from its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyro
import torch
from pyro.ops.provenance import ProvenanceTensor, detach_provenance, get_provenance
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_mcvae.comparisons.dreams import dream, dreamt_values, recognize
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.isolation import isolated
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_factor, is_random, is_scored
from pyro_mcvae.programs.substitute import substitute
from pyro_mcvae.programs.types import Site
from pyro_mcvae.structure import dependencies
from pyro_mcvae.structure.tracking import Escapes


def check_factors(programs: Programs, run: Run) -> None:
    """
    Check that no factor of the model depends on a latent: a dream could not take account of it.

    :raises ValueError: naming the factor.
    """
    factors = [n for n, s in run.model_trace.nodes.items() if _is_scored_factor(s)]
    if not factors:
        return
    tracked = frozenset(t.key.name for t in run.terms if t.in_guide and is_random(t.site))
    found = dependencies.find_dependencies(programs, tracked, run.subsamples).factors
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
    Check that only the guide reads the observed values from the arguments, and that it does.

    A dream would mix with the data in a model that reads them, beside ``obs=``; a guide that does
    not read them sees the data elsewhere, where no dream comes. Found by running both once
    more, with the observed tensors among the arguments tracked.

    :raises ValueError: naming a site of the model whose distribution depends on observed values, or
        saying that the guide's do not.
    """
    with isolated(programs.owners), torch.no_grad():
        dreamt = dream(programs, run.subsamples)
        values = dreamt_values(run.model_trace, dreamt)
        if not values:
            return
        changed = substitute(programs, run.model_trace.nodes, values, run.subsamples)
        marked = _Marked(programs, changed)
        read = marked.readers(lambda p: dream(p, run.subsamples))
        seen = marked.readers(lambda p: recognize(p, dreamt, run.subsamples).guide_trace)
    if read:
        raise ValueError(
            f"the distribution of site '{read[0]}' of the model depends on observed values that "
            f"the model reads from its arguments, so that in a dream it would mix with the data: "
            f"use the values that pyro.sample returns, pass covariates as other tensors than the "
            f"observed ones, or make the guide's arguments by dream_args"
        )
    if seen == []:
        raise ValueError(
            f"the guide reads the data of {', '.join(map(repr, sorted(values)))} from none of the "
            f"arguments in which the model observes them, so that it would not see a dream: read "
            f"them there, or say by dream_args how the guide's arguments follow from the dream"
        )


def _is_scored_factor(site: Site) -> bool:
    return is_scored(site) and site["is_observed"] and is_factor(site["fn"])


class _Marked:
    """
    The arguments of a call with marks on the tensors that a dream changes.

    Two kinds of marks, because each is blind somewhere: provenance in custom autograd functions,
    gradients at integers.
    """

    def __init__(self, programs: Programs, changed: Programs) -> None:
        old, new = (tree_leaves((p.args, p.kwargs)) for p in (programs, changed))
        leaves = {id(a): a.detach().clone() for a, b in zip(old, new, strict=True) if a is not b}
        for leaf in leaves.values():
            leaf.requires_grad_(leaf.is_floating_point())
        self._ids = frozenset(map(id, leaves.values()))
        marks = {i: ProvenanceTensor(t, frozenset({"data"})) for i, t in leaves.items()}
        call = (programs.args, programs.kwargs)
        args, kwargs = tree_map_only(Tensor, lambda t: marks.get(id(t), t), call)
        self._programs = replace(programs, args=args, kwargs=kwargs)

    def readers(self, run: Callable[[Programs], Trace]) -> list[str] | None:
        """
        The sites whose distribution was computed from marked tensors; None if that is not known.
        """
        try:
            with torch.enable_grad(), pyro.validation_enabled(False):
                with Escapes() as escapes:
                    trace = run(self._programs)
                found = [n for n, s in trace.nodes.items() if self._reads(s)]
        except Exception:
            # Operators that refuse tracked tensors: such programs cannot be looked at.
            return None
        # What became of data that turned into Python numbers is not known.
        return found if found or not escapes.names else None

    def _reads(self, site: Site) -> bool:
        if not is_scored(site) or is_factor(site["fn"]):
            return False
        log_prob = site["fn"].log_prob(detach_provenance(site["value"]).detach())
        if get_provenance(log_prob):
            return True
        log_prob = detach_provenance(log_prob)
        return log_prob.requires_grad and not self._ids.isdisjoint(
            dependencies.leaves_behind(log_prob)
        )
