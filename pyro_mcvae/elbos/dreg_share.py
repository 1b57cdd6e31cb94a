"""Which mixture of the plain and the doubly reparameterized gradient has the least noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_mcvae.ops.shapes import as_shape

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
    :returns: :math:`\lambda` between 0 and 1, shape ``[*plates]``; ``[K, *plates]`` for one datum.
    """
    shape, num_particles = log_weight.shape, log_weight.shape[0]
    count = math.prod(shape[1:])
    q, w = _in_columns(log_q, count), _in_columns(log_weight, count)
    rows, columns = w.shape
    # Of the points of every second column, a mean of each and one slope are spent.
    freedom = columns // 2 * (rows - 1) - 1
    if freedom < 1:
        return torch.zeros(shape[1:], dtype=log_q.dtype, device=log_q.device)
    # Exactly 0 where the density is constant, and NaN where a weight is zero: such a datum has no
    # slope, and is left out of the sums.
    q = torch.add(q - q[0], w, alpha=0)
    weight = (w if alpha == 0 else (1 - alpha) * w).softmax(0)
    variances = torch.stack([q, w, q + w, weight]).var(1).nan_to_num(0.0)
    # Over the odd columns, for the even ones, and the other way around.
    qq, ww, pp, spread = variances.reshape(4, -1, 2).sum(1).flip(1).unbind()
    # Twice the covariance of log q and log p. A slope b = pq / 2 qq has the squared relative error
    # (4 pp qq / pq^2 - 1) / freedom, of which it loses four times as much; all in units of b.
    pq, noise = (qq + pp - ww).clamp(min=0), _STANDARD_ERRORS**2 / freedom
    one = 2 / (1 + noise)
    slope = torch.addcdiv(pq / qq, pp, pq, value=-2 * noise * one).clamp(0, one)
    # The mean factor is alpha + (1 - alpha) sum_k w_k^2 over all K, and the sum over the weights of
    # a column is (rows - 1) of their variances and 1 / rows.
    unit = (1 - alpha) * rows * (rows - 1) / (num_particles * (columns // 2))
    factor = spread + (alpha + (1 - alpha) / num_particles) / unit
    share = (slope / torch.addcmul(slope, one - slope, factor, value=unit)).nan_to_num(0.0)
    if alpha < 0:  # f may be negative, and the mixture of least noise far from both
        share = share.clamp(0, 1)
    length = num_particles if count == 1 else count
    share = share.repeat((length + 1) // 2)
    return as_shape(share[:length] if length % 2 else share, shape if count == 1 else shape[1:])


def _in_columns(value: Tensor, count: int) -> Tensor:
    """An even number of columns: the data, or the even particles and the odd ones of one datum."""
    if count == 1:
        return value.flatten()[: len(value) // 2 * 2].reshape(-1, 2)
    return value.flatten(1)[:, :-1] if count % 2 else value.flatten(1)
