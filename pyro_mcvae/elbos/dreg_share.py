"""Which mixture of the plain and the doubly reparameterized gradient has the least noise."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dreg_share"]

# A slope has to be so many of its standard errors away from 0 to count.
_STANDARD_ERRORS = 2


def dreg_share(log_weight: Tensor, log_q: Tensor, alpha: float = 0.0) -> Tensor:
    r"""
    The share of the doubly reparameterized gradient, for each draw.

    Where a guide is narrow, the plain gradient of a location is nearly without noise, and that of
    the doubly reparameterized one is large; where a guide is nearly exact, it is the other way
    around. Take a Gaussian guide with noise :math:`\epsilon`, and let b be the slope of
    :math:`\log p` on :math:`\log q` over its draws: 1 where it is exact, and 0 where it is
    narrow. To first order the noise of the two gradients is

    .. math::
        -\frac{b}{\sigma} \bar\epsilon \qquad \text{and} \qquad
        \frac{(1 - b) f}{\sigma} \bar\epsilon ,

    with f the mean factor that the doubly reparameterized one puts on a draw's gradient (one over
    the effective number of particles, for alpha = 0), so that the mixture with the share
    :math:`\lambda = b / (b + (1 - b) f)` has none of it.

    Every share that does not depend on the draw itself leaves the gradient unbiased. So that of
    the even data comes from the odd ones and vice versa; where there is one datum, that of the
    even particles from the odd ones. A slope that may be noise is shrunk towards 0, the plain
    gradient, as Stein's estimator does, and is 0 within two standard errors. Of several processes
    each takes its own data: another share than that of their union, and the same mean.

    :param ~torch.Tensor log_weight: log p - log q of all sites, shape ``[K, *plates]``, detached.
    :param ~torch.Tensor log_q: of the sites whose gradient is mixed, of that shape, detached.
    :param float alpha: the order of the Rényi bound whose gradient it is.
    :returns: :math:`\lambda` between 0 and 1, shape ``[K, *plates]``.
    """
    shape = log_weight.shape
    log_q, log_weight = (t.reshape(shape[0], -1) for t in (log_q, log_weight))
    count = log_weight.shape[1]
    if count == 1:  # the even particles, and the odd ones
        log_q, log_weight = (t[: shape[0] // 2 * 2].reshape(-1, 2) for t in (log_q, log_weight))
    rows, columns = log_weight.shape
    # Of the points of every second column, a mean of each and one slope are spent.
    freedom = columns // 2 * (rows - 1) - 1
    if freedom < 1:
        return torch.zeros(shape, dtype=log_q.dtype, device=log_q.device)
    pair = torch.stack([log_q, log_weight])
    pair = pair - pair.mean(1, keepdim=True)
    moments = (pair * pair.unsqueeze(1)).sum(2)
    # A datum some of whose weights are zero has no slope: NaN, which is left out of the sums.
    moments = _of_the_others(moments + 0 * moments[1, 1])
    qq, pq = moments[0, 0], moments[0, 0] + moments[0, 1]
    pp = pq + moments[0, 1] + moments[1, 1]
    noise = (pp * qq - pq.square()) / (freedom * pq.square())  # the slope's squared relative error
    slope = (pq / qq * (1 - _STANDARD_ERRORS**2 * noise).clamp(min=0)).clamp(0, 1)
    # The sum of the squared weights of all K particles, from those of a column.
    squares = ((1 - alpha) * log_weight).softmax(0).square().sum(0) * (rows / shape[0])
    factor = alpha + (1 - alpha) * _of_the_others(squares) / (columns // 2)
    share = (slope / (slope + (1 - slope) * factor)).nan_to_num(0.0)
    if count == 1:
        return share.repeat((shape[0] + 1) // 2)[: shape[0]].reshape(shape)
    return share.repeat((count + 1) // 2)[:count].reshape(shape[1:]).expand(shape)


def _of_the_others(value: Tensor) -> Tensor:
    """The sum over the odd columns, for the even ones, and the other way around: ``[..., 2]``."""
    value = value.nan_to_num(0.0)
    return torch.stack([value[..., 1::2].sum(-1), value[..., ::2].sum(-1)], -1)
