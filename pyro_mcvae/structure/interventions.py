"""
Interventions: which densities change when chosen latents do.

NaN needs no tolerance and no particular weights: 0 times NaN is NaN, so a layer that is zero at
first, or a coefficient that begins at zero, hides nothing. Where a latent cannot be NaN (integers,
programs that branch on its value) it gets another value of its support.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_mcvae.programs.isolation import isolated
from pyro_mcvae.programs.sites import changed_draw, known_support
from pyro_mcvae.programs.types import Site

Values = dict[str, Tensor]


def separating_subsets(size: int) -> Iterator[Tensor]:
    """
    Yield subsets of ``range(size)`` such that for each ordered pair one has the first alone.

    Each element is in half of the subsets, and no two are in the same half (Sperner): the fewest
    subsets that do, 9 for 100 elements. Shape of each: ``[size]``, booleans.
    """
    count = next(r for r in itertools.count(2) if math.comb(r, r // 2) >= size)
    codes = itertools.islice(itertools.combinations(range(count), count // 2), size)
    member = torch.zeros(count, size, dtype=torch.bool)
    for element, code in enumerate(codes):
        member[list(code), element] = True
    yield from member


def random_halves(size: int) -> Iterator[Tensor]:
    """Yield a random half of ``range(size)`` and the other half, of at least one element each."""
    half = random_half((size,))
    yield half
    yield ~half


def random_half(shape: tuple[int, ...]) -> Tensor:
    """Return a random half of the entries of a shape, at least one: booleans."""
    size = math.prod(shape)
    half = torch.zeros(size, dtype=torch.bool)
    half[_random().sample(range(size), max(1, size // 2))] = True
    return half.reshape(shape)


def _random() -> random.Random:
    """Random numbers of the step's state, of which none is taken from PyTorch's generators."""
    with torch._C.DisableTorchFunction():
        return random.Random(torch.get_rng_state().numpy().tobytes())


@contextmanager
def other_draws() -> Iterator[None]:
    """Let draws be others than those of a run that began with the same random state."""
    with isolated():
        torch.manual_seed(_random().getrandbits(31))
        yield


def another(site: Site) -> Tensor:
    """Return another value for each element: a second draw, or the next value where discrete."""
    value, support = site["value"], known_support(site["fn"])
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    if support is constraints.boolean:
        return value.logical_not().to(value.dtype)
    if support is constraints.one_hot:
        return value.roll(1, -1)
    if isinstance(support, _INTERVAL):
        low, size = support.lower_bound, support.upper_bound - support.lower_bound + 1
        return (low + (value - low + 1) % size).to(value.dtype)
    if isinstance(support, _COUNTS):
        return value + 1
    try:
        drawn: Tensor = site["fn"](*site["args"], **site["kwargs"])
    except NotImplementedError:
        return value  # a handler gave it to a distribution that cannot draw
    return drawn


_INTERVAL = type(constraints.integer_interval(0, 1))
_COUNTS = type(constraints.nonnegative_integer)


def intervene(
    sites: Mapping[str, Site],
    values: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    where: Mapping[str, Tensor],
    undefined: bool,
) -> Values:
    """
    Change some entries of latents.

    :param values: each latent's value.
    :param others: another value of each.
    :param where: which entries of each, to broadcast with the batch dims of its value.
    :param bool undefined: whether floating-point entries become NaN, instead of another value.
    """
    found = dict(values)
    for name, chosen in where.items():
        value, other = values[name], others[name]
        if undefined and value.is_floating_point():
            other = changed_draw(lambda v: torch.full_like(v, math.nan), value)
        if value.shape != other.shape:
            continue
        events = sites[name]["fn"].event_dim
        at = chosen.to(value.device).reshape(chosen.shape + (1,) * events)
        found[name] = changed_draw(lambda a, b, at=at: torch.where(at, a, b), other, value)
    return found


# Rounding of entries beside others that are NaN: vectorised functions treat whole blocks specially.
_ROUNDING = 2**10


def differing(before: Tensor, after: Tensor, undefined: bool) -> Tensor:
    """
    Return which entries of a log density have changed; all of them if the shape has.

    :param bool undefined: whether entries were made NaN, beside which others may be rounded in
        another way. Otherwise the comparison is bitwise: kernels and shapes are the same.
    """
    if before.shape != after.shape:
        return torch.ones_like(before, dtype=torch.bool)
    changed = before.isnan() != after.isnan()
    if not undefined:
        return changed | ((before != after) & ~before.isnan())
    allowed = _ROUNDING * torch.finfo(before.dtype).eps * before.abs().clamp(min=1.0)
    far = (before != after) & ~((before - after).abs() <= allowed)
    return changed | (far & ~before.isnan())
