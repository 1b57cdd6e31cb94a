"""Fixes for distributions: patched samplers, validation, moving supports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from copy import copy
from functools import partial

import torch
from pyro.distributions import (
    CoalescentTimes,
    MixtureOfDiagNormals,
    MixtureOfDiagNormalsSharedCovariance,
    RelaxedOneHotCategoricalStraightThrough,
    SineBivariateVonMises,
    VonMises,
)
from torch import Tensor
from torch.distributions import Beta, LKJCholesky, RelaxedOneHotCategorical, constraints

from pyro_mcvae.ops import compat
from pyro_mcvae.programs.methods import has_methods_of
from pyro_mcvae.programs.sites import bare, elementwise, known_support, layers, tensors_of
from pyro_mcvae.programs.types import Constraint, Distribution, Site, Transform

# The transforms of a distribution, and their parts.


def transforms_of(fn: Distribution) -> Iterator[Transform]:
    """Yield all transforms of a distribution, also below wrappers."""
    for layer in layers(fn):
        yield from getattr(layer, "transforms", ())


_LIBRARIES = "torch.distributions.", "pyro.distributions."


def has_own_density(fn: Distribution) -> bool:
    """Return whether a class outside PyTorch and Pyro defines the ``log_prob``."""
    return not all(type(f).log_prob.__module__.startswith(_LIBRARIES) for f in layers(fn))


def may_cache(fn: Distribution) -> bool:
    """
    Return whether a density may reuse values that were cached when its draw was taken.

    Transforms cache the inverse. Zuko's flows, and other distributions that define ``log_prob``
    themselves, may cache the density.
    """
    return any(transforms_of(fn)) or has_own_density(fn)


def parts_of(transform: Transform) -> Iterator[Transform]:
    """Yield the elementary transforms that a transform is composed of."""
    inner = _inner(transform)
    if not inner:
        yield transform
    for part in inner:
        yield from parts_of(part)


def _inner(transform: Transform) -> list[Transform]:
    """Return the transforms that a transform is directly composed of."""
    if type(transform) is compat.InverseTransform:
        return [transform.inv]
    base = getattr(transform, "base_transform", None)
    return list(getattr(transform, "parts", None) or ([] if base is None else [base]))


def is_elementary(transform: Transform) -> bool:
    """Return whether a transform is composed of torch's closed-form transforms."""
    return type(transform).__module__ == "torch.distributions.transforms" and all(
        is_elementary(part) for part in _inner(transform)
    )


# Patched samplers: the draws of six distributions have a wrong density or gradient upstream.

_ONE = torch.Size()
Patch = Callable[[Distribution], Distribution]


def patched(fn: Distribution) -> Distribution:
    """Return the same distribution with a correct sampler."""
    return _patched(fn) if any(has_methods_of(f, *_FAULTY) for f in layers(fn)) else fn


def _patched(fn: Distribution) -> Distribution:
    for cls, patch in _PATCHES.items():
        if has_methods_of(fn, cls):
            return patch(fn)
    new = copy(fn)
    new.base_dist = _patched(fn.base_dist)
    return new


def _correlations(fn: Distribution) -> Distribution:
    """
    Patch LKJCholesky with the sampler of Lewandowski et al. (2009), section 3.2.

    The squared length of row k of the Cholesky factor, k = 1, 2, ..., without its diagonal, is
    Beta(k / 2, .). PyTorch draws it from Beta(k - 1/2, .). For example, with three dims and
    concentrations of 1 and 1.5, the mean weight of such draws is 1.13 instead of 1.
    """
    beta = getattr(fn, compat.ROW_LENGTHS, None)
    if beta is None or fn.dim < 3:
        return fn
    row = torch.arange(fn.dim).clamp(min=1).to(beta.concentration0)
    new = copy(fn)
    lengths = Beta((row / 2).expand_as(beta.concentration0), beta.concentration0)
    setattr(new, compat.ROW_LENGTHS, lengths)
    return new


