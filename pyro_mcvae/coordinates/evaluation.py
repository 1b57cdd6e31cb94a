"""The log weight at given coordinates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_mcvae.coordinates.placing import Record
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.sites import masked_entries
from pyro_mcvae.programs.terms import Term


@dataclass(frozen=True, slots=True)
class Evaluation:
    r"""
    The log weight at given coordinates of the local latents.

    :ivar log_weight: :math:`\log p(x, z) - \log q(z \mid x)`, shape ``[*leading, *plates]``.
    :ivar log_base: the coordinates' density under the guide, of the same shape; coordinates that
        a mask takes out of the guide are left out, unless their density follows others.
    :ivar sample: the execution behind them.
    :ivar records: for each of its runs, where each site stands.
    """

    log_weight: Tensor
    log_base: Tensor
    sample: WeightedParticles
    records: list[Record]

    def with_lead(self, lead: torch.Size) -> Evaluation:
        """With other leading dims."""
        shape = lead + self.log_weight.shape[1:]
        log_weight, log_base = self.log_weight.reshape(shape), self.log_base.reshape(shape)
        return replace(self, log_weight=log_weight, log_base=log_base)


def evaluate(sample: WeightedParticles, records: list[Record]) -> Evaluation:
    """The log weight of a sample, and the density of its coordinates, also of those held."""

    def log_base(term: Term, i: int) -> Tensor | int:
        placed = records[i].get(term.key.name) if term.in_guide else None
        if placed is None:  # a point mass, or the model's
            return 0
        density = placed.coordinate.log_base(placed.at, term.site["value"])
        mask = masked_entries(term.site)
        if mask is None:
            return density
        counted = ~density.isnan() if placed.coordinate.follows else mask
        return torch.where(counted, density, 0.0)

    return Evaluation(sample.log_weight, sample.local_sum(log_base), sample, records)
