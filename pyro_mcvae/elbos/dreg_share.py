"""Which mixture of the plain and the doubly reparameterized gradient has the least noise."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_mcvae.ops.importance import normalized_weights

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
    log_weight, log_q = (t.reshape(shape[0], -1) for t in (log_weight, log_q))
    count = log_weight.shape[1]
    index = torch.arange(count, device=log_q.device)
    if count == 1:
        index = torch.arange(shape[0], device=log_q.device).unsqueeze(-1)
    odd = index % 2
    # For the even ones, what the odd ones know, and the other way around: [2, K, data].
    used = torch.stack([odd, 1 - odd]).reshape(2, *((1, -1) if count > 1 else (-1, 1)))
    used = (used * log_weight.isfinite()).to(log_q)
    points = used.sum(1, keepdim=True)
    log_q = _centered(log_q, used, points)
    log_p = _centered(log_weight, used, points) + log_q
    qq, pq, pp = ((a * b).sum((1, 2)) for a, b in ((log_q, log_q), (log_p, log_q), (log_p, log_p)))
    # The slope's squared relative error; of the points, a mean of each datum and a slope are spent.
    freedom = (points - 1).clamp(min=0).sum((1, 2)) - 1
    noise = (pp * qq - pq.square()) / (freedom * pq.square())
    slope = (pq / qq * (1 - _STANDARD_ERRORS**2 * noise).clamp(min=0)).clamp(0, 1)
    factor = 1 - (1 - alpha) * (1 - _concentration((1 - alpha) * log_weight, used, points))
    share = slope / (slope + (1 - slope) * factor)
    share = torch.where((freedom > 0) & share.isfinite(), share, 0.0)
    return torch.where(odd == 0, share[0], share[1]).expand(shape[0], count).reshape(shape)


def _centered(value: Tensor, used: Tensor, points: Tensor) -> Tensor:
    value = torch.where(used > 0, value, 0.0)
    return used * (value - value.sum(1, keepdim=True) / points.clamp(min=1))


def _concentration(log_weight: Tensor, used: Tensor, points: Tensor) -> Tensor:
    """The sum of the squared weights of all K particles, from those used: ``[2]``."""
    weight = normalized_weights(torch.where(used > 0, log_weight, -torch.inf), 1)
    each = weight.square().sum(1) * points[:, 0] / log_weight.shape[0]
    return each.sum(1) / (points[:, 0] > 0).sum(1)
