"""Pareto's k-hat: how heavy the tail of importance weights is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Fewer exceedances than this say nothing about a tail.
_FEWEST = 5
# Largest weights that agree to a tenth of a percent: rounding, or ties, but no tail.
_FLAT = 1e-3


def tail_length(num_particles: int) -> int:
    """How many of the largest weights make the tail: a fifth, but at most three square roots."""
    return math.ceil(min(num_particles / 5, 3 * math.sqrt(num_particles)))


def pareto_k(log_weight: Tensor, num_particles: int | None = None) -> Tensor:
    r"""
    The shape :math:`\hat k` of the generalized Pareto distribution fitted to the largest weights.

    The weights' distribution has about :math:`1 / \hat k` finite moments: below 0.5 the central
    limit theorem holds, below 0.7 averages are usable in practice, above it they are not to be
    trusted [1].

    :param ~torch.Tensor log_weight: log w, shape ``[K, *plates]``; or only the largest of them, at
        least ``tail_length(num_particles) + 1``.
    :param num_particles: how many weights there were; by default those given.
    :returns: shape ``[*plates]``, float64; ``-inf`` where the largest weights are equal, ``inf``
        where only a few stand above the others, NaN for too few particles (20 or less).

    [1] Vehtari, Simpson, Gelman, Yao, Gabry (2024), *Pareto Smoothed Importance Sampling*.
    [2] Zhang, Stephens (2009), *A New and Efficient Estimation Method for the Generalized Pareto
    Distribution*.

    Example, weights with infinite variance::

        >>> _ = torch.manual_seed(0)
        >>> log_weight = torch.distributions.Exponential(1 / 0.8).sample((10_000,))
        >>> bool((pareto_k(log_weight) - 0.8).abs() < 0.3)
        True
    """
    count = log_weight.shape[0] if num_particles is None else num_particles
    length = tail_length(count)
    shape = log_weight.shape[1:]
    if length < _FEWEST or log_weight.shape[0] <= length:
        return log_weight.new_full(shape, math.nan, dtype=torch.float64)
    top = log_weight.detach().double().topk(length + 1, dim=0).values.reshape(length + 1, -1)
    lowest = torch.finfo(torch.float64).min
    top = top - top[:1].clamp_min(lowest)
    # Weights below the smallest number are zeros, and no part of a tail.
    cutoff = top[-1].clamp_min(math.log(torch.finfo(torch.float64).tiny))
    above = top[:-1] > cutoff
    exceedance = torch.where(above, top[:-1].exp() - cutoff.exp(), 0.0).flip(0)
    found = _shape(exceedance, above.sum(0))
    found = torch.where(above.sum(0) < _FEWEST, math.inf, found)
    found = torch.where(cutoff > -_FLAT, -math.inf, found)
    return torch.where(top[0].isnan(), math.nan, found).reshape(shape)


def _shape(exceedance: Tensor, count: Tensor) -> Tensor:
    """
    The shape of a generalized Pareto distribution fitted to the last ``count`` entries of each
    column: the empirical Bayes estimate [2], shrunk towards 0.5 by ten observations' worth [1].

    :param exceedance: increasing, zeros where there is none, shape ``[n, columns]``.
    """
    count = count.clamp_min(1)
    n = count.double()
    columns = torch.arange(exceedance.shape[1], device=exceedance.device)
    quartile = exceedance[len(exceedance) - count + (n / 4 + 0.5).long() - 1, columns]
    largest = exceedance[-1]
    grid = 30 + n.sqrt().long()
    steps = torch.arange(1, int(grid.max()) + 1, device=n.device).double().unsqueeze(-1)
    b = (1 - (grid / (steps - 0.5)).sqrt()) / (3 * quartile) + 1 / largest
    # Zeros add log(1) = 0: only the division knows how many entries there are. One step at a time,
    # so that no tensor has both the grid's and the tail's size.
    k = torch.stack([torch.log1p(-row * exceedance).sum(0) for row in b]) / n
    likelihood = n * ((-b / k).log() - k - 1)
    usable = (steps <= grid) & likelihood.isfinite()
    weight = torch.where(usable, likelihood, -math.inf).softmax(0)
    weight = torch.where(weight >= 10 * torch.finfo(torch.float64).eps, weight, 0.0)
    mean = (torch.where(weight > 0, b, 0.0) * weight).sum(0) / weight.sum(0)
    k = torch.log1p(-mean * exceedance).sum(0) / n
    return (n * k + 10 * 0.5) / (n + 10)
