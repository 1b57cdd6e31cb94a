"""Summarize weights of mean p(x) per datum, drawn in chunks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pyro_mcvae.ops.pareto import pareto_k, tail_length

if TYPE_CHECKING:
    from pyro_mcvae.programs.run import Run


class WeightSummary:
    r"""
    What :math:`K` weights per datum say together, in memory that does not grow with K, but for the
    :math:`3 \sqrt K` largest per datum, to which the tail is fitted.

    :param int num_particles: K, all chunks together.

    Example::

        >>> summary = WeightSummary(4)
        >>> for chunk in torch.tensor([0.0, 0.0, 0.0, 0.0]).split(2):
        ...     summary.add(chunk)
        >>> summary.log_mean.item(), summary.effective_sample_size.item()
        (0.0, 4.0)
    """

    _largest: Tensor
    _top: Tensor
    # Sums of w and of its square, relative to the largest w so far; and of log w.
    _sum: Tensor
    _squares: Tensor
    _logs: Tensor

    def __init__(self, num_particles: int) -> None:
        self.num_particles = num_particles
        self.count = 0
        self._tail = tail_length(num_particles) + 1

    def add(self, log_weight: Tensor) -> None:
        """
        :param log_weight: a chunk, shape ``[k, *plates]``.
        """
        chunk = log_weight.detach().double()
        if not self.count:
            self._largest = torch.full_like(chunk[0], torch.finfo(chunk.dtype).min)
            self._sum = self._squares = self._logs = torch.zeros_like(chunk[0])
            self._top = chunk[:0]
        largest = torch.maximum(self._largest, chunk.amax(0))
        shrink = (self._largest - largest).exp()
        relative = (chunk - largest).exp()
        self._sum = self._sum * shrink + relative.sum(0)
        self._squares = self._squares * shrink.square() + relative.square().sum(0)
        self._logs = self._logs + chunk.sum(0)
        self._largest = largest
        top = torch.cat([self._top, chunk])
        self._top = top.topk(min(self._tail, len(top)), dim=0).values
        self.count += len(chunk)

    @property
    def log_mean(self) -> Tensor:
        """The logarithm of the mean weight, shape ``[*plates]``; all results are float64."""
        return self._largest + self._sum.log() - math.log(self.count)

    @property
    def mean_log(self) -> Tensor:
        """The mean of the log weights."""
        return self._logs / self.count

    @property
    def effective_sample_size(self) -> Tensor:
        """Kish's number of equally weighted draws; 0 where every weight is zero."""
        return torch.where(self._sum > 0, self._sum.square() / self._squares, 0.0)

    @property
    def standard_error(self) -> Tensor:
        r"""
        Of the logarithm of the mean, :math:`\text{sd}(w) / (\sqrt K\, \bar w)`; infinite where
        every weight is zero, NaN for one weight.
        """
        if self.count < 2:
            return torch.full_like(self.log_mean, math.nan)
        spread = 1 / self.effective_sample_size - 1 / self.count
        return (spread.clamp_min(0.0) * self.count / (self.count - 1)).sqrt()

    @property
    def pareto_k(self) -> Tensor:
        """The shape of the weights' tail, see :func:`~pyro_mcvae.ops.pareto.pareto_k`."""
        return pareto_k(self._top, self.count)


class Weighed(NamedTuple):
    """
    :ivar log_weight: ``[count, *plates]``.
    :ivar runs: of the programs, to tell where a weight is not a number.
    :ivar acceptance: of each transition, where chains were moved.
    """

    log_weight: Tensor
    runs: list[Run]
    acceptance: Tensor | None = None
