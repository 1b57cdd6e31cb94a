"""Distributions that a program made of one particle's values, as those of all particles."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor, nn

from pyro_mcvae.ops.lanes import Lanes
from pyro_mcvae.programs.errors import LeadingDimsError
from pyro_mcvae.programs.types import Distribution

# These choose entries by values, which cannot be asked inside of the lanes; of Categorical's form.
_BY_LOGITS = dist.Multinomial, dist.OneHotCategorical
# How deep tensors are looked for in what a distribution is made of.
_DEPTH = 6


def lifted(fn: Distribution, lanes: Lanes, depth: int) -> Distribution:
    """
    The distribution of all particles.

    :param fn: made inside of the lanes.
    :param depth: how many batch dims stand to the right of the lanes.
    :returns: ``fn`` itself where nothing of it is in a lane.
    :raises LeadingDimsError: for a distribution that is not made of its parameters alone.
    """
    if not any(lanes.holds(t) for t in _tensors(fn, _DEPTH)):
        return fn
    if type(fn) in _BY_LOGITS:
        count = {"total_count": fn.total_count} if type(fn) is dist.Multinomial else {}
        return type(fn)(**count, logits=lanes.lift(fn.logits, depth + 1), validate_args=False)
    if isinstance(fn, torch.distributions.Independent):
        events = fn.reinterpreted_batch_ndims
        return dist.Independent(lifted(fn.base_dist, lanes, depth + events), events)
    if isinstance(fn, ExpandedDistribution):
        base = lifted(fn.base_dist, lanes, depth)
        lead = base.batch_shape[: len(base.batch_shape) - depth]
        pad = (1,) * (depth - len(fn.batch_shape))
        return base.expand((*lead, *pad, *fn.batch_shape))
    if isinstance(fn, MaskedDistribution):
        return lifted(fn.base_dist, lanes, depth).mask(_lift(fn._mask, lanes, depth))
    if type(fn) is dist.Delta:
        value = lanes.lift(fn.v, depth + fn.event_dim)
        return dist.Delta(value, _lift(fn.log_density, lanes, depth), fn.event_dim)
    if type(fn) is dist.Unit:
        return dist.Unit(lanes.lift(fn.log_factor, depth), has_rsample=fn.has_rsample)
    if isinstance(fn, torch.distributions.MixtureSameFamily):
        weights = lifted(fn.mixture_distribution, lanes, depth)
        return type(fn)(weights, lifted(fn.component_distribution, lanes, depth + 1))
    if isinstance(fn, torch.distributions.TransformedDistribution) and not any(
        lanes.holds(t) for t in _tensors(fn.transforms, _DEPTH)
    ):
        events = len(fn.event_shape) - len(fn.base_dist.event_shape)
        base = lifted(fn.base_dist, lanes, depth + events)
        return dist.TransformedDistribution(base, fn.transforms)
    return _by_parameters(fn, lanes, depth)


def _by_parameters(fn: Distribution, lanes: Lanes, depth: int) -> Distribution:
    """Of parameters that have the shape of the batch, and the event that their constraint says."""
    own = vars(fn)
    found = {
        name: _lift(own[name], lanes, depth + constraint.event_dim)
        for name, constraint in fn.arg_constraints.items()
        if name in own and not (name == "probs" and "logits" in own)
    }
    try:
        return type(fn)(**found, validate_args=False)
    except TypeError as error:
        raise LeadingDimsError(
            f"the parameters of a {type(fn).__name__} are not all that it is made of, so that "
            f"those of all particles are not known: {error}",
            reason=f"{type(fn).__name__} is not made under vmap",
        ) from error


def _lift(value: bool | float | Tensor, lanes: Lanes, depth: int) -> bool | float | Tensor:
    return lanes.lift(value, depth) if isinstance(value, Tensor) else value


def _tensors(value: object, depth: int) -> Iterator[Tensor]:
    """The tensors that a distribution is made of, its networks' parameters left out."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, depth)
    elif isinstance(value, functools.partial):
        yield from _tensors([*value.args, *value.keywords.values()], depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        for part in vars(value).values():
            yield from _tensors(part, depth - 1)
