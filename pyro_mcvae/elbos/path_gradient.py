"""Pathwise gradient estimators of importance weighted bounds: reparam, stl and dreg."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_mcvae.elbos.dreg_share import dreg_share
from pyro_mcvae.elbos.elbo_terms import Cost, elbo_costs
from pyro_mcvae.ops.importance import normalized_weights, renyi_bound
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.moving_supports import moves_support
from pyro_mcvae.programs.sites import (
    inner_scale,
    is_masked,
    is_random,
    is_straight_through,
    layers,
    masked,
    unscaled_log_prob,
)
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.transforms import is_elementary, transforms_of
from pyro_mcvae.programs.types import Distribution
from pyro_mcvae.programs.validation import unvalidated

_LIBRARIES = "torch.distributions.", "pyro.distributions."


class PathGradient:
    r"""
    The gradient of :math:`\frac{1}{1 - \alpha} \log \frac{1}{K} \sum_k w_k^{1 - \alpha}` through
    the guide's draws; of the importance weighted bound for :math:`\alpha = 0`.

    With :math:`\tilde w_k = w_k^{1 - \alpha} / \sum_j w_j^{1 - \alpha}` held fixed, the gradients
    with respect to a guide's parameters :math:`\phi` are

    .. math::
        \text{reparam:} \quad & \sum_k \tilde w_k \Big(
            \frac{\partial \log w_k}{\partial z_k} \frac{d z_k}{d \phi}
            - \frac{\partial \log q_\phi(z_k)}{\partial \phi} \Big) \\
        \text{stl:} \quad & \sum_k \tilde w_k
            \frac{\partial \log w_k}{\partial z_k} \frac{d z_k}{d \phi} \\
        \text{dreg:} \quad & \sum_k \tilde w_k \big(1 - (1 - \alpha)(1 - \tilde w_k)\big)
            \frac{\partial \log w_k}{\partial z_k} \frac{d z_k}{d \phi} \\
        \text{auto:} \quad & \lambda \, \text{dreg} + (1 - \lambda) \, \text{reparam}

    and for all other parameters :math:`\sum_k \tilde w_k \nabla \log w_k`. The score term is
    taken out by adding log q at the detached draw; the second factor of dreg
    (:math:`\tilde w_k` for :math:`\alpha = 0`) acts on the gradient that arrives at the draw on its
    way back. One backward pass serves all parameters. Where log q enters the weight with a factor c
    (the user's scale, or a mask's zero), so does its score term, and the second factor is
    :math:`1 - c (1 - \alpha)(1 - \tilde w_k)`. What the share :math:`\lambda` is
    :func:`~pyro_mcvae.elbos.dreg_share.dreg_share` says.
    """

    def __init__(self, estimator: str, num_particles: int, alpha: float = 0.0) -> None:
        self.estimator, self.alpha = estimator, alpha
        # K = 1 makes them agree in expectation; reparam is then exactly the ELBO's gradient.
        if estimator == "vimco" or (estimator == "auto" and num_particles == 1):
            self.estimator = "reparam"
        self.needs_roots = self.estimator != "reparam"

    def costs(self, sample: WeightedParticles) -> list[list[Cost]]:
        """The plain ELBO's costs of each run, for one particle, where every weight is 1."""
        return [
            [
                Cost(c.term, c.value, -_path_log_q(c.term))
                if self._applies(sample, c.term, i)
                else c
                for c in elbo_costs(run.summands)
            ]
            for i, run in enumerate(sample.runs)
        ]

    def surrogate(self, sample: WeightedParticles) -> Tensor:
        """Per datum, a tensor with the estimator's gradient: ``[*plates]``."""
        chosen = [
            {t.key for t in run.terms if self._applies(sample, t, i)}
            for i, run in enumerate(sample.runs)
        ]
        fixed = sample.log_weight.detach()
        if not any(chosen):
            return renyi_bound(sample.log_weight, self.alpha)
        weight = normalized_weights(fixed if self.alpha == 0 else (1 - self.alpha) * fixed)
        factor = weight if self.alpha == 0 else 1 - (1 - self.alpha) * (1 - weight)

        score = sample.local_sum(lambda t, i: _score(t) if t.key in chosen[i] else 0)
        if self.estimator == "auto":
            share = dreg_share(fixed, score.detach(), self.alpha)
            factor, score = torch.addcmul(1 - share, share, factor), share * score
        if self.estimator != "stl":
            self._reparameterize_again(sample, chosen, factor)
        log_weight = _log_weight(sample, chosen) + score
        # A weight of zero would otherwise meet a log weight of minus infinity: 0 * inf is NaN.
        return (weight * log_weight.masked_fill(weight == 0, 0.0)).sum(0)

    def _applies(self, sample: WeightedParticles, term: Term, i: int) -> bool:
        return (
            self.needs_roots
            and term.in_guide
            and is_random(term.site)
            and not isinstance(term.score, Tensor)
            and not term.left_out
            and sample.block_of[i][term.key] is not None
            and term.key.name in sample.structure.roots
            and term.site["value"].requires_grad
            and not is_masked(term.site["fn"])
            and not is_straight_through(term.site["fn"])
            and not moves_support(term.site["fn"])
            and (self.estimator != "auto" or not _is_flow(term.site["fn"]))
        )

    @staticmethod
    def _reparameterize_again(
        sample: WeightedParticles, chosen: list[set[FactorKey]], factor: Tensor
    ) -> None:
        parts = sample.split(factor)
        for i, run in enumerate(sample.runs):
            for term in run.terms:
                if term.key in chosen[i]:
                    b = sample.block_of[i][term.key]
                    assert b is not None
                    scaled = _second_factor(term, sample.align(parts[b], term, i))
                    term.site["value"].register_hook(lambda grad, w=scaled: grad * w.to(grad))


