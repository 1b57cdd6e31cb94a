"""Importance weights in log space: averages, normalised weights, effective sample size."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_mean_exp(log_weight: Tensor, dim: int = 0) -> Tensor:
    r"""
    The importance weighted bound of Burda et al. [1],

    .. math:: L = \log \frac{1}{K} \sum_{k=1}^K w_k .

    :param ~torch.Tensor log_weight: log w, shape ``[K, *plates]`` for ``dim=0``.
    :param int dim: the dimension of the particles.
    :returns: L in nats, shape ``[*plates]``.

    [1] Burda, Grosse, Salakhutdinov (2016), *Importance Weighted Autoencoders*.

    Example::

        >>> log_mean_exp(torch.tensor([0.0, 0.0]))
        tensor(0.)
    """
    return log_weight.logsumexp(dim) - math.log(log_weight.shape[dim])


def renyi_bound(log_weight: Tensor, alpha: float = 0.0, dim: int = 0) -> Tensor:
    r"""
    The variational Rényi bound of order alpha [1], from K draws:

    .. math:: L_\alpha = \frac{1}{1 - \alpha} \log \frac{1}{K} \sum_{k=1}^K w_k^{1 - \alpha} .

    It is :func:`log_mean_exp` for ``alpha=0``, falls as alpha grows, and tends to the average of
    log w, the ELBO, as alpha tends to 1.

    :param ~torch.Tensor log_weight: log w, shape ``[K, *plates]`` for ``dim=0``.
    :param float alpha: the order, other than 1.
    :param int dim: the dimension of the particles.
    :returns: L in nats, shape ``[*plates]``.

    [1] Li, Turner (2016), *Rényi Divergence Variational Inference*.

    Example::

        >>> renyi_bound(torch.tensor([1.0, 3.0]).log(), alpha=-1.0).exp()  # (1 + 9) / 2 = 5
        tensor(2.2361)
    """
    # The power 1 of IWAE costs no operation.
    if alpha == 0:
        return log_mean_exp(log_weight, dim)
    return log_mean_exp((1 - alpha) * log_weight, dim) / (1 - alpha)


def normalized_weights(log_weight: Tensor, dim: int = 0) -> Tensor:
    r"""
    Self-normalised weights :math:`w_k / \sum_j w_j`; all zero where every weight is zero.

    :param ~torch.Tensor log_weight: log w, shape ``[K, *plates]`` for ``dim=0``.
    :param int dim: the dimension of the particles.
    :returns: weights of the same shape, summing to one over ``dim``.

    Example::

        >>> normalized_weights(torch.tensor([0.0, -float("inf")]))
        tensor([1., 0.])
    """
    # NaN where all are zero: a datum whose particles all have weight zero carries no gradient.
    return log_weight.softmax(dim).masked_fill(log_weight == -math.inf, 0.0)


def effective_sample_size(log_weight: Tensor, dim: int = 0) -> Tensor:
    r"""
    Kish's effective sample size :math:`(\sum_k w_k)^2 / \sum_k w_k^2`, between 1 and K.

    :param ~torch.Tensor log_weight: log w, shape ``[K, *plates]`` for ``dim=0``.
    :param int dim: the dimension of the particles.
    :returns: shape ``[*plates]``.

    Example::

        >>> effective_sample_size(torch.zeros(8))
        tensor(8.)
    """
    # Relative to the largest weight: the difference of two huge numbers would lose its digits.
    largest = log_weight.amax(dim, keepdim=True)
    log_weight = log_weight - largest.clamp_min(torch.finfo(log_weight.dtype).min)
    return (2.0 * log_weight.logsumexp(dim) - (2.0 * log_weight).logsumexp(dim)).exp()


def leave_one_out_mean(value: Tensor) -> Tensor:
    r"""
    The mean over the other particles, :math:`\frac{1}{K-1} \sum_{j \ne k} x_j`.

    :param ~torch.Tensor value: x, shape ``[K, *plates]``, K at least 2.
    :returns: the same shape.
    :raises ValueError: for fewer than two particles.

    Example::

        >>> leave_one_out_mean(torch.tensor([1.0, 2.0, 6.0]))
        tensor([4.0000, 3.5000, 1.5000])
    """
    num_particles = value.shape[0]
    if num_particles < 2:
        raise ValueError(f"a leave-one-out baseline needs num_particles >= 2, got {num_particles}")
    # Sums over j < k and j > k: subtracting particle k from the total would be wrong where it is
    # infinite, and inexact where it dwarfs the others.
    none = torch.zeros_like(value[:1])
    before = torch.cat([none, value[:-1].cumsum(0)])
    after = torch.cat([value[1:].flip(0).cumsum(0).flip(0), none])
    return (before + after) / (num_particles - 1)


def leave_one_out_signal(log_weight: Tensor, substitute: Tensor | None = None) -> Tensor:
    r"""
    VIMCO's learning signal :math:`L - L_{-k}` of each particle [1], where

    .. math::
        L = \log \frac{1}{K} \sum_j w_j, \qquad
        L_{-k} = \log \frac{1}{K} \Big( \sum_{j \ne k} w_j + \exp s_k \Big), \qquad
        s_k = \frac{1}{K-1} \sum_{j \ne k} \log w_j .

    :math:`L_{-k}` does not depend on particle k, so subtracting it leaves the expectation of
    the score-function gradient unchanged. Where it is minus infinity (all other weights are
    zero) nothing is subtracted, for the same reason.

    :param ~torch.Tensor log_weight: log w, shape ``[K, *plates]``, K at least 2.
    :param ~torch.Tensor substitute: another s, which must not depend on the decision that is
        scored.
    :returns: detached signal of the same shape.
    :raises ValueError: for fewer than two particles.

    [1] Mnih, Rezende (2016), *Variational Inference for Monte Carlo Objectives*.

    Example::

        >>> leave_one_out_signal(torch.zeros(3))
        tensor([0., 0., 0.])
    """
    log_weight = log_weight.detach()
    if substitute is None:
        substitute = leave_one_out_mean(log_weight)
    zero = log_weight.new_full((1, *log_weight.shape[1:]), -math.inf)
    before = torch.cat([zero, log_weight[:-1].logcumsumexp(0)])
    after = torch.cat([log_weight[1:].flip(0).logcumsumexp(0).flip(0), zero])
    others = torch.logaddexp(before, after)
    baseline = torch.logaddexp(others, substitute.detach()) - math.log(len(log_weight))
    return log_mean_exp(log_weight) - torch.where(others.isneginf(), 0.0, baseline)
