"""For which observations the states of a datum were searched, to tell other data in its place."""

from __future__ import annotations

import math
import warnings

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.truncated.joint import JointRuns
from pyro_mcvae.truncated.layout import StatesError
from pyro_mcvae.truncated.searched_sites import Layouts

# Two sums over the same observations differ by rounding, where a minibatch is computed otherwise.
_TOLERANCE = 1e-6
_GOLDEN = (math.sqrt(5) - 1) / 2


class DataRecord:
    """The fingerprint of each datum's observations at its last search; NaN before any."""

    def __init__(self) -> None:
        self._searched: Tensor | None = None
        self._warned = False

    def compare(self, runs: JointRuns, sample: WeightedParticles, searched: bool) -> Tensor | None:
        """
        Compare the observations of a minibatch with those that its states were searched for.

        :param searched: whether states are now searched for these: then others are only told of.
        :returns: their fingerprints; None where no observation is decided by the data alone.
        :raises StatesError: where states were searched for others.
        """
        found, known = _fingerprints(runs.layouts, sample), self._searched
        if found is None or known is None or not is_validation_enabled():
            return found
        if known.device != found.device or (searched and self._warned):
            return found
        index, layout = runs.data.index, runs.layouts.layout
        before = known.index_select(0, index.to(found.device))
        # Of what is not known a comparison is False.
        scale = torch.maximum(before[:, 1], found[:, 1])
        other = (before[:, 0] - found[:, 0]).abs() > _TOLERANCE * scale
        if not bool(other.any()):
            return found
        names, many = sorted(map(repr, runs.layouts.given)), len(runs.layouts.given) > 1
        message = (
            f"site{'s' * many} {', '.join(names)} {'are' if many else 'is'} observed with other "
            f"values than before at datum {int(index[other.to(index.device)][0])} of plate "
            f"'{layout.plates[-1].name}': states belong to a datum by its index, and these were "
            f"searched for other observations. For minibatches pass their indices, "
            f"pyro.plate(..., N, subsample=index); for held-out data make their "
            f"guide by guide.for_data(...); for data that are drawn anew in the same places pass "
            f"fixed_data=False"
        )
        if not searched:
            raise StatesError(message)
        self._warned = True
        warnings.warn(message, stacklevel=4)
        return found

    def keep(self, runs: JointRuns, found: Tensor) -> None:
        """Record the observations that states were searched for."""
        known = self._searched
        if known is None or known.device != found.device:
            known = found.new_full((runs.layouts.layout.num_data, 2), torch.nan)
        self._searched = known.index_copy(0, runs.data.index.to(found.device), found)


def _fingerprints(layouts: Layouts, sample: WeightedParticles) -> Tensor | None:
    """
    A sum over the observations of each datum, with weights that no permutation keeps.

    :returns: the sum and the scale of its summands, float64, shape ``[E, 2]``; None where nothing
        is observed that the data alone decide.
    """
    run, dims = sample.runs[0], sample.blocks[0].dims
    sizes = sample.shapes[0]
    parts: list[Tensor] = []
    for term in run.terms:
        if term.in_guide or term.key.name not in layouts.given or not sample.is_local(term):
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
