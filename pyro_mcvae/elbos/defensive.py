"""Defensive mixtures: a chain that is lost counts as its first draw."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_mcvae.chains.annealing import Chain

# Costs a bound of good chains 0.01 nats; a lost one costs log(100) = 4.6 nats over a plain draw.
_BY_DEFAULT = 0.01


def defensive_share(given: float | None, trained: bool, reweighted: bool) -> float:
    """
    The share of the first draw in each weight.

    :param given: by the user; None for the default of a chain that is ours, and trained.
    :param bool reweighted: whether the gradient is the reweighted one.
    :raises ValueError: for what is no share, or where no chain decides a step.
    """
    if given is None:
        return _BY_DEFAULT if trained else 0.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1:
        raise ValueError(f"defensive must be a number from 0 to below 1, got {given!r}")
    if given and reweighted:
        raise ValueError(
            f"defensive={given} keeps lost chains from deciding a step, which those of "
            f"gradient_estimator='reweighted' do not: leave it out"
        )
    return float(given)


def defended(chain: Chain, share: float) -> Tensor:
    r"""
    The log weight of a mixture of an unadjusted chain and its beginning.

    .. math:: W' = \log\big((1 - \alpha)\, e^W + \alpha\, w(z_0)\big)

    :param float share: :math:`\alpha`, between 0 and 1.
    :returns: shape ``[*batch]``; W where that is not finite.
    """
    usable, first = chain.log_weight.isfinite(), chain.start.log_weight
    own = torch.where(usable, chain.log_weight, 0.0) + math.log1p(-share)
    first = torch.where(first.isfinite(), first, -math.inf) + math.log(share)
    return torch.where(usable, torch.logaddexp(own, first), chain.log_weight)
