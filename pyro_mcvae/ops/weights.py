"""Importance weights in log space: averages, effective sample size, Pareto k."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Averages, normalized weights, effective sample size.


def log_mean_exp(log_weight: Tensor, dim: int = 0) -> Tensor:
    r"""
    Return the importance weighted bound [1],

    .. math:: L = \log \frac{1}{K} \sum_{k=1}^K w_k .

    :param ~torch.Tensor log_weight: log w, shape ``[K, *plates]`` for ``dim=0``.
    :param int dim: the dimension of the particles.
    :returns: L in nats, shape ``[*plates]``.

    [1] Burda, Grosse, Salakhutdinov (2016), *Importance Weighted Autoencoders*.

    Example::

        >>> import torch
        >>> from pyro_mcvae.ops.weights import log_mean_exp
        >>> log_mean_exp(torch.tensor([0.0, 0.0]))
        tensor(0.)
    """
    return log_weight.logsumexp(dim) - math.log(log_weight.shape[dim])


def renyi_bound(log_weight: Tensor, alpha: float = 0.0, dim: int = 0) -> Tensor:
    r"""
    Return the variational Rényi bound of order alpha [1], from K draws:

    .. math:: L_\alpha = \frac{1}{1 - \alpha} \log \frac{1}{K} \sum_{k=1}^K w_k^{1 - \alpha} .

    It equals :func:`log_mean_exp` for ``alpha=0``, and decreases with alpha. Its limit for alpha
    to 1 is the average of log w, the ELBO.

    :param ~torch.Tensor log_weight: log w, shape ``[K, *plates]`` for ``dim=0``.
    :param float alpha: the order, other than 1.
    :param int dim: the dimension of the particles.
    :returns: L in nats, shape ``[*plates]``.

    [1] Li, Turner (2016), *Rényi Divergence Variational Inference*.

    Example::

        >>> import torch
        >>> from pyro_mcvae.ops.weights import renyi_bound
        >>> renyi_bound(torch.tensor([1.0, 3.0]).log(), alpha=-1.0).exp()  # (1 + 9) / 2 = 5
        tensor(2.2361)
    """
    # IWAE needs no power.
    if alpha == 0:
        return log_mean_exp(log_weight, dim)
    return log_mean_exp((1 - alpha) * log_weight, dim) / (1 - alpha)


def normalized_weights(log_weight: Tensor, dim: int = 0) -> Tensor:
    r"""
    Return self-normalized weights :math:`w_k / \sum_j w_j`; all zero if every weight is zero.

    :param ~torch.Tensor log_weight: log w, shape ``[K, *plates]`` for ``dim=0``.
    :param int dim: the dimension of the particles.
    :returns: weights of the same shape, summing to one over ``dim``.

    Example::

        >>> import torch
        >>> from pyro_mcvae.ops.weights import normalized_weights
        >>> normalized_weights(torch.tensor([0.0, -float("inf")]))
        tensor([1., 0.])
    """
    # Softmax is NaN if all weights are zero: such a datum has no gradient.
    return log_weight.softmax(dim).masked_fill(log_weight == -math.inf, 0.0)


def effective_sample_size(log_weight: Tensor, dim: int = 0) -> Tensor:
    r"""
    Return Kish's effective sample size :math:`(\sum_k w_k)^2 / \sum_k w_k^2`, between 1 and K.

    :param ~torch.Tensor log_weight: log w, shape ``[K, *plates]`` for ``dim=0``.
    :param int dim: the dimension of the particles.
    :returns: shape ``[*plates]``.

    Example::

        >>> import torch
        >>> from pyro_mcvae.ops.weights import effective_sample_size
        >>> effective_sample_size(torch.zeros(8))
        tensor(8.)
    """
    # Relative to the largest weight: the difference of two huge numbers would lose precision.
    largest = log_weight.amax(dim, keepdim=True)
    log_weight = log_weight - largest.clamp_min(torch.finfo(log_weight.dtype).min)
    return (2.0 * log_weight.logsumexp(dim) - (2.0 * log_weight).logsumexp(dim)).exp()


def leave_one_out_mean(value: Tensor) -> Tensor:
    r"""
    Return the mean over the other particles, :math:`\frac{1}{K-1} \sum_{j \ne k} x_j`.

    :param ~torch.Tensor value: x, shape ``[K, *plates]``, K at least 2.
    :returns: the same shape.
    :raises ValueError: for fewer than two particles.

    Example::

        >>> import torch
        >>> from pyro_mcvae.ops.weights import leave_one_out_mean
        >>> leave_one_out_mean(torch.tensor([1.0, 2.0, 6.0]))
        tensor([4.0000, 3.5000, 1.5000])
    """
    num_particles = value.shape[0]
    if num_particles < 2:
        raise ValueError(f"a leave-one-out baseline needs num_particles >= 2, got {num_particles}")
    # Sums over j < k and j > k: subtracting particle k from the total would be wrong if it is
    # infinite, and inexact if it is much larger than the others.
    none = torch.zeros_like(value[:1])
    before = torch.cat([none, value[:-1].cumsum(0)])
    after = torch.cat([value[1:].flip(0).cumsum(0).flip(0), none])
    return (before + after) / (num_particles - 1)


def leave_one_out_signal(log_weight: Tensor, substitute: Tensor | None = None) -> Tensor:
    r"""
    Return VIMCO's learning signal :math:`L - L_{-k}` of each particle [1].

    It is defined by

    .. math::
        L = \log \frac{1}{K} \sum_j w_j, \qquad
        L_{-k} = \log \frac{1}{K} \Big( \sum_{j \ne k} w_j + \exp s_k \Big), \qquad
        s_k = \frac{1}{K-1} \sum_{j \ne k} \log w_j .

    :math:`L_{-k}` does not depend on particle k, so subtracting it does not change the expectation
    of the score-function gradient. If it is minus infinity (all other weights are zero), nothing is
    subtracted.

    :param ~torch.Tensor log_weight: log w, shape ``[K, *plates]``, K at least 2.
    :param ~torch.Tensor substitute: another s, which must not depend on the decision that is
        scored.
    :returns: detached signal of the same shape.
    :raises ValueError: for fewer than two particles.

    [1] Mnih, Rezende (2016), *Variational Inference for Monte Carlo Objectives*.

    Example::

        >>> import torch
        >>> from pyro_mcvae.ops.weights import leave_one_out_signal
        >>> leave_one_out_signal(torch.zeros(3))
        tensor([0., 0., 0.])
    """
    log_weight = log_weight.detach()
    if substitute is None:
        substitute = leave_one_out_mean(log_weight)
    zero = log_weight.new_full((1, *log_weight.shape[1:]), -math.inf)
    before = torch.cat([zero, log_weight[:-1].logcumsumexp(0)])
    after = torch.cat([log_weight[1:].flip(0).logcumsumexp(0).flip(0), zero])
    without_each = torch.logaddexp(before, after)
    baseline = torch.logaddexp(without_each, substitute.detach()) - math.log(len(log_weight))
    return log_mean_exp(log_weight) - torch.where(without_each.isneginf(), 0.0, baseline)


# Pareto k-hat: the tail index of importance weights.

# The least number of exceedances for a fit.
_FEWEST = 5
# If the largest weights are equal up to a tenth of a percent, they are ties, not a tail.
_FLAT = 1e-3


def tail_length(num_particles: int) -> int:
    """Return the number of weights in the tail: a fifth, but at most three square roots."""
    return math.ceil(min(num_particles / 5, 3 * math.sqrt(num_particles)))


def pareto_k(log_weight: Tensor, num_particles: int | None = None) -> Tensor:
    r"""
    Fit the shape :math:`\hat k` of a generalized Pareto distribution to the largest weights.

    The distribution of the weights has about :math:`1 / \hat k` finite moments. Below 0.5 the
    central limit theorem holds. Below 0.7 averages are usable in practice, and above 0.7 they are
    unreliable [1].

    :param ~torch.Tensor log_weight: log w, shape ``[K, *plates]``; or only the largest of them, at
        least ``tail_length(num_particles) + 1``.
    :param num_particles: the number of all weights; by default of the given ones.
    :returns: shape ``[*plates]``, float64. It is ``-inf`` if the largest weights are equal, and
        ``inf`` if only a few are larger than the others. It is NaN for 20 particles or fewer.

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
    # Weights below the smallest number are zeros, and not part of a tail.
    cutoff = top[-1].clamp_min(math.log(torch.finfo(torch.float64).tiny))
    above = top[:-1] > cutoff
    exceedance = torch.where(above, top[:-1].exp() - cutoff.exp(), 0.0).flip(0)
    k_hat = _shape(exceedance, above.sum(0))
    k_hat = torch.where(above.sum(0) < _FEWEST, math.inf, k_hat)
    k_hat = torch.where(cutoff > -_FLAT, -math.inf, k_hat)
    return torch.where(top[0].isnan(), math.nan, k_hat).reshape(shape)


