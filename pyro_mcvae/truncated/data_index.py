"""Which of all data, for which states are kept, a minibatch has."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pyro.infer.util import is_validation_enabled
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor

from pyro_mcvae.programs.plates import plate_key
from pyro_mcvae.programs.types import Site
from pyro_mcvae.truncated.layout import DataIndex, StateLayout
from pyro_mcvae.truncated.searched_sites import StatesError

__all__ = ["find_data_index"]


def find_data_index(
    layout: StateLayout, msg: Site, subsamples: Mapping[str, Tensor], device: torch.device
) -> DataIndex:
    """
    The data of a minibatch, from the message of a site that has states.

    :param subsamples: the indices of the plates that have some.
    :param device: for the indices of the others.
    :raises StatesError: where the plates are not those for whose data states are kept.
    """
    frames = {plate_key(f): f for f in msg["cond_indep_stack"]}
    index, sizes = None, []
    for key, full in zip(layout.plates, layout.full_sizes, strict=True):
        if key not in frames:
            raise StatesError(
                f"site '{msg['name']}' has left plate '{key.name}', in which its states are "
                f"kept: make another TruncatedPosterior for a program of another structure"
            )
        frame = frames[key]
        _check_size(key.name, full, frame)
        at = subsamples.get(key.name)
        at = torch.arange(frame.size, device=device) if at is None else torch.as_tensor(at)
        _check_range(key.name, full, at)
        sizes.append(frame.size)
        index = at if index is None else index.unsqueeze(-1) * full + at
    assert index is not None
    return DataIndex(tuple(sizes), index.flatten())


def _check_size(name: str, full: int, frame: CondIndepStackFrame) -> None:
    now = frame.full_size or frame.size
    if now != full:
        raise StatesError(
            f"plate '{name}' has {now} data, and states are kept for {full}. For minibatches pass "
            f"their indices, pyro.plate('{name}', {full}, subsample=index); for other data (held "
            f"out, say) make their guide by guide.for_data(...)"
        )


def _check_range(name: str, full: int, index: Tensor) -> None:
    if is_validation_enabled() and len(index):
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= full:
            raise StatesError(
                f"plate '{name}' was given index {low if low < 0 else high}, but states are kept "
                f"for data 0 to {full - 1}: pass indices into the full data"
            )
