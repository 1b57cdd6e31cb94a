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
    pair = torch.stack([log_q, log_weight]).reshape(2, shape[0], -1)
    count = pair.shape[2]
    if count == 1:  # the even particles, and the odd ones
        pair = pair[:, : shape[0] // 2 * 2].reshape(2, -1, 2)
    rows, columns = pair.shape[1:]
    # Of the points of every second column, a mean of each and one slope are spent.
    freedom = columns // 2 * (rows - 1) - 1
    if freedom < 1:
        return torch.zeros(shape, dtype=log_q.dtype, device=log_q.device)
    # The sum of the squared weights of all K particles, but for a factor, from those of a column.
    squares = ((1 - alpha) * pair[1]).softmax(0).square().sum(0)
    pair = pair - pair.mean(1, keepdim=True)
    moments = (pair.unsqueeze(0) * pair.unsqueeze(1)).sum(2).flatten(0, 1)
    # A datum some of whose weights are zero has no slope: NaN, which is left out of the sums.
    sums = torch.cat([moments + 0 * moments[3], squares.unsqueeze(0)]).nan_to_num(0.0)
    # Over the odd columns, for the even ones, and the other way around.
    others = torch.stack([sums[:, 1::2].sum(1), sums[:, ::2].sum(1)], 1)
    qq, qw, _, ww, squares = others.unbind()
    pq = qq + qw
    plain = pq / qq
    # One, and four times the slope's squared relative error (pp qq / pq^2 - 1) / freedom, apart.
    noise = _STANDARD_ERRORS**2 / freedom
    kept = torch.rsub((pq + qw + ww) / (pq * plain), 1 + noise, alpha=noise).clamp(min=0)
    slope = (plain * kept).clamp(0, 1)
    factor = alpha + (1 - alpha) * rows / shape[0] / (columns // 2) * squares
    share = (slope / torch.addcmul(slope, 1 - slope, factor)).nan_to_num(0.0)
    if count == 1:
        return share.repeat((shape[0] + 1) // 2)[: shape[0]].reshape(shape)
    return share.repeat((count + 1) // 2)[:count].reshape(shape[1:]).expand(shape)
