"""Kernel density estimates, one for each element of a batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# How many distances are computed at once.
_CHUNK = 1 << 23


class KernelDensity:
    r"""
    A Gaussian kernel density estimate with the mean and covariance of the draws it is made of.

    .. math::
        f(z) = \frac{1}{n} \sum_{i=1}^n
            N\big(z;\ \bar z + a (z_i - \bar z),\ h^2 S\big), \qquad a = \sqrt{1 - h^2},
        \qquad h = n^{-1 / (d + 4)}

    with the draws' mean :math:`\bar z` and covariance S, and Scott's bandwidth [1]. A plain kernel
    estimate is broader than its draws, by a factor of :math:`1 + h^2` in variance; drawing the
    kernels together by a [2] undoes this. It follows several modes and bent densities, as a
    fitted normal distribution does not, and is meant for few dimensions: beyond 4 or so its
    kernels are too broad to do so.

    :param ~torch.Tensor draws: shape ``[n, *batch, D]``, with n of at least 2.
    :param active: which coordinates count, shape ``[*batch, D]``; None if all do. Others may hold
        any finite value.
    :raises ValueError: for fewer than two draws.

    [1] Scott (1992), *Multivariate Density Estimation*.
    [2] West (1993), *Approximating Posterior Distributions by Mixtures*.

    Example::

        >>> density = KernelDensity(torch.randn(1000, 3, 1))
        >>> found = density.log_prob(torch.zeros(5, 3, 1))
        >>> found.shape
        torch.Size([5, 3])
        >>> bool(((found.exp() - 0.4).abs() < 0.1).all())
        True
    """

    def __init__(self, draws: Tensor, active: Tensor | None = None) -> None:
        count, self._batch, dims = len(draws), draws.shape[1:-1], draws.shape[-1]
        if count < 2:
            raise ValueError(f"a density is estimated from at least 2 draws, got {count}")
        ones = draws.new_ones((*self._batch, dims))
        self._active = (ones if active is None else ones * active).reshape(-1, dims)
        d = self._active.sum(-1)
        points = self._flat(draws)
        self._mean = points.mean(1, keepdim=True)
        self._scale_tril = self._cholesky(points - self._mean)
        width = count ** (-1 / (d + 4))
        self._precision = width**-2
        self._centres = (1 - width**2).sqrt()[:, None, None] * self._whiten(points)
        log_det = self._scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        self._log_norm = d * (0.5 * math.log(2 * math.pi) + width.log()) + log_det
        self._log_norm = self._log_norm + math.log(count)

    def log_prob(self, value: Tensor) -> Tensor:
        """
        The log density.

        :param value: shape ``[m, *batch, D]``.
        :returns: shape ``[m, *batch]``.
        """
        at = self._whiten(self._flat(value))
        size = max(1, _CHUNK // max(1, self._centres.shape[0] * self._centres.shape[1]))
        log_sum = torch.cat([self._log_sum(part) for part in at.split(size, dim=1)], dim=1)
        found = log_sum - self._log_norm[:, None]
        return found.T.reshape(len(value), *self._batch)

    def _log_sum(self, at: Tensor) -> Tensor:
        """The logarithm of the kernels' sum at whitened points, shape ``[B, m]``."""
        squares = at.square().sum(-1, keepdim=True) + self._centres.square().sum(-1)[:, None]
        distance = squares - 2 * at @ self._centres.mT
        return (-0.5 * self._precision[:, None, None] * distance).logsumexp(-1)

    def _flat(self, value: Tensor) -> Tensor:
        """``[n, *batch, D]`` as ``[B, n, D]``, zero where a coordinate does not count."""
        flat = value.reshape(len(value), *self._active.shape).transpose(0, 1)
        return torch.where(self._active[:, None] > 0, flat, 0.0)

    def _cholesky(self, deviation: Tensor) -> Tensor:
        """The root of the covariance, with ones for coordinates that do not count."""
        covariance = deviation.mT @ deviation / (deviation.shape[1] - 1)
        diagonal = covariance.diagonal(dim1=-2, dim2=-1)
        # Draws in a plane, or all the same, have a covariance without a root.
        floor = 1e-6 * diagonal.mean(-1, keepdim=True) + torch.finfo(diagonal.dtype).tiny
        extra = torch.where(self._active > 0, floor, 1.0)
        return torch.linalg.cholesky(covariance + torch.diag_embed(extra))

    def _whiten(self, points: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(
            self._scale_tril, (points - self._mean).mT, upper=False
        ).mT
