"""Slots of a vector of independent categorical variables, without listing their product."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_mcvae.ops.top_k import Slots, fill_slots


def product_top_k(log_p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """
    The most probable configurations of independent variables, exactly.

    A beam: the best configurations of the first d + 1 variables extend the best of the first d.

    :param ~torch.Tensor log_p: log probabilities, shape ``[*batch, D, K]``.
    :param int count: how many, at most K ** D.
    :returns: their digits ``[*batch, count, D]`` and log probabilities ``[*batch, count]``, most
        probable first.

    Example::

        >>> log_p = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log()
        >>> digits, log_q = product_top_k(log_p, 2)
        >>> digits, log_q.exp()
        (tensor([[0, 1], [0, 0]]), tensor([0.5400, 0.3600]))
    """
    size = log_p.shape[-1]
    scores = log_p.new_zeros((*log_p.shape[:-2], 1))
    digits = scores.new_empty((*scores.shape, 0), dtype=torch.long)
    for d in range(log_p.shape[-2]):
        wider = (scores.unsqueeze(-1) + log_p[..., d, :].unsqueeze(-2)).flatten(-2)
        scores, index = wider.topk(min(count, wider.shape[-1]), dim=-1)
        before = (index // size).unsqueeze(-1).expand(*index.shape, d)
        digits = torch.cat([digits.gather(-2, before), (index % size).unsqueeze(-1)], -1)
    return digits, scores


def product_slots(
    log_p: Tensor,
    num_categories: int,
    num_samples: int,
    budget: int | None = None,
    min_samples: int = 1,
) -> Slots:
    """
    As :func:`~pyro_mcvae.ops.top_k.top_k_slots` and ``budget_slots`` of the product.

    :param ~torch.Tensor log_p: log probabilities, shape ``[*batch, D, K]``.
    :returns: slots whose ``index`` holds digits, shape ``[S, *batch, D]``.
    """
    # One minus the mass of the most probable configurations takes all digits that there are.
    log_p = log_p.detach()
    exact = log_p.double()
    every = log_p.shape[-1] ** log_p.shape[-2]
    budget = None if budget is None else min(budget, every)
    top = min(num_categories, every) if budget is None else budget
    draws = num_samples if budget is None else budget
    digits, log_q = product_top_k(exact, max(top, 1))
    best, prob = digits[..., :top, :], log_q[..., :top].exp()

    def draw(summed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        mass = (1 - torch.where(summed, prob, 0.0).sum(-1)).clamp_min(0)
        return _other_digits(exact, best, summed, count), mass

    def outside() -> Tensor:
        return (1 - prob.sum(-1)).clamp_min(0)

    mode = digits[..., :1, :]
    slots = fill_slots(best, prob, mode, outside, draw, draws, budget, min_samples)
    return slots._replace(weight=slots.weight.to(log_p.dtype))


def _other_digits(log_p: Tensor, digits: Tensor, summed: Tensor, count: int) -> Tensor:
    r"""
    Draws from the product given that they are none of the summed configurations.

    One variable after the other: a value's probability is what is left of its own when those
    summed configurations that begin like the draw are taken out,
    :math:`q_d(a) (1 - \sum_c \prod_{d' > d} q_{d'}(c_{d'}))`.

    :returns: digits ``[*batch, count, D]``.
    """
    batch, size = log_p.shape[:-2], log_p.shape[-1]
    each = log_p.unsqueeze(-3).expand(*digits.shape, size)
    each = each.gather(-1, digits.unsqueeze(-1)).squeeze(-1)
    # The probability of the rest of each configuration, behind variable d.
    behind = (each.flip(-1).cumsum(-1).flip(-1) - each).exp()
    behind = torch.where(each.isneginf().any(-1, keepdim=True), 0.0, behind)
    alive = summed.unsqueeze(-2).expand(*batch, count, summed.shape[-1])
    found = []
    for d in range(log_p.shape[-2]):
        column = digits[..., d].unsqueeze(-2).expand(alive.shape)
        taken = torch.where(alive, behind[..., d].unsqueeze(-2), 0.0)
        removed = taken.new_zeros((*batch, count, size)).scatter_add(-1, column, taken)
        prob = log_p[..., d, :].exp().unsqueeze(-2)
        left = prob * (1 - removed).clamp_min(0)
        left = torch.where(left.sum(-1, keepdim=True) > 0, left, prob)
        value = left.reshape(-1, size).multinomial(1).reshape(*batch, count)
        alive = alive & (column == value.unsqueeze(-1))
        found.append(value)
    return torch.stack(found, -1)
