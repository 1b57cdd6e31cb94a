"""The log weight at given coordinates, and what is refused there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_mcvae.coordinates.packing import Packing
from pyro_mcvae.coordinates.placing import Record
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.sites import is_random, masked_entries
from pyro_mcvae.programs.terms import Term

__all__ = ["Evaluation", "check_names", "check_weighed", "evaluate"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    r"""
    The log weight at given coordinates of the local latents.

    :ivar log_weight: :math:`\log p(x, z) - \log q(z \mid x)`, shape ``[*leading, *plates]``.
    :ivar log_base: the coordinates' density under the guide, of the same shape; coordinates that
        a mask takes out of the guide are left out.
    :ivar sample: the execution behind them.
    :ivar records: for each of its runs, where each site stands.
    """

    log_weight: Tensor
    log_base: Tensor
    sample: WeightedParticles
    records: list[Record]


def evaluate(sample: WeightedParticles, records: list[Record], packing: Packing) -> Evaluation:
    """The log weight of a sample, and the density of its coordinates."""

    def log_base(term: Term, i: int) -> Tensor | int:
        if not term.in_guide or term.key.name not in packing.sites:
            return 0
        coordinate, at = records[i][term.key.name]
        density = coordinate.log_base(at, term.site["value"])
        mask = masked_entries(term.site)
        return density if mask is None else torch.where(mask, density, 0.0)

    return Evaluation(sample.log_weight, sample.local_sum(log_base), sample, records)


def check_weighed(sample: WeightedParticles) -> None:
    """
    :raises ValueError: for guides of which no latent has a weight, or coordinates.
    """
    if not any(is_random(t.site) for t in sample.runs[0].terms if t.in_guide):
        raise ValueError(
            "the guide draws no random latent: an empty guide, or a guide of point masses, has "
            "no coordinates to move: use TraceSGVB_ELBO, which needs none"
        )
    if not sample.blocks:
        raise ValueError(
            "no latent of the guide can be weighed by itself, because a subsampled plate does "
            "not enclose them: pass the full data, or use TraceSGVB_ELBO"
        )


def check_names(records: list[Record], packing: Packing, shared: frozenset[str]) -> None:
    """
    Check that sites do not come and go with the draws: they would have no place in a vector.

    :param shared: the guide's global sites.
    :raises ValueError: naming such a site.
    """
    for record in records:
        differing = (record.keys() | shared) ^ (packing.sites.keys() | shared)
        if differing:
            raise ValueError(
                f"guide site '{min(differing)}' is drawn in some executions and not in others, "
                f"so that the latents make no vector of coordinates: draw it always, and mask "
                f"it where it does not count, or weigh whole draws with TraceIWAE_ELBO"
            )
