"""Draws that have their density and its gradient: those of three distributions do not."""

from __future__ import annotations

import math
from copy import copy
from functools import partial

import torch
from pyro.distributions import MixtureOfDiagNormals, MixtureOfDiagNormalsSharedCovariance
from torch import Tensor
from torch.distributions import Beta, LKJCholesky

from pyro_mcvae.programs.sites import layers
from pyro_mcvae.programs.types import Distribution

__all__ = ["mended"]

_MIXTURES = MixtureOfDiagNormals, MixtureOfDiagNormalsSharedCovariance
_WRONG = LKJCholesky, *_MIXTURES
_ONE = torch.Size()


def mended(fn: Distribution) -> Distribution:
    """The same distribution, with right draws."""
    return _mended(fn) if any(isinstance(f, _WRONG) for f in layers(fn)) else fn


def _mended(fn: Distribution) -> Distribution:
    if isinstance(fn, LKJCholesky):
        return _correlations(fn)
    new = copy(fn)
    if isinstance(fn, _MIXTURES):
        new.rsample = partial(_of_mixture, fn)
    else:
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


def _of_mixture(fn: Distribution, sample_shape: torch.Size = _ONE) -> Tensor:
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
