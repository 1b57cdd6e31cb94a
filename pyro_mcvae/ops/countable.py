"""The most probable counts of unimodal distributions, and draws from all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_mcvae.ops.top_k import Slots, fill_slots

# Counts up to 2^24, which single precision represents.
_BISECTIONS = 24


class CountLaw(NamedTuple):
    """
    A unimodal distribution over 0, 1, 2, ...

    :ivar log_prob: log probabilities of counts, broadcast with the batch.
    :ivar cdf: :math:`P(X \\le x)`; counts may be -1.
    :ivar tail: :math:`P(X > x)`, without cancellation.
    :ivar side: the first where a condition holds, the second elsewhere, at the price of one.
    :ivar mode: a most probable count, batch-shaped.
    """

    log_prob: Callable[[Tensor], Tensor]
    cdf: Callable[[Tensor], Tensor]
    tail: Callable[[Tensor], Tensor]
    side: Callable[[Tensor, Tensor], Tensor]
    mode: Tensor


def count_window(law: CountLaw, size: int) -> tuple[Tensor, Tensor]:
    """
    The most probable counts and their probabilities, most probable first: ``[*batch, size]``.

    They are contiguous, so none is further than ``size - 1`` from the mode.
    """
    reach = torch.arange(1 - size, size, device=law.mode.device)
    counts = law.mode.unsqueeze(-1) + reach
    log_prob = law.log_prob(counts.clamp_min(0).movedim(-1, 0)).movedim(0, -1)
    log_prob = log_prob.masked_fill(counts < 0, -torch.inf)
    top = log_prob.topk(size, dim=-1)
    return counts.gather(-1, top.indices), top.values.exp()


def count_slots(
    law: CountLaw, num_categories: int, num_samples: int, budget: int | None, min_samples: int
) -> Slots:
    r"""
    The slots of :func:`~pyro_mcvae.ops.top_k.top_k_slots` for infinitely many categories.

    The complement of the window is drawn from by the inverse of the distribution function on
    either side of it.

    :returns: counts, weights and which are draws, slots first.
    """
    size = num_categories if budget is None else budget
    window, prob = (
        count_window(law, size) if size else (law.mode.new_empty((*law.mode.shape, 0)),) * 2
    )

    def draw(summed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return _draw_outside(law, *_ends(law, window, summed), count)

    def outside() -> Tensor:
        low, high = _ends(law, window, torch.ones_like(window, dtype=torch.bool))
        return law.cdf(low - 1) + law.tail(high)

    mode = law.mode.unsqueeze(-1)
    draws = num_samples if budget is None else budget
    return fill_slots(window, prob, mode, outside, draw, draws, budget, min_samples)


def _ends(law: CountLaw, window: Tensor, summed: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest summed count; mode and mode - 1 where there is none."""
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
    left = uniform * (below + above) < below
    # Uniform on the chosen side, again: what is left of the first would be short of digits.
    uniform = torch.rand_like(uniform).clamp_min(torch.finfo(uniform.dtype).tiny)
    target = uniform * torch.where(left, below, above)
    # The smallest x with cdf(x) >= target; on the right, with tail(x) <= target.
    start = torch.where(left, -torch.ones_like(low), high)
    end = torch.where(left, low - 1, high + 2.0**_BISECTIONS)
    for _ in range(_BISECTIONS + 1):
        middle = ((start + end) / 2).floor()
        side = law.side(middle, left)
        found = torch.where(left, side >= target, side < target)
        found = found & (middle > start)
        end = torch.where(found, middle, end)
        start = torch.where(found, start, torch.maximum(start, middle))
    return end.movedim(0, -1), below + above


def betainc(a: Tensor, b: Tensor, x: Tensor, steps: int = 64) -> Tensor:
    r"""
    The regularised incomplete beta function :math:`I_x(a, b)`, by its continued fraction [1].

    :param int steps: the fraction converges in about the square root of the larger of a and b.

    [1] Press et al., *Numerical Recipes*, section 6.4.

    Example::

        >>> betainc(torch.tensor(2.0), torch.tensor(3.0), torch.tensor(0.4))
        tensor(0.5248)
    """
    a, b, x = torch.broadcast_tensors(a, b, x)
    swap = x > (a + 1) / (a + b + 2)
    a, b, x = torch.where(swap, b, a), torch.where(swap, a, b), torch.where(swap, 1 - x, x)
    front = torch.xlogy(a, x) + torch.xlogy(b, 1 - x)
    front = (front - a.lgamma() - b.lgamma() + (a + b).lgamma()).exp() / a
    tiny = torch.finfo(x.dtype).tiny
    c = torch.ones_like(x)
    d = _away(1 - (a + b) * x / (a + 1), tiny).reciprocal()
    total = d
    for m in range(1, steps):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for part in (even, odd):
            d = _away(1 + part * d, tiny).reciprocal()
            c = _away(1 + part / c, tiny)
            total = total * c * d
    found = (front * total).clamp(0, 1)
    return torch.where(swap, 1 - found, found)


def _away(value: Tensor, tiny: float) -> Tensor:
    return torch.where(value.abs() < tiny, tiny, value)
