"""Draws that have their density and its gradient: those of five distributions do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from functools import partial

import torch
from pyro.distributions import (
    CoalescentTimes,
    MixtureOfDiagNormals,
    MixtureOfDiagNormalsSharedCovariance,
    SineBivariateVonMises,
    VonMises,
)
from torch import Tensor
from torch.distributions import Beta, LKJCholesky

from pyro_mcvae.programs.sites import layers
from pyro_mcvae.programs.types import Distribution

_ONE = torch.Size()
Mend = Callable[[Distribution], Distribution]


def mended(fn: Distribution) -> Distribution:
    """The same distribution, with right draws."""
    return _mended(fn) if any(isinstance(f, _WRONG) for f in layers(fn)) else fn


def _mended(fn: Distribution) -> Distribution:
    for cls, mend in _MENDS.items():
        if isinstance(fn, cls):
            return mend(fn)
    new = copy(fn)
    new.base_dist = _mended(fn.base_dist)
    return new


def _correlations(fn: Distribution) -> Distribution:
    """
    With the sampler of Lewandowski et al. (2009), section 3.2.

    The squared length of row k of the Cholesky factor, k = 1, 2, ..., without its diagonal, is
    Beta(k / 2, .); PyTorch draws it from Beta(k - 1/2, .), so that the mean weight of such draws is
    1.13 in three dims, with concentrations of 1 and 1.5, where it has to be 1.
    """
    beta = getattr(fn, "_beta", None)
    if beta is None or fn.dim < 3:
        return fn
    row = torch.arange(fn.dim).clamp(min=1).to(beta.concentration0)
    new = copy(fn)
    new._beta = Beta((row / 2).expand_as(beta.concentration0), beta.concentration0)
    return new


def _drawn_by(sampler: Callable[..., Tensor], name: str = "sample") -> Mend:
    def mend(fn: Distribution) -> Distribution:
        new = copy(fn)
        setattr(new, name, partial(sampler, fn))
        return new

    return mend


def _times(fn: Distribution, sample_shape: torch.Size = _ONE) -> Tensor:
    """Of coalescence at the distribution's rate, where Pyro's are those of a rate of 1."""
    rate = fn.rate.detach().unsqueeze(-1)
    return CoalescentTimes(fn.leaf_times * rate).sample(sample_shape) / rate


@torch.no_grad()
def _angles(fn: Distribution, sample_shape: torch.Size = _ONE) -> Tensor:
    """
    By the rejection sampler of Kent, Ganeiber and Mardia (2018).

    Pyro's gives one angle's proposals the scale of another coordinate's: with concentrations of 5
    and a correlation of 2 the mean cosine of the first angle is 0.82, where it has to be 0.88.
    """
    shape = fn._extended_shape(sample_shape)[:-1]
    own = fn.phi_concentration, fn.psi_concentration, fn.correlation
    first, second, correlation = (t.expand(shape) for t in own)
    # The first angle's density on the circle, below one of x -> exp(-sum(bend * x**2)).
    curve = (first - correlation.square() / second) / 2
    low = curve.clamp(max=0)
    bend = torch.stack([-low, curve - low])
    size = 1 - curve.abs() + (1 + curve.square()).sqrt()
    scale = (1 + 2 * bend / size).rsqrt()
    angle, left = torch.zeros_like(first), torch.ones_like(first, dtype=torch.bool)
    while left.any():
        x = scale * torch.randn_like(scale)
        x = x / x.norm(dim=0)
        other = _log_i0(torch.hypot(second, correlation * x[1])) - _log_i0(second)
        envelope = size / 2 - 1 - (size / 2 + (bend * x.square()).sum(0)).log()
        log_density = first * (x[0] - 1) + other + low
        taken = left & (torch.rand_like(first).log() < log_density - envelope)
        angle, left = torch.where(taken, torch.atan2(x[1], x[0]), angle), left & ~taken
    lean = correlation * angle.sin()
    given = VonMises(torch.atan2(lean, second), torch.hypot(second, lean)).sample()
    angles = torch.stack([angle + fn.phi_loc, given + fn.psi_loc], -1)
    return (angles + math.pi).remainder(2 * math.pi) - math.pi


def _log_i0(x: Tensor) -> Tensor:
    return torch.special.i0e(x).log() + x


def _mixture(fn: Distribution, sample_shape: torch.Size = _ONE) -> Tensor:
    """
    With the implicit gradient of Figurnov et al. (2018), one dim after the other.

    Pyro's gradient with respect to the components' logits takes for granted that the line through
    two means goes through the origin, and that the smallest scale is 1: elsewhere it is wrong.
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


_MENDS: dict[type, Mend] = {
    LKJCholesky: _correlations,
    CoalescentTimes: _drawn_by(_times),
    SineBivariateVonMises: _drawn_by(_angles),
    MixtureOfDiagNormals: _drawn_by(_mixture, "rsample"),
    MixtureOfDiagNormalsSharedCovariance: _drawn_by(_mixture, "rsample"),
}
_WRONG = tuple(_MENDS)