def _path_log_q(term: Term) -> Tensor:
    """log q(z), up to its value, with a gradient through z alone."""
    return _log_q(term) - _score(term)


def _log_weight(sample: WeightedParticles, chosen: list[set[FactorKey]]) -> Tensor:
    """The log weight, whose gradient with respect to the draws of the chosen sites is whole."""
    pairs = zip(sample.runs, chosen, strict=True)
    terms = (t for run, keys in pairs for t in run.terms if t.key in keys)
    if not any(_may_cache(t.site["fn"]) for t in terms):
        return sample.log_weight

    def summand(term: Term, i: int) -> Tensor:
        if not term.in_guide:
            return term.log_prob
        return -_log_q(term) if term.key in chosen[i] else -term.log_prob

    return sample.local_sum(summand)


def _log_q(term: Term) -> Tensor:
    """log q(z), with its gradient through z and through the parameters."""
    value = term.site["value"]
    if not _may_cache(term.site["fn"]):
        return term.log_prob
    # What is cached is of the tensor that was drawn, to which it has no path.
    return masked(term.site, unscaled_log_prob(term.site, "guide", value.view_as(value)))


def _score(term: Term) -> Tensor:
    """log q(z), with its gradient through the distribution's parameters alone."""
    value, scale = term.site["value"].detach(), term.site["scale"]
    if isinstance(scale, Tensor):
        scale = scale.detach()  # whose own gradient has log q itself, and is no score
    with unvalidated([term.site["fn"]]):  # which the term has been
        log_q = unscaled_log_prob(term.site, "guide", value)
    return masked({**term.site, "scale": scale}, log_q)


def _second_factor(term: Term, weight: Tensor) -> Tensor:
    """1 - c (1 - w), aligned with the site's value like ``weight``."""
    scale, mask = inner_scale(term.site), term.site["mask"]
    if mask is None and not isinstance(scale, Tensor) and scale == 1.0:
        return weight
    factor = torch.ones_like(term.log_prob)
    factor = masked(term.site, factor)
    event_dim = term.site["fn"].event_dim
    return 1 - factor.reshape(factor.shape + (1,) * event_dim) * (1 - weight)


def _may_cache(fn: Distribution) -> bool:
    """
    Whether a density may come from what its draw has left behind: the inverse that transforms keep,
    or all of it, as of Zuko's flows and of other distributions with a ``log_prob`` of their own.
    """
    return any(transforms_of(fn)) or _has_own_density(fn)


def _has_own_density(fn: Distribution) -> bool:
    return not all(type(f).log_prob.__module__.startswith(_LIBRARIES) for f in layers(fn))


def _is_flow(fn: Distribution) -> bool:
    """Whether a density may cost much: one of transforms beyond torch's, or of one's own."""
    return any(not is_elementary(t) for t in transforms_of(fn)) or _has_own_density(fn)
