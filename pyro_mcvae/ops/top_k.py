"""Slots of a sum over categories: the most probable ones summed, the rest sampled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


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
    return _slots(log_q.detach(), num_categories, num_samples, None, 1)


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
    return _slots(log_q.detach(), budget, budget, budget, min_samples)


def _slots(
    log_q: Tensor, top: int, num_samples: int, budget: int | None, min_samples: int
) -> Slots:
    best = log_q.topk(top, dim=-1)
    none = torch.zeros_like(log_q, dtype=torch.bool)

    def draw(summed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return _complement(log_q, none.scatter(-1, best.indices, summed), count)

    def outside() -> Tensor:
        every = none.scatter(-1, best.indices, True)
        return log_q.masked_fill(every, -math.inf).logsumexp(-1).exp()

    prob, mode = best.values.exp(), log_q.argmax(-1, keepdim=True)
    return fill_slots(best.indices, prob, mode, outside, draw, num_samples, budget, min_samples)


def fill_slots(
    best: Tensor,
    prob: Tensor,
    mode: Tensor,
    outside: Callable[[], Tensor],
    draw: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    num_samples: int,
    budget: int | None,
    min_samples: int,
) -> Slots:
    """
    Sum the most probable values of a distribution, and draw from all others.

    :param best: the most probable values, most probable first, shape ``[*batch, k, *event]``.
    :param prob: their probabilities, shape ``[*batch, k]``.
    :param mode: what slots without weight repeat, shape ``[*batch, 1, *event]``.
    :param outside: returns the probability of all other values, shape ``[*batch]``.
    :param draw: maps which of the best are summed, shape ``[*batch, k]``, and a count to draws from
        the rest, shape ``[*batch, count, *event]``, and the rest's probability, shape ``[*batch]``.
    :param budget: the number of slots, of which each batch element sums as many as is best; None
        sums all k, and draws ``num_samples``.
    """
    events = (1,) * (best.dim() - prob.dim())
    rank = torch.arange(prob.shape[-1], device=prob.device)
    if budget is None:
        value, mass = draw(torch.ones_like(prob, dtype=torch.bool), num_samples)
        value = torch.cat([best, value], len(prob.shape) - 1)
        each = (mass / max(num_samples, 1)).unsqueeze(-1)
        weight = torch.cat([prob, each.expand(*mass.shape, num_samples)], -1)
        sampled = torch.arange(weight.shape[-1], device=prob.device).expand(weight.shape) >= len(
            rank
        )
    else:
        # From the small end: one minus the sum of the best would lose its digits.
        rest = outside().unsqueeze(-1) + prob.flip(-1).cumsum(-1).flip(-1)
        criterion = (rest / (budget - rank))[..., : budget - min_samples + 1]
        summed = rank < criterion.argmin(-1, keepdim=True)
        value, mass = draw(summed, budget)
        value = torch.where(summed.reshape(*summed.shape, *events), best, value)
        left = (budget - summed.sum(-1, keepdim=True)).clamp_min(1)
        weight, sampled = torch.where(summed, prob, mass.unsqueeze(-1) / left), ~summed
    value = torch.where((weight > 0).reshape(*weight.shape, *events), value, mode)
    batch = prob.dim() - 1
    return Slots(value.movedim(batch, 0), weight.movedim(-1, 0), sampled.movedim(-1, 0))


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
