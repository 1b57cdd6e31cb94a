"""Which coordinates are part of the weight, and which of these move."""

from __future__ import annotations

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
    sample: WeightedParticles, records: list[Record], plan: Plan
) -> Tensor | None:
    """
    1 for coordinates that are part of the weight, 0 for masked ones; None where nothing is masked.

    :returns: shape ``[K, *plates, D]``.
    :raises ValueError: if a mask depends on a latent that moves, so that it would change.
    """
    for name, draws in sample.structure.masked_by.items():
        if not draws.isdisjoint(plan.moving):
            raise _moving(name, draws)
    sites = plan.packing.sites
    masks = [
        {n: m for n in sites if (m := masked_entries(run.guide_trace.nodes[n])) is not None}
        for run in sample.runs
    ]
    return _packed(masks, records, plan.packing) if any(masks) else None


def _packed(masks: list[dict[str, Tensor]], records: list[Record], packing: Packing) -> Tensor:
    packed = []
    for record, found in zip(records, masks, strict=True):
        ones = {n: torch.ones_like(record[n].at) for n in packing.sites}
        packed.append(ones | {n: ones[n] * _as_event(m, record[n]) for n, m in found.items()})
    return packing.pack_runs(packed)


def all_coordinates(
    records: list[Record], packing: Packing, without: Collection[str] = ()
) -> Tensor:
    """1 for coordinates, 0 for those of some sites and for padding: ``[K, *plates, D]``."""
    ones = {n: float(n not in without) for n in packing.sites}
    return packing.pack_runs(
        [{n: torch.full_like(record[n].at, one) for n, one in ones.items()} for record in records]
    )


def _moving(name: str, draws: frozenset[str]) -> ValueError:
    return ValueError(
        f"the mask of site '{name}' of the guide depends on {', '.join(sorted(draws))}, so "
        f"moves would change how many latents count: let the masks of both programs depend on "
        f"data only (an unmasked latent without an effect does no harm), or use TraceIWAE_ELBO"
    )


def _as_event(mask: Tensor, placed: Placed) -> Tensor:
    return mask.reshape(mask.shape + (1,) * len(placed.coordinate.event_shape))
