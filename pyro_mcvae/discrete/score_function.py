"""Score-function surrogates over the slots of a discrete variable, and their baselines."""

from __future__ import annotations

import torch
from torch import Tensor


def score_surrogate(signal: Tensor, score: Tensor) -> Tensor:
    r"""
    A scalar whose gradient is :math:`\sum_s r_s \nabla \log q(z_s)`.

    :param ~torch.Tensor signal: r, what multiplies each slot's score; no gradient passes it.
    :param ~torch.Tensor score: :math:`\log q(z_s)`, of the same shape; where the signal is zero it
        may be infinite.

    Example::

        >>> logits = torch.zeros(2, requires_grad=True)
        >>> score_surrogate(torch.tensor([1.0, 0.0]), logits.log_softmax(-1)).backward()
        >>> logits.grad
        tensor([ 0.5000, -0.5000])
    """
    signal = signal.detach()
    return (signal * torch.where(signal != 0, score, 0.0)).sum()


def leave_one_out_baseline(cost: Tensor, sampled: Tensor) -> Tensor:
    r"""
    For each draw the mean cost of the other draws, for each summed category that of all draws.

    With :math:`b_j` of the draws and their mean :math:`\bar b` at the summed categories,

    .. math::
        \sum_{z \in C} \bar b \nabla q(z)
            + \frac{q(\bar C)}{n} \sum_j b_j \nabla \log q(v_j)

    has mean zero: each :math:`b_j` is independent of :math:`v_j`, so that the second term's mean
    is :math:`E[b] \nabla q(\bar C)`, and q sums to one.

    :param ~torch.Tensor cost: shape ``[S, *batch]``.
    :param ~torch.Tensor sampled: which slots are draws; two or more, or none, of each batch
        element.
    :returns: the baselines, of the same shape; zero where there are no draws.

    Example::

        >>> sampled = torch.tensor([False, True, True])
        >>> leave_one_out_baseline(torch.tensor([5.0, 1.0, 2.0]), sampled)
        tensor([1.5000, 2.0000, 1.0000])
    """
    count = sampled.sum(0, keepdim=True)
    total = torch.where(sampled, cost, 0.0).sum(0, keepdim=True)
    others = (total - cost) / (count - 1).clamp_min(1)
    return torch.where(sampled, others, total / count.clamp_min(1))