def _shape(exceedance: Tensor, count: Tensor) -> Tensor:
    """
    Fit the shape of a generalized Pareto distribution to the last ``count`` entries of each column.

    It is the empirical Bayes estimate [2], shrunk towards 0.5 with the weight of ten observations
    [1].

    :param exceedance: increasing, padded with zeros, shape ``[n, columns]``.
    """
    count = count.clamp_min(1)
    n = count.double()
    columns = torch.arange(exceedance.shape[1], device=exceedance.device)
    quartile = exceedance[len(exceedance) - count + (n / 4 + 0.5).long() - 1, columns]
    largest = exceedance[-1]
    grid = 30 + n.sqrt().long()
    steps = torch.arange(1, int(grid.max()) + 1, device=n.device).double().unsqueeze(-1)
    b = (1 - (grid / (steps - 0.5)).sqrt()) / (3 * quartile) + 1 / largest
    # Zeros add log(1) = 0, so only the division depends on the count. A loop, so that no tensor has
    # the sizes of both the grid and the tail.
    k = torch.stack([torch.log1p(-row * exceedance).sum(0) for row in b]) / n
    likelihood = n * ((-b / k).log() - k - 1)
    usable = (steps <= grid) & likelihood.isfinite()
    weight = torch.where(usable, likelihood, -math.inf).softmax(0)
    weight = torch.where(weight >= 10 * torch.finfo(torch.float64).eps, weight, 0.0)
    mean = (torch.where(weight > 0, b, 0.0) * weight).sum(0) / weight.sum(0)
    k = torch.log1p(-mean * exceedance).sum(0) / n
    return (n * k + 10 * 0.5) / (n + 10)
