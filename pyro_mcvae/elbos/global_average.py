r"""Several draws of the global latents, averaged inside of the logarithm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_mcvae.elbos.elbo_terms import guide_data
from pyro_mcvae.elbos.estimate import Bounds, Estimate, as_scalar
from pyro_mcvae.elbos.path_gradient import PathGradient
from pyro_mcvae.ops.importance import (
    leave_one_out_bound,
    leave_one_out_mean,
    leave_one_out_signal,
    log_mean_exp,
    normalized_weights,
)
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.sites import is_random

__all__ = ["GlobalAverage", "draws_globals"]


def draws_globals(sample: WeightedParticles) -> bool:
    """Whether a latent of the guide that is drawn lies outside of every block, with some block."""
    return bool(sample.blocks) and any(
        t.in_guide and is_random(t.site) for t in sample.global_terms()
    )


class GlobalAverage:
    r"""
    The bound of M draws of the global latents, each with K of the local ones:

    .. math::
        L = \log \frac{1}{M} \sum_m e^{T_m}, \qquad
        T_m = \log \frac{p(\theta_m)}{q(\theta_m)}
            + \sum_n \log \frac{1}{K} \sum_k w_{nk}(\theta_m) .

    :math:`E[e^L] = p(x)`, since the :math:`w_{nk}` are independent given :math:`\theta_m`. Its
    gradient goes through both averages: with :math:`v_m = e^{T_m} / \sum_j e^{T_j}` held fixed,
    :math:`\sum_m v_m \nabla T_m`, and score functions of draws that are not reparameterized, each
    with what L would be without that draw as its baseline.

    :param samples: M samples, each with one draw of the global latents.
    :raises ValueError: if a plate is subsampled, since N/B may multiply no weight.
    """

    def __init__(self, samples: list[WeightedParticles]) -> None:
        self.samples = samples
        for sample in samples:
            _refuse_subsampling(sample)
        self._local = [log_mean_exp(s.log_weight.detach()) for s in samples]
        self._global = [_global_log_weight(s).detach() for s in samples]
        pairs = zip(self._global, self._local, strict=True)
        self.totals = torch.stack([g + bound.sum() for g, bound in pairs])

    @property
    def value(self) -> Tensor:
        """L, detached, with what the guide observes."""
        return log_mean_exp(self.totals) + self._observed(0)

    def bounds(self) -> Bounds:
        """The value as that of one weight over everything."""
        value = log_mean_exp(self.totals)
        return Bounds(value, 1.0, as_scalar(self._observed(0)).to(value), ())

    def estimate(self, path: PathGradient) -> Estimate:
        """The value and its gradient."""
        value = self.value
        surrogate = self._surrogate(path) if torch.is_grad_enabled() else value
        runs = [run for sample in self.samples for run in sample.runs]
        return Estimate(value, surrogate, runs, scored=True)

    def _surrogate(self, path: PathGradient) -> Tensor:
        total = torch.as_tensor(self._observed(1))
        weight, signal = normalized_weights(self.totals), leave_one_out_signal(self.totals)
        for m, sample in enumerate(self.samples):
            paths = _global_log_weight(sample) + path.surrogate(sample, weight[m]).sum()
            # A weight of zero would otherwise meet a log weight of minus infinity.
            total = total + torch.where(weight[m] > 0, weight[m] * paths, 0.0)
            scores = [t.score for t in sample.global_terms() if isinstance(t.score, Tensor)]
            total = total + signal[m] * sum(score.sum() for score in scores)
            if sample.has_local_scores:
                score = sample.local_sum(lambda t, i: t.score)
                total = total + (self._local_signal(m) * score).sum()
        return total

    def _local_signal(self, m: int) -> Tensor:
        """L minus what it is without one local draw of a datum: ``[K, *plates]``."""
        log_weight, bound = self.samples[m].log_weight.detach(), self._local[m]
        without = torch.cat([self.totals[:m], self.totals[m + 1 :]]).logsumexp(0)
        if len(log_weight) > 1:
            rest = self._global[m]
            if bound.numel() > 1:  # a difference from the total is none where that is infinite
                others = leave_one_out_mean(bound.flatten()) * (bound.numel() - 1)
                rest = rest + others.reshape(bound.shape)
            without = torch.logaddexp(without, rest + leave_one_out_bound(log_weight))
        without = without - math.log(len(self.totals))
        signal = log_mean_exp(self.totals) - torch.where(without.isneginf(), 0.0, without)
        return signal.expand(log_weight.shape)

    def _observed(self, part: int) -> Tensor | float:
        """What the guide observes, averaged: its value (0), or a scalar with its gradient (1)."""
        return sum(guide_data(s)[part] for s in self.samples) / len(self.samples)


def _global_log_weight(sample: WeightedParticles) -> Tensor:
    terms = sample.global_terms()
    return as_scalar(sum((-t.log_prob if t.in_guide else t.log_prob).sum() for t in terms))


def _refuse_subsampling(sample: WeightedParticles) -> None:
    for frame in sample.subsampled_frames:
        raise ValueError(
            f"num_global_particles averages over draws of the global latents that weigh all data "
            f"together, so it needs all of them, but plate '{frame.name}' is subsampled "
            f"({frame.size} of {frame.full_size}). Use num_global_particles=1, or pass the full "
            f"data."
        )
