"""Draws of enumerated sites from their posterior, given everything else."""

from __future__ import annotations

import torch
from pyro.ops import packed
from pyro.ops.einsum.adjoint import require_backward
from pyro.ops.rings import SampleRing
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.programs.enumeration import is_state, support_of_state
from pyro_mcvae.programs.state_sums import StateFactor, batch_shaped, state_factors, sum_states


def draw_states(model_trace: Trace) -> dict[str, Tensor]:
    """
    One joint draw of all enumerated sites from p(y | x, z), as Pyro's ``infer_discrete`` makes it.

    :param model_trace: of a model that has run under ``StateMessenger``.
    :returns: by site, shape ``[leading, *plates, *event]``.
    """
    _, _, factors, states = state_factors(model_trace)
    queries = [f for f in factors if is_state(f.site)]
    with torch.no_grad():
        for query in queries:
            require_backward(query.log_prob)
        for total in list(sum_states(factors, states, SampleRing)):
            total.log_prob._pyro_backward()  # type: ignore[attr-defined]
        return {q.site["name"]: _drawn(q, model_trace) for q in queries}


def _drawn(query: StateFactor, trace: Trace) -> Tensor:
    site = query.site
    index = batch_shaped(_index(query, trace), site["cond_indep_stack"])
    return support_of_state(site)[index]


def _index(query: StateFactor, trace: Trace) -> Tensor:
    """Which of its values a site has: ``[leading, *plates]``."""
    found = query.log_prob._pyro_backward_result  # type: ignore[attr-defined]
    symbol = query.site["infer"]["_enumerate_symbol"]
    # A string, or a set: an order either way, which is that of the draws.
    dims = [] if found is None else list(found._pyro_sample_dims)
    if symbol not in dims:
        return torch.zeros((), dtype=torch.long, device=query.log_prob.device)  # one value
    index = found[dims.index(symbol)]
    index._pyro_dims = found._pyro_dims[1:]
    return packed.unpack(index, trace.symbol_to_dim)
