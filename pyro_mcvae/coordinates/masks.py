"""Which coordinates are part of the weight, and which of these move."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from pyro_mcvae.coordinates.placing import Placed, Record
from pyro_mcvae.coordinates.plan import Plan
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.sites import masked_entries


def coordinates_that_count(
    sample: WeightedParticles, records: list[Record], plan: Plan, without: Collection[str] = ()
) -> Tensor | None:
    """
    Return 1 for coordinates that are part of the weight; 0 for masked ones, and for the zeros that
    fill up shorter vectors.

    :param without: sites whose coordinates are left out like masked ones.
    :returns: shape ``[K, *plates, D]``; None where every entry is 1.
    """
    packing, sites = plan.packing, plan.packing.sites
    masks = [
        {n: m for n in sites if (m := masked_entries(run.guide_trace.nodes[n])) is not None}
        for run in sample.runs
    ]
    if not (any(masks) or without or packing.padded):
        return None
    packed = []
    for record, found in zip(records, masks, strict=True):
        one = {n: torch.full_like(record[n].at, float(n not in without)) for n in sites}
        packed.append(one | {n: one[n] * _as_event(m, record[n]) for n, m in found.items()})
    return packing.pack_runs(packed)


def _as_event(mask: Tensor, placed: Placed) -> Tensor:
    return mask.reshape(mask.shape + (1,) * len(placed.coordinate.event_shape))