def _drawn_by(sampler: Callable[..., Tensor], name: str = "sample") -> Patch:
    def patch(fn: Distribution) -> Distribution:
        new = copy(fn)
        setattr(new, name, partial(sampler, fn))
        return new

    return patch


def _times(fn: Distribution, sample_shape: torch.Size = _ONE) -> Tensor:
    """Draw coalescence times at the distribution's rate; Pyro draws them at a rate of 1."""
    rate = fn.rate.detach().unsqueeze(-1)
    return CoalescentTimes(fn.leaf_times * rate).sample(sample_shape) / rate


@torch.no_grad()
def _angles(fn: Distribution, sample_shape: torch.Size = _ONE) -> Tensor:
    """
    Draw two angles by the rejection sampler of Kent, Ganeiber and Mardia (2018).

    Pyro's sampler scales one angle's proposals by another coordinate's scale. With concentrations
    of 5 and a correlation of 2 the mean cosine of the first angle is 0.82 instead of 0.88.
    """
    shape = sample_shape + fn.batch_shape
    concentrations = fn.phi_concentration, fn.psi_concentration, fn.correlation
    first, second, correlation = (t.expand(shape) for t in concentrations)
    # The first angle's density on the circle, below one of x -> exp(-sum(bend * x**2)).
    curve = (first - correlation.square() / second) / 2
    low = curve.clamp(max=0)
    bend = torch.stack([-low, curve - low])
    size = 1 - curve.abs() + (1 + curve.square()).sqrt()
    scale = (1 + 2 * bend / size).rsqrt()
    angle, pending = torch.zeros_like(first), torch.ones_like(first, dtype=torch.bool)
    while pending.any():
        x = scale * torch.randn_like(scale)
        x = x / x.norm(dim=0)
        log_ratio = _log_i0(torch.hypot(second, correlation * x[1])) - _log_i0(second)
        envelope = size / 2 - 1 - (size / 2 + (bend * x.square()).sum(0)).log()
        log_density = first * (x[0] - 1) + log_ratio + low
        accepted = pending & (torch.rand_like(first).log() < log_density - envelope)
        angle, pending = torch.where(accepted, torch.atan2(x[1], x[0]), angle), pending & ~accepted
    lean = correlation * angle.sin()
    second_angle = VonMises(torch.atan2(lean, second), torch.hypot(second, lean)).sample()
    angles = torch.stack([angle + fn.phi_loc, second_angle + fn.psi_loc], -1)
    return (angles + math.pi).remainder(2 * math.pi) - math.pi


def _log_i0(x: Tensor) -> Tensor:
    return torch.special.i0e(x).log() + x


def _mixture(fn: Distribution, sample_shape: torch.Size = _ONE) -> Tensor:
    """
    Draw with the implicit gradient of Figurnov et al. (2018), one dim after the other.

    Pyro's gradient of the components' logits is correct only if the line through two means goes
    through the origin. The smallest scale must also be 1.
    """
    value, scales = fn.sample(sample_shape), fn.coord_scale
    if scales.dim() < fn.locs.dim():
        scales = scales.unsqueeze(-2)  # shared by the components
    log_weight, parts = fn.categorical.logits, []
    dims = (t.expand_as(fn.locs).unbind(-1) for t in (fn.locs, scales))
    for x, loc, scale in zip(value.unbind(-1), *dims, strict=True):
        # The conditional distribution function does not change with the parameters.
        weight = log_weight.softmax(-1)
        eps = (x.unsqueeze(-1) - loc) / scale
        log_density = -0.5 * eps.square() - scale.log() - 0.5 * math.log(2 * math.pi)
        density = (weight * log_density.exp()).sum(-1).detach()
        cdf = (weight * torch.special.ndtr(eps)).sum(-1)
        x = x + (cdf.detach() - cdf) / density
        parts.append(x)
        log_weight = log_weight - 0.5 * ((x.unsqueeze(-1) - loc) / scale).square() - scale.log()
    return torch.stack(parts, -1)


