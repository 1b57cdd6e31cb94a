"""Draws of LKJCholesky that have its density: from three dims on PyTorch's do not."""

from __future__ import annotations

from copy import copy

import torch
from torch.distributions import Beta, LKJCholesky

from pyro_mcvae.programs.sites import layers
from pyro_mcvae.programs.types import Distribution

__all__ = ["with_draws_of_its_density"]


def with_draws_of_its_density(fn: Distribution) -> Distribution:
    """
    The same distribution, with the sampler of Lewandowski et al. (2009), section 3.2.

    The squared length of row k of the Cholesky factor, k = 1, 2, ..., without its diagonal, is
    Beta(k / 2, .); PyTorch draws it from Beta(k - 1/2, .), so that the mean weight of such draws is
    1.13 in three dims, with concentrations of 1 and 1.5, where it has to be 1.
    """
    return _mended(fn) if any(isinstance(f, LKJCholesky) for f in layers(fn)) else fn


def _mended(fn: Distribution) -> Distribution:
    if isinstance(fn, LKJCholesky):
        beta = getattr(fn, "_beta", None)
        if beta is None or fn.dim < 3:
            return fn
        row = torch.arange(fn.dim).clamp(min=1).to(beta.concentration0)
        fixed = copy(fn)
        fixed._beta = Beta((row / 2).expand_as(beta.concentration0), beta.concentration0)
        return fixed
    outer = copy(fn)
    outer.base_dist = _mended(fn.base_dist)
    return outer
