"""Records of the observations of each datum, to detect other data with the same indices."""

from __future__ import annotations

import math
from collections.abc import Set

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_mcvae.particles.sampler import WeightedParticles

# Two sums over the same observations may differ by rounding between minibatches.
_TOLERANCE = 1e-6
_GOLDEN = (math.sqrt(5) - 1) / 2


class DataRecord:
    """The fingerprint of each datum's observations, as from :func:`fingerprints`."""

    def __init__(self) -> None:
        self._known: Tensor | None = None

    def find_changed(self, index: Tensor, new: Tensor | None) -> int | None:
        """
        Return the first datum of a minibatch that has other observations than before, or None.

        Without Pyro's validation nothing is compared.

        :param index: the indices of the data, shape ``[E]``.
        :param new: their fingerprints.
        """
        known = self._known
        if new is None or known is None or not is_validation_enabled():
            return None
        if known.device != new.device:
            return None
        before = known.index_select(0, index.to(new.device))
        # Data without a record have NaN, which compares as False.
        scale = torch.maximum(before[:, 1], new[:, 1])
        differs = (before[:, 0] - new[:, 0]).abs() > _TOLERANCE * scale
        return int(index[differs.to(index.device)][0]) if bool(differs.any()) else None

    def keep(self, index: Tensor, new: Tensor, num_data: int) -> None:
        """Record the observations of a minibatch of ``num_data`` data."""
        old = self._known
        if old is None or old.device != new.device:
            old = new.new_full((num_data, 2), torch.nan)
        self._known = old.index_copy(0, index.to(new.device), new)


def fingerprints(sample: WeightedParticles, names: Set[str]) -> Tensor | None:
    """
    Sum the observations of each datum, with weights that detect permutations.

    :param names: the observed sites.
    :returns: the sum and the scale of its terms, float64, shape ``[E, 2]``; None without sites.
    """
    run, dims = sample.runs[0], sample.blocks[0].dims
    sizes = sample.shapes[0]
    parts: list[Tensor] = []
    for term in run.terms:
        if term.in_guide or term.key.name not in names or not sample.is_local(term):
            continue
        value, depth = term.site["value"].detach(), term.site["fn"].event_dim + run.nesting
        value = value.reshape((1,) * (depth - value.dim()) + value.shape)
        value = value.movedim([run.nesting + d for d in dims], list(range(len(dims))))
        value = value.expand(*sizes, *value.shape[len(dims) :]).reshape(math.prod(sizes), -1)
        value = value.double().nan_to_num()
        at = torch.arange(value.shape[1], dtype=value.dtype, device=value.device)
        place = 1 + (_GOLDEN * (at + 1) * (len(parts) + 1)) % 1
        parts.append(torch.stack([value @ place, value.abs() @ place], dim=-1))
    return torch.stack(parts).sum(0) if parts else None
