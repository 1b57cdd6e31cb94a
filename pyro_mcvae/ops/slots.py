"""Sum over the most probable categories, and draw from the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Gumbel noise of categorical variables, given its argmax.

# Replaces minus infinity: its exp is zero, and gradients are finite.
FLOOR = -1e4


def one_hot(category: Tensor, size: int) -> Tensor:
    """Return booleans ``[..., size]``; unlike PyTorch's function, without synchronization."""
    return category.unsqueeze(-1) == torch.arange(size, device=category.device)


def conditional_gumbel(logits: Tensor, category: Tensor) -> Tensor:
    r"""
    Draw :math:`g = l + \epsilon` with standard Gumbel :math:`\epsilon`, given its argmax z [1]:

    .. math::
        g_z = \log \textstyle\sum_i e^{l_i} - \log E_z, \qquad
        g_i = -\log \big( e^{-g_z} + E_i e^{-l_i} \big), \qquad E \sim \text{Exp}(1) .

    :param ~torch.Tensor logits: shape ``[*batch, K]``; the gradient passes through.
    :param ~torch.Tensor category: the category z, a shape that broadcasts with the batch.
    :returns: shape ``[*batch, K]``, broadcast.

    [1] Tucker et al. (2017), *REBAR: Low-variance, unbiased gradient estimates for discrete latent
    variable models*, appendix C.

    Example::

        >>> category = torch.tensor([0, 2])
        >>> conditional_gumbel(torch.zeros(2, 3), category).argmax(-1)
        tensor([0, 2])
    """
    logits = logits.clamp_min(FLOOR)
    hit = one_hot(category, logits.shape[-1])
    log_noise = _exponential(logits, torch.broadcast_shapes(hit.shape, logits.shape)).log()
    top = logits.logsumexp(-1, keepdim=True) - log_noise
    top = torch.where(hit, top, 0.0).sum(-1, keepdim=True)
    return torch.where(hit, top, -torch.logaddexp(-top, log_noise - logits))


def _exponential(like: Tensor, shape: torch.Size) -> Tensor:
    # In single precision a draw may be zero, with an infinite logarithm.
    noise = torch.empty(shape, dtype=like.dtype, device=like.device).exponential_()
    return noise.clamp_min(torch.finfo(like.dtype).tiny)


# Slots of a sum over categories: the most probable ones summed, the others sampled.


class Slots(NamedTuple):
    """
    Categories at which a summand is evaluated, for each batch element; the first dim has slots.

    :ivar index: the category of each slot, shape ``[S, *batch]``.
    :ivar weight: the slot's weight in the sum, of the same shape; sums to one over the slots.
    :ivar sampled: whether the slot is a draw from the complement, of the same shape.
    """

    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which is not used
    weight: Tensor
    sampled: Tensor


class SlotCount(NamedTuple):
    """
    How many values of a distribution are summed, and how many others are drawn.

    Without ``least``, the ``top`` most probable values are summed and ``draws`` others are drawn,
    so there are ``top + draws`` slots. With ``least``, each batch element divides a budget of
    ``top == draws`` slots: it sums the number of values that minimizes the variance, and draws the
    rest, at least ``least``.
    """

    top: int
    draws: int
    least: int | None = None


