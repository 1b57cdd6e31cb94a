"""The gradients of a log weight: with respect to its coordinates, and of guide and model apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_mcvae.coordinates.evaluation import Evaluation
from pyro_mcvae.coordinates.noise import sum_event
from pyro_mcvae.coordinates.packing import Packing
from pyro_mcvae.coordinates.placing import Record
from pyro_mcvae.coordinates.plan import Plan
from pyro_mcvae.ops.shapes import as_shape
from pyro_mcvae.ops.smoothing import drifting
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.precision import without_autocast
from pyro_mcvae.programs.terms import Term


def base_gradient(plan: Plan, at: Evaluation, create_graph: bool) -> Tensor:
    """The gradient of the coordinates' own density: ``[*leading, *plates, D]``."""
    packing = plan.packing
    if not plan.normal:
        return coordinate_gradient(packing, at.records, at.log_base, create_graph, True)
    base = packing.pack_runs([{n: -record[n].at for n in packing.sites} for record in at.records])
    return as_shape(base, at.log_base.shape + base.shape[-1:])


def coordinate_gradient(
    packing: Packing, records: list[Record], value: Tensor, create_graph: bool, reused: bool
) -> Tensor:
    """
    The gradient of a value per datum with respect to the coordinates: ``[*leading, *plates, D]``.

    It moves chains, and is smoothed at the kinks of programs that ran with their widths.

    :param value: shape ``[*leading, *plates]``.
    :param bool create_graph: whether it can be differentiated again.
    :param bool reused: whether the graph is still needed for other gradients.
    """
    names = list(packing.sites)
    inputs = [record[n].at for record in records for n in names]
    moving = [i for i in inputs if i.requires_grad]  # discrete values do not
    found: Sequence[Tensor | None] = ()
    if value.requires_grad:
        # The backward pass of an operator computes in the precision that its forward pass had.
        with without_autocast(), drifting():
            ones, kept = torch.ones_like(value), reused or create_graph
            found = torch.autograd.grad(value, moving, ones, kept, create_graph, allow_unused=True)
    grads = {id(i): g for i, g in zip(moving, found, strict=False) if g is not None}
    full = (grads[id(i)] if id(i) in grads else torch.zeros_like(i) for i in inputs)
    packed = packing.pack_runs([{n: next(full) for n in names} for _ in records])
    return as_shape(packed, value.shape + packed.shape[-1:])


def gradients_at_latents(sample: WeightedParticles) -> list[dict[str, Tensor]]:
    """For each run the gradient of log p at the local draws, which are leaves of their graph."""
    leaves = []
    for run, block_of in zip(sample.runs, sample.block_of, strict=True):
        names = [t.key.name for t in run.terms if t.in_guide and block_of[t.key] is not None]
        nodes = run.model_trace.nodes
        leaves.append({n: nodes[n]["value"] for n in names if n in nodes})
    inputs = [v for found in leaves for v in found.values() if v.requires_grad]
    log_prob = sample.local_sum(lambda t, i: 0 if t.in_guide else t.log_prob)
    found = torch.autograd.grad(log_prob.sum(), inputs, allow_unused=True) if inputs else ()
    grads = iter(found)
    return [
        {n: g for n, v in found.items() if v.requires_grad and (g := next(grads)) is not None}
        for found in leaves
    ]


def guide_elbo(sample: WeightedParticles, at_latents: list[dict[str, Tensor]]) -> Tensor:
    r"""
    :math:`z \cdot \nabla_z \log p(x, z) - \log q(z \mid x)` of local latents, ``[K, *plates]``.

    :param at_latents: by :func:`gradients_at_latents`.
    """

    def pick(term: Term, i: int) -> Tensor | int:
        if not term.in_guide:
            return 0
        found, site = at_latents[i].get(term.key.name), term.site
        if found is None:
            return -term.log_prob
        # A constant where the guide has no parameters: then nothing is to be learned.
        return sum_event(found * site["value"], site["fn"].event_dim) - term.log_prob

    return sample.local_sum(pick)
