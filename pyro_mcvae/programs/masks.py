"""Masks wherever a program writes them: around a site, around its event, or inside of the event."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor

from pyro_mcvae.programs.types import Distribution, Site

# What a mask goes through: the density of the whole is a sum over its entries.
_SUMS = torch.distributions.Independent, ExpandedDistribution, MaskedDistribution


def counted_values(site: Site) -> Tensor | None:
    """
    Which entries of a site's value its masks leave in the density.

    A mask of ``Normal(...).mask(m).to_event(1)`` has an entry for each entry of the event; one
    around the event has one for all of them.

    :returns: a boolean tensor that broadcasts to the value's shape, with its last dims for the
        event; None without a mask.
    """
    value = site["value"]  # None in a message that is not drawn yet
    device = getattr(value, "device", None)
    found = [
        _as_event(torch.as_tensor(mask, device=device), event_dim)
        for mask, event_dim in _masks(site)
        if mask is not None and mask is not True
    ]
    return reduce(torch.logical_and, found) if found else None


def hides_masks(fn: Distribution) -> bool:
    """Whether a mask inside of a transform or a mixture takes out a part of the density alone."""
    if isinstance(fn, _SUMS):
        return hides_masks(fn.base_dist)
    inside = [part for part in vars(fn).values() if _is_distribution(part)]
    return any(isinstance(part, MaskedDistribution) or hides_masks(part) for part in inside)


def is_flat(fn: Distribution) -> bool:
    """Whether a distribution says ``.mask(False)``: of it a program wants the support alone."""
    own = isinstance(fn, MaskedDistribution) and fn._mask is False
    return own or (isinstance(fn, _SUMS) and is_flat(fn.base_dist))


def with_mask(fn: Distribution, counted: Tensor | None) -> Distribution | None:
    """
    A distribution with other masks than its own.

    :param counted: as of :func:`counted_values`; None for no mask.
    :returns: None where an event whose entries have one density together is to count in parts.
    """
    if isinstance(fn, MaskedDistribution):
        return with_mask(fn.base_dist, counted)
    if isinstance(fn, torch.distributions.Independent):
        base = with_mask(fn.base_dist, counted)
        return None if base is None else dist.Independent(base, fn.reinterpreted_batch_ndims)
    if isinstance(fn, ExpandedDistribution):
        base = with_mask(fn.base_dist, None)
        fn = fn if base is None else base.expand(fn.batch_shape)
    if counted is None:
        return fn
    if fn.event_dim:
        entries = counted.flatten(max(0, counted.dim() - fn.event_dim))
        if bool((entries.any(-1) != entries.all(-1)).any()):
            return None
        counted = entries.all(-1)
    return fn.mask(counted)


def _masks(site: Site) -> Iterator[tuple[bool | Tensor | None, int]]:
    """Each mask with the number of dims that an entry of it stands for, the outermost first."""
    fn = site["fn"]
    yield site["mask"], fn.event_dim
    while isinstance(fn, _SUMS):
        if isinstance(fn, MaskedDistribution):
            yield fn._mask, fn.event_dim
        fn = fn.base_dist


def _as_event(mask: Tensor, event_dim: int) -> Tensor:
    return mask.reshape(mask.shape + (1,) * event_dim)


def _is_distribution(value: object) -> bool:
    return isinstance(value, torch.distributions.Distribution)