def top_k_slots(log_q: Tensor, num_categories: int, num_samples: int) -> Slots:
    r"""
    Return the slots and weights of the estimator of Liu et al. [1].

    With C the k most probable categories,

    .. math::
        E_q[g(z)] \approx \sum_{z \in C} q(z) g(z)
            + q(\bar C) \frac{1}{n} \sum_{j=1}^n g(v_j), \qquad
        v_j \sim q(\cdot \mid \bar C).

    Slots with weight zero (probability zero, or no remaining mass) repeat the most probable
    category, so that nothing is evaluated where q is zero.

    :param ~torch.Tensor log_q: log probabilities, shape ``[*batch, K]``; may be minus infinity.
    :param int num_categories: k; K or more sums over all categories, without draws.
    :param int num_samples: n, draws from the complement.
    :raises ValueError: if mass remains and nothing is drawn from it.

    [1] Liu et al. (2019), *Rao-Blackwellized Stochastic Gradients for Discrete Distributions*.

    Example::

        >>> import torch
        >>> from pyro_mcvae.ops.slots import top_k_slots
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
    return categorical_slots(log_q, SlotCount(num_categories, num_samples))


def budget_slots(log_q: Tensor, budget: int, min_samples: int = 1) -> Slots:
    r"""
    Return the slots of :func:`top_k_slots` with a separate k per batch element [1, Prop. 2]:

    .. math:: \hat k = \operatorname{argmin}_{0 \le k < N} \frac{q(\bar C_k)}{N - k} .

    With N slots the variance is never larger than that of N draws from q. (k = N - 1 with one
    remaining category is the exact sum.)

    :param ~torch.Tensor log_q: log probabilities, shape ``[*batch, K]``.
    :param int budget: N; K or more sums over all categories.
    :param int min_samples: the least number of draws from the complement, for leave-one-out.
    :raises ValueError: if ``budget`` is smaller than ``min_samples``.

    Example::

        >>> import torch
        >>> from pyro_mcvae.ops.slots import budget_slots
        >>> budget_slots(torch.tensor([[0.9, 0.06, 0.04], [0.4, 0.3, 0.3]]).log(), 2).sampled.T
        tensor([[False,  True],
                [ True,  True]])
    """
    size = log_q.shape[-1]
    if budget >= size:
        return top_k_slots(log_q, size, 0)
    if budget < min_samples:
        raise ValueError(f"budget must be at least {min_samples}, got {budget}")
    return categorical_slots(log_q, SlotCount(budget, budget, min_samples))


def categorical_slots(log_q: Tensor, count: SlotCount) -> Slots:
    """Return slots of numbered categories, fewer than there are: :func:`top_k_slots`."""
    log_q = log_q.detach()
    best = log_q.topk(count.top, dim=-1)
    none = torch.zeros_like(log_q, dtype=torch.bool)

    def draw(summed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return _complement(log_q, none.scatter(-1, best.indices, summed), count)

    def outside() -> Tensor:
        every = none.scatter(-1, best.indices, True)
        return log_q.masked_fill(every, -math.inf).logsumexp(-1).exp()

    prob = best.values.exp()
    mode = best.indices[..., :1] if count.top else log_q.argmax(-1, keepdim=True)
    return fill_slots(best.indices, prob, mode, outside, draw, count)


def fill_slots(
    best: Tensor,
    prob: Tensor,
    mode: Tensor,
    outside: Callable[[], Tensor],
    draw: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    count: SlotCount,
) -> Slots:
    """
    Sum the most probable values of a distribution, and draw from all others.

    :param best: the most probable values, most probable first, shape ``[*batch, k, *event]``.
    :param prob: their probabilities, shape ``[*batch, k]``.
    :param mode: the value of slots with weight zero, shape ``[*batch, 1, *event]``.
    :param outside: returns the probability of all other values, shape ``[*batch]``.
    :param draw: maps the mask of summed values, shape ``[*batch, k]``, and a count to draws from
        the other values, shape ``[*batch, count, *event]``. Also returns the probability of these
        values, shape ``[*batch]``.
    """
    events = (1,) * (best.dim() - prob.dim())
    size, draws = prob.shape[-1], count.draws
    if count.least is None:
        value, mass = draw(torch.ones_like(prob, dtype=torch.bool), draws)
        value = torch.cat([best, value], len(prob.shape) - 1)
        each = (mass / draws if draws > 1 else mass).unsqueeze(-1)
        weight = torch.cat([prob, each.expand(*mass.shape, draws)], -1)
        slot = torch.arange(weight.shape[-1], device=prob.device)
        sampled = (slot >= size).expand(weight.shape)
    else:
        # Sum from the small end, because one minus the sum of the best would lose precision.
        rank = torch.arange(size, device=prob.device)
        remaining = outside().unsqueeze(-1) + prob.flip(-1).cumsum(-1).flip(-1)
        criterion = (remaining / (draws - rank))[..., : draws - count.least + 1]
        summed = rank < criterion.argmin(-1, keepdim=True)
        value, mass = draw(summed, draws)
        value = torch.where(summed.reshape(*summed.shape, *events), best, value)
        num_draws = (draws - summed.sum(-1, keepdim=True)).clamp_min(1)
        weight, sampled = torch.where(summed, prob, mass.unsqueeze(-1) / num_draws), ~summed
    value = torch.where((weight > 0).reshape(*weight.shape, *events), value, mode)
    batch = prob.dim() - 1
    return Slots(value.movedim(batch, 0), weight.movedim(-1, 0), sampled.movedim(-1, 0))


def _complement(log_q: Tensor, chosen: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return draws from q outside the chosen categories, ``[*batch, n]``, and their mass."""
    complement = log_q.masked_fill(chosen, -math.inf)
    log_mass = complement.logsumexp(-1)
    if num_samples == 0:
        return log_q.new_empty((*log_q.shape[:-1], 0), dtype=torch.long), log_mass.exp()
    empty = log_mass.isneginf().unsqueeze(-1)
    # Relative to the complement's mass, which may be extremely small.
    relative = torch.where(empty, log_q, complement - log_mass.unsqueeze(-1).clamp_min(-1e30)).exp()
    draws = relative.reshape(-1, log_q.shape[-1]).multinomial(num_samples, replacement=True)
    return draws.reshape(*log_q.shape[:-1], num_samples), log_mass.exp()