def _relaxed(fn: Distribution, sample_shape: torch.Size = _ONE) -> Tensor:
    """
    Draw values that sum to one.

    At a temperature of 0.05 the logits differ by hundreds. In single precision PyTorch's draws then
    sum to one only up to 1e-5, which fails PyTorch's check of the support.
    """
    value = fn.rsample(sample_shape)
    if isinstance(fn, RelaxedOneHotCategoricalStraightThrough):
        return value
    return value / value.detach().sum(-1, keepdim=True)


_PATCHES: dict[type, Patch] = {
    LKJCholesky: _correlations,
    CoalescentTimes: _drawn_by(_times),
    SineBivariateVonMises: _drawn_by(_angles),
    RelaxedOneHotCategorical: _drawn_by(_relaxed, "rsample"),
    MixtureOfDiagNormals: _drawn_by(_mixture, "rsample"),
    MixtureOfDiagNormalsSharedCovariance: _drawn_by(_mixture, "rsample"),
}
_FAULTY = tuple(_PATCHES)


# Values that have passed Pyro's validation before, and are not validated again.


def was_checked(old: Site, site: Site) -> bool:
    """
    Return whether a value has passed Pyro's validation before.

    This holds for the same tensor (an observation) at a site of the same shape and support.
    Parameters are validated as usual, when a distribution is made.
    """
    # Constraints with parameters (an interval) are new objects each time, and checked again.
    same = site["value"] is old["value"] and site["fn"].shape() == old["fn"].shape()
    return same and _support(site) is _support(old)


def _support(site: Site) -> Constraint:
    return known_support(bare(site["fn"]))


def unvalidated(fns: Iterable[Distribution]) -> AbstractContextManager[None]:
    """Turn off the validation of distributions and of their base distributions."""
    return compat.without_validation(part for fn in fns for part in _with_parts(fn))


def _with_parts(fn: Distribution) -> Iterator[Distribution]:
    """Yield a distribution and the distributions that it is made of."""
    yield fn
    for part in vars(fn).values():
        if isinstance(part, torch.distributions.Distribution):
            yield from _with_parts(part)


# Whether a guide's parameters move the ends of a distribution's support.

_TRANSFORMED = torch.distributions.TransformedDistribution


def moves_support(fn: Distribution) -> bool:
    """
    Return whether the support's ends have a gradient to parameters.

    For a transformed distribution without an explicit support, return whether a bounded base meets
    a transform that may move its ends.
    """
    fn = bare(fn)
    if is_pushed_forward(fn):
        return _moved_by_transforms(fn)
    return any(t.requires_grad for t in tensors_of(known_support(fn)))


def is_pushed_forward(fn: Distribution) -> bool:
    """Return whether a distribution is transformed, and does not define its support."""
    return isinstance(fn, _TRANSFORMED) and type(fn).support is _TRANSFORMED.support


def _moved_by_transforms(fn: Distribution) -> bool:
    """Return whether a bounded image meets a transform with parameters; it may end at infinity."""
    if moves_support(fn.base_dist):
        return True
    bounded = not _is_real(known_support(fn.base_dist))
    for transform in fn.transforms:
        if bounded and _may_learn(transform):
            return True
        bounded = bounded or not _is_real(transform.codomain)
    return False


def _is_real(constraint: Constraint) -> bool:
    return elementwise(constraint) is constraints.real


def _may_learn(transform: Transform) -> bool:
    """Return whether a transform has parameters; flows are assumed to have some."""
    if not is_elementary(transform):
        return True
    return any(_learns(value) for part in parts_of(transform) for value in vars(part).values())


def _learns(value: object) -> bool:
    if isinstance(value, torch.distributions.Distribution):  # a transform may use its quantiles
        return any(map(_learns, vars(value).values()))
    return isinstance(value, Tensor) and value.requires_grad
