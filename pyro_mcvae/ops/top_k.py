"""Slots of a sum over categories: the most probable ones summed, the rest sampled."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Slots", "budget_slots", "top_k_slots"]


class Slots(NamedTuple):
    """
    Categories at which a summand is evaluated, for each batch element; slots come first.

    :ivar index: the category of each slot, shape ``[S, *batch]``.
    :ivar weight: the slot's weight in the sum, of the same shape; sums to one over the slots.
    :ivar sampled: where the slot is a draw from the complement, of the same shape.
    """

    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nothing calls
    weight: Tensor
    sampled: Tensor


def top_k_slots(log_q: Tensor, num_categories: int, num_samples: int) -> Slots:
    r"""
    The estimator of Liu et al. [1], as weights: with C the k most probable categories,

    .. math::
        E_q[g(z)] \approx \sum_{z \in C} q(z) g(z)
            + q(\bar C) \frac{1}{n} \sum_{j=1}^n g(v_j), \qquad
        v_j \sim q(\cdot \mid \bar C).

    Slots that would carry no weight (probability zero, or no mass left over) repeat the most
    probable category, so that nothing is ever evaluated where q is zero.

    :param ~torch.Tensor log_q: log probabilities, shape ``[*batch, K]``; may hold minus infinity.
    :param int num_categories: k; K or more sums over all categories, without draws.
    :param int num_samples: n, draws from the complement.
    :raises ValueError: if mass is left over and nothing is drawn from it.

    [1] Liu et al. (2019), *Rao-Blackwellized Stochastic Gradients for Discrete Distributions*.

    Example::

        >>> slots = top_k_slots(torch.tensor([0.7, 0.2, 0.1]).log(), 1, 2)
        >>> slots.weight
        tensor([0.7000, 0.1500, 0.1500])
        >>> slots.sampled
        tensor([False,  True,  True])
    """
    size = log_q.shape[-1]
    if num_categories >= size:
        num_categories, num_samples = size, 0
    elif num_samples < 1:
        raise ValueError(
            f"num_samples={num_samples} leaves out the probability of "
            f"{size - num_categories} of {size} categories: pass num_samples >= 1, or "
            f"num_categories >= {size}"
        )
    log_q = log_q.detach()
    top = log_q.topk(num_categories, dim=-1)
    chosen = torch.zeros_like(log_q, dtype=torch.bool).scatter(-1, top.indices, True)
    draws, mass = _complement(log_q, chosen, num_samples)
    index = torch.cat([top.indices, draws], -1)
    sampled = _ranks(index) >= num_categories
    share = (mass / max(num_samples, 1)).unsqueeze(-1).expand(draws.shape)
    weight = torch.cat([top.values.exp(), share], -1)
    return _slots(log_q, index, weight, sampled)


def budget_slots(log_q: Tensor, budget: int, min_samples: int = 1) -> Slots:
    r"""
    As :func:`top_k_slots` with N slots, where each batch element has a k of its own [1, Prop. 2]:

    .. math:: \hat k = \operatorname{argmin}_{0 \le k < N} \frac{q(\bar C_k)}{N - k} .

    The variance is then never more than that of N draws from q. (k = N - 1 with one category left
    over is the exact sum.)

    :param ~torch.Tensor log_q: log probabilities, shape ``[*batch, K]``.
    :param int budget: N; K or more sums over all categories.
    :param int min_samples: how many draws from the complement to keep, for leave-one-out.
    :raises ValueError: if ``budget`` is smaller than ``min_samples``.

    Example::

        >>> budget_slots(torch.tensor([[0.9, 0.06, 0.04], [0.4, 0.3, 0.3]]).log(), 2).sampled.T
        tensor([[False,  True],
                [ True,  True]])
    """
    size = log_q.shape[-1]
    if budget >= size:
        return top_k_slots(log_q, size, 0)
    if budget < min_samples:
        raise ValueError(f"budget must be at least {min_samples}, got {budget}")
    log_q = log_q.detach()
    top = log_q.topk(budget, dim=-1)
    every = torch.zeros_like(log_q, dtype=torch.bool).scatter(-1, top.indices, True)
    tail = log_q.masked_fill(every, -math.inf).logsumexp(-1, keepdim=True).exp()
    # From the small end: one minus the sum of the top would lose its digits.
    rest = tail + top.values.exp().flip(-1).cumsum(-1).flip(-1)
    left = budget - torch.arange(budget, device=log_q.device)
    count = (rest / left)[..., : budget - min_samples + 1].argmin(-1, keepdim=True)
    summed = _ranks(top.indices) < count
    chosen = torch.zeros_like(every).scatter(-1, top.indices, summed)
    draws, mass = _complement(log_q, chosen, budget)
    weight = torch.where(summed, top.values.exp(), mass.unsqueeze(-1) / (budget - count))
    return _slots(log_q, torch.where(summed, top.indices, draws), weight, ~summed)


def _ranks(index: Tensor) -> Tensor:
    return torch.arange(index.shape[-1], device=index.device).expand(index.shape)


def _complement(log_q: Tensor, chosen: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """Draws from q restricted to what is not chosen, ``[*batch, n]``, and its mass."""
    rest = log_q.masked_fill(chosen, -math.inf)
    log_mass = rest.logsumexp(-1)
    if num_samples == 0:
        return log_q.new_empty((*log_q.shape[:-1], 0), dtype=torch.long), log_mass.exp()
    empty = log_mass.isneginf().unsqueeze(-1)
    # Relative to the complement's mass, which may be smaller than the smallest float's root.
    relative = torch.where(empty, log_q, rest - log_mass.unsqueeze(-1).clamp_min(-1e30)).exp()
    draws = relative.reshape(-1, log_q.shape[-1]).multinomial(num_samples, replacement=True)
    return draws.reshape(*log_q.shape[:-1], num_samples), log_mass.exp()


def _slots(log_q: Tensor, index: Tensor, weight: Tensor, sampled: Tensor) -> Slots:
    index = torch.where(weight > 0, index, log_q.argmax(-1, keepdim=True))
    return Slots(*(t.movedim(-1, 0) for t in (index, weight, sampled)))