# Slots of a vector of independent categorical variables, without listing their product.


def product_top_k(log_p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """
    Return the most probable configurations of independent variables, exactly.

    It is a beam search: the best configurations of the first d + 1 variables extend the best of the
    first d.

    :param ~torch.Tensor log_p: log probabilities, shape ``[*batch, D, K]``.
    :param int count: their number, at most K ** D.
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


def product_slots(log_p: Tensor, count: SlotCount) -> Slots:
    """
    Return slots of the product, as :func:`~pyro_mcvae.ops.slots.top_k_slots` or ``budget_slots``.

    :param ~torch.Tensor log_p: log probabilities, shape ``[*batch, D, K]``.
    :returns: slots whose ``index`` has digits, shape ``[S, *batch, D]``.
    """
    # One minus the mass of the most probable configurations needs double precision.
    log_p = log_p.detach()
    exact = log_p.double()
    top = min(count.top, log_p.shape[-1] ** log_p.shape[-2])
    draws = count.draws if count.least is None else top
    digits, log_q = product_top_k(exact, max(top, 1))
    best, prob = digits[..., :top, :], log_q[..., :top].exp()

    def draw(summed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        mass = (1 - torch.where(summed, prob, 0.0).sum(-1)).clamp_min(0)
        return _distinct_digits(exact, best, summed, count), mass

    def outside() -> Tensor:
        return (1 - prob.sum(-1)).clamp_min(0)

    mode = digits[..., :1, :]
    slots = fill_slots(best, prob, mode, outside, draw, SlotCount(top, draws, count.least))
    return slots._replace(weight=slots.weight.to(log_p.dtype))


def _distinct_digits(log_p: Tensor, digits: Tensor, summed: Tensor, count: int) -> Tensor:
    r"""
    Draw from the product, excluding the summed configurations.

    Variables are drawn one after the other. A value's probability is reduced by the summed
    configurations with the same first digits as the draw. It is
    :math:`q_d(a) (1 - \sum_c \prod_{d' > d} q_{d'}(c_{d'}))`.

    :returns: digits ``[*batch, count, D]``.
    """
    batch, size = log_p.shape[:-2], log_p.shape[-1]
    each = log_p.unsqueeze(-3).expand(*digits.shape, size)
    each = each.gather(-1, digits.unsqueeze(-1)).squeeze(-1)
    # The probability of each configuration's digits after variable d.
    tail_prob = (each.flip(-1).cumsum(-1).flip(-1) - each).exp()
    tail_prob = torch.where(each.isneginf().any(-1, keepdim=True), 0.0, tail_prob)
    candidates = summed.unsqueeze(-2).expand(*batch, count, summed.shape[-1])
    values = []
    for d in range(log_p.shape[-2]):
        column = digits[..., d].unsqueeze(-2).expand(candidates.shape)
        removed_prob = torch.where(candidates, tail_prob[..., d].unsqueeze(-2), 0.0)
        removed = removed_prob.new_zeros((*batch, count, size)).scatter_add(
            -1, column, removed_prob
        )
        prob = log_p[..., d, :].exp().unsqueeze(-2)
        remaining = prob * (1 - removed).clamp_min(0)
        remaining = torch.where(remaining.sum(-1, keepdim=True) > 0, remaining, prob)
        value = remaining.reshape(-1, size).multinomial(1).reshape(*batch, count)
        candidates = candidates & (column == value.unsqueeze(-1))
        values.append(value)
    return torch.stack(values, -1)


# The most probable counts of unimodal distributions, and draws from all others.

# Counts up to 2^24, which are exact in single precision.
_BISECTIONS = 24


class CountLaw(NamedTuple):
    """
    A unimodal distribution over 0, 1, 2, ...

    :ivar log_prob: log probabilities of counts, broadcast with the batch.
    :ivar cdf: :math:`P(X \\le x)`; counts may be -1.
    :ivar tail: :math:`P(X > x)`, without cancellation.
    :ivar mode: a most probable count, batch-shaped.
    """

    log_prob: Callable[[Tensor], Tensor]
    cdf: Callable[[Tensor], Tensor]
    tail: Callable[[Tensor], Tensor]
    mode: Tensor


def count_window(law: CountLaw, size: int) -> tuple[Tensor, Tensor]:
    """
    Return the most probable counts and their probabilities, in this order: ``[*batch, size]``.

    They are contiguous, so their distance from the mode is at most ``size - 1``.
    """
    reach = torch.arange(1 - size, size, device=law.mode.device)
    counts = law.mode.unsqueeze(-1) + reach
    log_prob = law.log_prob(counts.clamp_min(0).movedim(-1, 0)).movedim(0, -1)
    log_prob = log_prob.masked_fill(counts < 0, -torch.inf)
    top = log_prob.topk(size, dim=-1)
    return counts.gather(-1, top.indices), top.values.exp()


def count_slots(law: CountLaw, count: SlotCount) -> Slots:
    r"""
    Return slots for infinitely many categories, as :func:`~pyro_mcvae.ops.slots.top_k_slots`.

    Draws from the complement of the window use the inverse distribution function on either side.

    :returns: counts, weights, and the mask of draws; the first dim has slots.
    """
    window, prob = (t[..., : count.top] for t in count_window(law, max(count.top, 1)))

    def draw(summed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return _draw_outside(law, *_ends(law, window, summed), count)

    def outside() -> Tensor:
        low, high = _ends(law, window, torch.ones_like(window, dtype=torch.bool))
        return law.cdf(low - 1) + law.tail(high)

    return fill_slots(window, prob, law.mode.unsqueeze(-1), outside, draw, count)


def _ends(law: CountLaw, window: Tensor, summed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest summed count; mode and mode - 1 if there is none."""
    low, high = law.mode, law.mode - 1
    if window.shape[-1] == 0:
        return low, high
    some = summed.any(-1)
    least = torch.where(summed, window, torch.inf).amin(-1)
    most = torch.where(summed, window, -torch.inf).amax(-1)
    return torch.where(some, least, low), torch.where(some, most, high)


def _draw_outside(law: CountLaw, low: Tensor, high: Tensor, count: int) -> tuple[Tensor, Tensor]:
    below, above = law.cdf(low - 1), law.tail(high)
    uniform = torch.rand((count, *low.shape), dtype=below.dtype, device=low.device)
    below_window = uniform * (below + above) < below
    # Draw again for the chosen side: the remainder of the first draw would lack precision.
    uniform = torch.rand_like(uniform).clamp_min(torch.finfo(uniform.dtype).tiny)
    target = uniform * torch.where(below_window, below, above)
    # The smallest x with cdf(x) >= target; on the right, with tail(x) <= target.
    start = torch.where(below_window, -torch.ones_like(low), high)
    end = torch.where(below_window, low - 1, high + 2.0**_BISECTIONS)
    for _ in range(_BISECTIONS + 1):
        middle = ((start + end) / 2).floor()
        side = torch.where(below_window, law.cdf(middle), law.tail(middle))
        reached = torch.where(below_window, side >= target, side < target)
        reached = reached & (middle > start)
        end = torch.where(reached, middle, end)
        start = torch.where(reached, start, torch.maximum(start, middle))
    return end.movedim(0, -1), below + above
