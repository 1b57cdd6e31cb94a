"""For which observations the states of a datum were searched, to tell other data in its place."""

from __future__ import annotations

import math
import warnings

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.truncated.joint import JointRuns
from pyro_mcvae.truncated.layout import DataIndex, StateLayout
from pyro_mcvae.truncated.searched_sites import Layouts, StatesError

__all__ = ["DataRecord", "find_fingerprints"]

# Two sums over the same observations differ by rounding, where a minibatch is computed otherwise.
_TOLERANCE = 1e-6


def find_fingerprints(layouts: Layouts, b: int, sample: WeightedParticles) -> Tensor | None:
    """
    A sum over the observations of each datum, with weights that no permutation keeps.

    :param b: the block of the data.
    :returns: the sum and the scale of its summands, float64, shape ``[E, 2]``; None where nothing
        is observed that the data alone decide.
    """
    run, dims = sample.runs[0], sample.blocks[b].dims
    sizes = [f.size for f in sample.frames[b] if f.dim is not None]
    parts: list[Tensor] = []
    for term in run.terms:
        if term.in_guide or term.key.name not in layouts.given or sample.block_of[0][term.key] != b:
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


_GOLDEN = (math.sqrt(5) - 1) / 2


class DataRecord:
    """The fingerprint of each datum's observations at its last search; NaN before any."""

    def __init__(self) -> None:
        self._searched: dict[str, Tensor] = {}
        self._warned = False

    def compare(
        self, runs: JointRuns, sample: WeightedParticles, num_states: int, searched: bool
    ) -> None:
        """
        Look at the observations of a minibatch, before its states answer for them.

        :param searched: whether states are now searched for these: then others are only told of.
        :raises StatesError: where states were searched for others.
        """
        for b, layout in runs.layouts.searched:
            # All states that there are serve whatever data.
            if num_states == layout.space.cardinality:
                continue
            found = find_fingerprints(runs.layouts, b, sample)
            if found is not None:
                runs.observed[b] = found
                if is_validation_enabled():
                    names = runs.layouts.given_names
                    self._check(*runs.block(b), found, names, searched)

    def keep(self, runs: JointRuns) -> None:
        """Record for which observations states were searched."""
        for b, found in runs.observed.items():
            layout, data = runs.block(b)
            known = self._searched.get(layout.name)
            if known is None or known.device != found.device:
                known = found.new_full((layout.num_data, 2), torch.nan)
            known = known.index_copy(0, data.index.to(found.device), found)
            self._searched[layout.name] = known

    def _check(
        self, layout: StateLayout, data: DataIndex, found: Tensor, names: str, searched: bool
    ) -> None:
        known = self._searched.get(layout.name)
        if known is None or known.device != found.device or (searched and self._warned):
            return
        before = known.index_select(0, data.index.to(found.device))
        # Of what is not known a comparison is False.
        scale = torch.maximum(before[:, 1], found[:, 1])
        other = (before[:, 0] - found[:, 0]).abs() > _TOLERANCE * scale
        if not bool(other.any()):
            return
        datum = int(data.index[other.to(data.index.device)][0])
        message = (
            f"{names} observed with other values than before at datum {datum} of plate "
            f"'{layout.plates[-1].name}': states belong to a datum by its index, and these were "
            f"searched for other observations. For minibatches pass their indices, "
            f"pyro.plate(..., N, subsample=index); for held-out data make their "
            f"guide by guide.for_data(...); for data that are drawn anew in the same places pass "
            f"fixed_data=False"
        )
        if not searched:
            raise StatesError(message)
        self._warned = True
        warnings.warn(message, stacklevel=5)

    def forget(self) -> None:
        """Know of no search."""
        self._searched.clear()
