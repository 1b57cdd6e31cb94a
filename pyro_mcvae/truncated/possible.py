"""Which states of discrete sites exist: inside of the support, and not in entries masked out."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.annotations import note, noted
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Site
from pyro_mcvae.truncated.layout import DataIndex, SiteSpec, StateLayout, existing_entries
from pyro_mcvae.truncated.searched_sites import Layouts

__all__ = ["frozen_entries", "impossible_states", "inside_support", "spec_of"]


def spec_of(layouts: Layouts, name: str) -> SiteSpec:
    """What a discrete site was found to be."""
    return next(layout.sites[name] for _, layout in layouts.searched if name in layout.sites)


def frozen_entries(layout: StateLayout, data_index: DataIndex, sample: WeightedParticles) -> Tensor:
    """The entries of a block that are masked out in each state, ``[E, C, D]``."""
    flags: dict[str, Tensor] = {}
    for name, spec in layout.sites.items():
        parts = []
        for run in sample.runs:
            site = run.model_trace.nodes[name]
            exists = existing_entries(site)
            value = site["value"][..., 0] if spec.one_hot else site["value"]
            missing = torch.zeros_like(value, dtype=torch.bool)
            if exists is not None:
                missing = ~(exists[..., 0] if spec.one_hot else exists)
            parts.append(missing)
        flags[name] = parts[0] if len(parts) == 1 else torch.stack(parts)
    return layout.flags(flags, data_index)


def impossible_states(layouts: Layouts, sample: WeightedParticles) -> Tensor | None:
    """Which states lie outside of the support or have values at entries masked out."""
    looked = [
        spec.name
        for _, layout in layouts.searched
        for spec in layout.sites.values()
        if not spec.bounded or layouts.masked
    ]
    if not looked:
        return None

    def count(term: Term, i: int) -> Tensor | int:
        if term.in_guide or term.key.name not in looked:
            return 0
        site, spec = term.site, spec_of(layouts, term.key.name)
        bad = noted(site, "outside")
        exists = existing_entries(site)
        if exists is not None:
            value = site["value"]
            here = (value.argmax(-1) if spec.one_hot else value - spec.low) != 0
            astray = here & ~(exists[..., 0] if spec.one_hot else exists)
            bad = astray if bad is None else bad | astray
        if bad is None:
            return 0
        events = bad.dim() - len(site["fn"].batch_shape)
        return bad.sum(tuple(range(-events, 0))) if events else bad.long()

    return sample.local_sum(count) > 0


def inside_support(value: Tensor, msg: Site, spec: SiteSpec) -> Tensor:
    """Values that the support allows; notes at the site where others had been asked for."""
    if spec.bounded:
        return value
    support = msg["fn"].support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    fine = support.check(value)
    note(msg, outside=~fine)
    return torch.where(fine, value, torch.full_like(value, spec.low))
