"""Which coordinates are part of the weight, and which of these move."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from torch import Tensor

from pyro_mcvae.coordinates.packing import Packing
from pyro_mcvae.coordinates.placing import Placed, Record
from pyro_mcvae.coordinates.plan import Plan
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.sites import masked_entries

__all__ = ["all_coordinates", "unmasked_coordinates"]


def unmasked_coordinates(
    sample: WeightedParticles, records: list[Record], plan: Plan, without: Collection[str] = ()
) -> Tensor | None:
    """
    1 for coordinates that are part of the weight, 0 for masked ones; None where nothing is masked.

    :param without: sites whose coordinates are left out like masked ones.
    :returns: shape ``[K, *plates, D]``.
    """
    sites = plan.packing.sites
    masks = [
        {n: m for n in sites if (m := masked_entries(run.guide_trace.nodes[n])) is not None}
        for run in sample.runs
    ]
    return all_coordinates(records, plan.packing, masks, without) if any(masks) or without else None


def all_coordinates(
    records: list[Record],
    packing: Packing,
    masks: list[dict[str, Tensor]] | None = None,
    without: Collection[str] = (),
) -> Tensor:
    """1 for coordinates; 0 for masked ones, for some sites and for padding: ``[K, *plates, D]``."""
    packed = []
    for record, found in zip(records, masks or itertools.repeat({}), strict=False):
        one = {n: torch.full_like(record[n].at, float(n not in without)) for n in packing.sites}
        packed.append(one | {n: one[n] * _as_event(m, record[n]) for n, m in found.items()})
    return packing.pack_runs(packed)


def _as_event(mask: Tensor, placed: Placed) -> Tensor:
    return mask.reshape(mask.shape + (1,) * len(placed.coordinate.event_shape))
