"""Importance weighted and Renyi bounds, with their gradient estimators."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyro_mcvae.elbos.base import ELBOOptions, Estimate, MonteCarloELBO
from pyro_mcvae.elbos.elbo_terms import Cost, averaged_estimate, elbo_costs, weighted_estimate
from pyro_mcvae.ops.checks import check_choice
from pyro_mcvae.ops.tensors import as_shape
from pyro_mcvae.ops.weights import leave_one_out_signal, normalized_weights, renyi_bound
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.distributions import (
    has_own_density,
    is_elementary,
    may_cache,
    moves_support,
    transforms_of,
    unvalidated,
)
from pyro_mcvae.programs.messengers import score_function_draws
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.sites import (
    inner_scale,
    is_masked,
    is_random,
    is_straight_through,
    masked,
    unscaled_log_prob,
)
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Distribution, FactorKey, Site
from pyro_mcvae.structure.finder import StructureFinder

# The mixture of the plain and the doubly reparameterized gradient with the least noise.

# A slope within this many standard errors of 0 is set to 0.
_STANDARD_ERRORS = 2


def dreg_coefficient(log_weight: Tensor, log_q: Tensor, alpha: float = 0.0) -> Tensor:
    r"""
    Return the coefficient of the doubly reparameterized gradient, for each draw.

    If a guide is narrow, the plain gradient of a location has little noise, and the doubly
    reparameterized one has much. If a guide is nearly exact, the opposite is true. Take a Gaussian
    guide with noise :math:`\epsilon`, and let b be the slope of :math:`\log p` on :math:`\log q`
    over its draws. It is 1 if the guide is exact, and 0 if the guide is narrow. To first order the
    noise of the two gradients is

    .. math::
        -\frac{b}{\sigma} \bar\epsilon \qquad \text{and} \qquad
        \frac{(1 - b) f}{\sigma} \bar\epsilon ,

    where f is the mean factor of a draw in the doubly reparameterized gradient (for alpha = 0, one
    over the effective number of particles). This noise cancels in the mixture with the coefficient
    :math:`\lambda = b / (b + (1 - b) f)`.

    If the coefficient does not depend on the draw itself, the gradient is unbiased. Therefore even
    data use a coefficient from the odd data, and vice versa. With one datum, the particles are
    divided in the same way. A slope within two standard errors of 0 is set to 0, which is the plain
    gradient. Larger slopes are shrunk, as in Stein's estimator. In distributed training each
    process uses its own data, so coefficients differ between processes, but the mean gradient is
    the same.

    :param ~torch.Tensor log_weight: log p - log q of all sites, shape ``[K, *plates]``, detached.
    :param ~torch.Tensor log_q: log q of the sites whose gradient is mixed, same shape, detached.
    :param float alpha: the order of the Rényi bound whose gradient it is.
    :returns: :math:`\lambda` between 0 and 1, shape ``[*plates]``; ``[K, *plates]`` for one datum.
    """
    shape, num_particles = log_weight.shape, log_weight.shape[0]
    count = math.prod(shape[1:])
    q, w = _in_columns(log_q, count), _in_columns(log_weight, count)
    rows, columns = w.shape
    # Degrees of freedom: a mean of each column and one slope are estimated.
    freedom = columns // 2 * (rows - 1) - 1
    if freedom < 1:
        return torch.zeros(shape[1:], dtype=log_q.dtype, device=log_q.device)
    # Exactly 0 where the density is constant, and NaN where a weight is zero. Such data have no
    # slope, and are left out of the sums.
    q = torch.add(q - q[0], w, alpha=0)
    weight = (w if alpha == 0 else (1 - alpha) * w).softmax(0)
    # Sums of squared deviations; torch.var takes ten times as long along this dim, and autocast
    # would compute a product of vectors in half precision.
    deviations = torch.stack([q, w, q + w, weight])
    deviations = deviations - deviations.mean(1, keepdim=True)
    squares = deviations.square().sum(1).nan_to_num(0.0)
    # Sum over the odd columns for the even columns, and vice versa.
    qq, ww, pp, spread = squares.reshape(4, -1, 2).sum(1).flip(1).unbind()
    # The slope b has the squared relative error (pp qq / pq^2 - 1) / freedom, and is shrunk by four
    # times this error.
    pq = ((qq + pp - ww) / 2).clamp(min=0)
    error = (pp * qq / pq.square() - 1) / freedom
    slope = (pq / qq * (1 - _STANDARD_ERRORS**2 * error)).clamp(0, 1)
    # The mean factor is f = alpha + (1 - alpha) sum_k w_k^2, over all K particles of a datum.
    squared = (1 + rows * spread / (columns // 2)) / num_particles
    factor = alpha + (1 - alpha) * squared
    coefficient = (slope / (slope + (1 - slope) * factor)).nan_to_num(0.0)
    length = num_particles if count == 1 else count
    coefficient = coefficient.repeat((length + 1) // 2)
    return as_shape(
        coefficient[:length] if length % 2 else coefficient, shape if count == 1 else shape[1:]
    )


def _in_columns(value: Tensor, count: int) -> Tensor:
    """
    Reshape to an even number of columns: the data, or the even and odd particles of one datum.
    """
    if count == 1:
        return value.flatten()[: len(value) // 2 * 2].reshape(-1, 2)
    return value.flatten(1)[:, :-1] if count % 2 else value.flatten(1)


# Pathwise gradient estimators of importance weighted bounds: reparam, stl and dreg.


class PathGradient:
    r"""
    Computes the gradient of :math:`\frac{1}{1 - \alpha} \log \frac{1}{K} \sum_k w_k^{1 - \alpha}`
    through the draws of the guide. With :math:`\alpha = 0` this is the importance weighted bound.

    With :math:`\tilde w_k = w_k^{1 - \alpha} / \sum_j w_j^{1 - \alpha}` detached, the gradients
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

    and for all other parameters :math:`\sum_k \tilde w_k \nabla \log w_k`. Adding log q at the
    detached draw removes the score term. The second factor of dreg (:math:`\tilde w_k` for
    :math:`\alpha = 0`) multiplies the gradient at the draw in the backward pass. One backward pass
    is enough for all parameters. Log q may enter the weight with a factor c (the user's scale, or
    zero where masked). Its score term then has this factor too, and the second factor is
    :math:`1 - c (1 - \alpha)(1 - \tilde w_k)`. See :func:`~pyro_mcvae.elbos.iwae.dreg_coefficient`
    for :math:`\lambda`.
    """

    def __init__(self, estimator: str, num_particles: int, alpha: float = 0.0) -> None:
        self.estimator, self.alpha = estimator, alpha
        # For K = 1 all estimators agree in expectation, and reparam is exactly the ELBO's gradient.
        if estimator == "vimco" or (estimator == "auto" and num_particles == 1):
            self.estimator = "reparam"
        self.needs_roots = self.estimator != "reparam"

    def costs(self, sample: WeightedParticles) -> list[list[Cost]]:
        """Return the costs of the plain ELBO for each run, for one particle with weight 1."""
        return [
            [
                Cost(c.term, c.value, _score(c.term) - _log_q(c.term))  # the path of -log q
                if self._applies(sample, c.term, i)
                else c
                for c in elbo_costs(run.summands)
            ]
            for i, run in enumerate(sample.runs)
        ]

    def surrogate(self, sample: WeightedParticles, bound: Tensor) -> Tensor:
        """Return a tensor ``[*plates]`` with the gradient; the bound, if it has all of it."""
        chosen = [
            {t.key for t in run.terms if self._applies(sample, t, i)}
            for i, run in enumerate(sample.runs)
        ]
        fixed = sample.log_weight.detach()
        if not any(chosen):
            return bound
        weight = normalized_weights(fixed if self.alpha == 0 else (1 - self.alpha) * fixed)
        factor = weight if self.alpha == 0 else 1 - (1 - self.alpha) * (1 - weight)

        score = sample.local_sum(lambda t, i: _score(t) if t.key in chosen[i] else 0)
        if self.estimator == "auto":
            coefficient = dreg_coefficient(fixed, score.detach(), self.alpha)
            factor, score = torch.addcmul(1 - coefficient, coefficient, factor), coefficient * score
        if self.estimator != "stl":
            self._reparameterize_again(sample, chosen, factor)
        log_weight = _log_weight(sample, chosen) + score
        # Otherwise a zero weight would multiply a log weight of minus infinity, which gives NaN.
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


def _log_weight(sample: WeightedParticles, chosen: list[set[FactorKey]]) -> Tensor:
    """Return the log weight, with a full gradient at the draws of the chosen sites."""
    pairs = zip(sample.runs, chosen, strict=True)
    terms = (t for run, keys in pairs for t in run.terms if t.key in keys)
    if not any(may_cache(t.site["fn"]) for t in terms):
        return sample.log_weight

    def summand(term: Term, i: int) -> Tensor:
        if not term.in_guide:
            return term.log_prob
        return -_log_q(term) if term.key in chosen[i] else -term.log_prob

    return sample.local_sum(summand)


def _log_q(term: Term) -> Tensor:
    """Return log q(z), with its gradient through z and through the parameters."""
    value = term.site["value"]
    if not may_cache(term.site["fn"]):
        return term.log_prob
    # The cached value belongs to the drawn tensor, and has no gradient path to this one.
    return masked(term.site, unscaled_log_prob(term.site, "guide", value.view_as(value)))


def _score(term: Term) -> Tensor:
    """Return log q(z), with its gradient only through the parameters of the distribution."""
    value, scale = term.site["value"].detach(), term.site["scale"]
    if isinstance(scale, Tensor):
        scale = scale.detach()  # its gradient includes log q itself, and is not a score
    with unvalidated([term.site["fn"]]):  # already computed by the term
        log_q = unscaled_log_prob(term.site, "guide", value)
    return masked({**term.site, "scale": scale}, log_q)


def _second_factor(term: Term, weight: Tensor) -> Tensor:
    """Return 1 - c (1 - w), aligned with the site's value like ``weight``."""
    scale, mask = inner_scale(term.site), term.site["mask"]
    if mask is None and not isinstance(scale, Tensor) and scale == 1.0:
        return weight
    factor = torch.ones_like(term.log_prob)
    factor = masked(term.site, factor)
    event_dim = term.site["fn"].event_dim
    return 1 - factor.reshape(factor.shape + (1,) * event_dim) * (1 - weight)


def _is_flow(fn: Distribution) -> bool:
    """Return whether a density may be expensive, because it has transforms from outside torch."""
    return any(not is_elementary(t) for t in transforms_of(fn)) or has_own_density(fn)


# The importance weighted bound, per datum, for any Pyro program.

GradientEstimator = Literal["auto", "reparam", "stl", "dreg", "vimco"]


class TraceIWAE_ELBO(MonteCarloELBO):
    r"""
    The importance weighted bound of Burda et al. [1], with one weight per datum:

    .. math::
        L = \log p(\vartheta) - \log q(\vartheta)
            + \frac{N}{B} \sum_n \log \frac{1}{K} \sum_{k=1}^K
              \frac{p(x_n, z_{nk} \mid \vartheta)}{q(z_{nk} \mid x_n)}, \qquad
        z_{nk} \sim q(z \mid x_n).

    It is a lower bound on the log evidence for every K and minibatch size. It increases with K, and
    is the ELBO for K = 1. It replaces ``RenyiELBO(alpha=0)``, which multiplies the log weights by
    N/B, has no gradient for discrete guides, and draws a minibatch per particle. For another alpha
    use :class:`TraceRenyi_ELBO`.

    * *Local* latents, inside the plates that all of them share, are drawn K times, with a weight
      for each element of these plates. *Global* latents :math:`\vartheta`, outside every plate, are
      drawn once per step and contribute the plain ELBO. A model without plates has one weight over
      all latents.
    * The scale N/B of subsampled plates is outside the logarithm. If all latents are outside a
      subsampled plate, as in Bayesian regression on minibatches, no importance weighted bound
      exists. The K draws are then averaged as in the plain ELBO, with a warning.
    * ``poutine.scale`` and ``poutine.mask`` act inside the weights: a scale tempers the weights and
      does not multiply the bound. To scale the bound, multiply the loss.
    * Extra runs of the model and guide determine which factors depend on which latents. A local
      latent that Python reads (``if z > 0``, ``z.item()``) is treated as affecting every other
      site. ``bounds(...).plates`` names the plates of the weights.

    **Gradient estimators** have the same value and, for the model, the same gradient. They differ
    for the reparameterized sites of the guide:

    * ``"reparam"``: the gradient of the bound, through the draws and the densities.
    * ``"stl"``: without the gradient of log q for the parameters of q (*sticking the landing* [2]).
      It has less noise near the optimum, but is biased for K > 1.
    * ``"dreg"``: doubly reparameterized [3]. It is unbiased, and its signal-to-noise ratio grows
      with K, while that of ``"reparam"`` decreases [4].
    * ``"auto"`` (default): the mixture of ``"reparam"`` and ``"dreg"`` with the least noise.
    * ``"vimco"``: the score function for all local sites.

    The noise for ``"auto"`` is measured on other draws of the step, so the mixture is unbiased. It
    is close to ``"dreg"`` if the guide nearly fits. It is close to ``"reparam"`` if the guide is
    much narrower than the posterior, as AutoGuides are initially. It is exactly ``"reparam"`` for K
    = 1, and for one weight over everything with fewer than 6 particles. It is also ``"reparam"``
    for trained flows and for classes with their own ``log_prob``, where ``"dreg"`` would cost a
    second evaluation.

    ``"stl"`` and ``"dreg"`` apply to sites whose distribution does not depend on another
    reparameterized draw of the guide. Other sites of a structured guide use ``"reparam"``. So do
    distributions masked by ``dist.mask`` (not by ``poutine.mask``), and distributions with a
    trained support (``Uniform(low, high)``), which have no valid score function. Local sites that
    cannot be reparameterized always use VIMCO [5], a score function with a leave-one-out baseline
    per datum. For K = 1 they use Pyro's plate-wise score function.

    :param int num_particles: K, the draws inside the logarithm.
    :param str gradient_estimator: one of the names above.
    :param bool joint: use one weight over everything, with K draws of the global latents. This
        needs the full data, and gives a tighter bound for few data.
    :param options: ``max_plate_nesting``, ``vectorize_particles``, ``strict_enumeration_warning``
        and ``retain_graph``, as in Pyro; see :class:`MonteCarloELBO`.
    :raises ValueError: for a ``num_particles`` that is not an int of at least 1, an unknown
        estimator, ``"vimco"`` with one particle, and ``joint`` with a subsampled plate.

    [1] Burda, Grosse, Salakhutdinov (2016), *Importance Weighted Autoencoders*.
    [2] Roeder, Wu, Duvenaud (2017), *Sticking the Landing*.
    [3] Tucker, Lawson, Gu, Maddison (2019), *Doubly Reparameterized Gradient Estimators for Monte
    Carlo Objectives*.
    [4] Rainforth et al. (2018), *Tighter Variational Bounds are Not Necessarily Better*.
    [5] Mnih, Rezende (2016), *Variational Inference for Monte Carlo Objectives*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import TraceIWAE_ELBO
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(0.0, 1.0))
        >>> x = torch.tensor([-1.0, 0.0, 1.0])
        >>> elbo = TraceIWAE_ELBO(num_particles=1000)
        >>> log_evidence = dist.Normal(0.0, 2**0.5).log_prob(x).sum()
        >>> round(-elbo.loss(model, guide, x), 1), round(log_evidence.item(), 1)
        (-4.3, -4.3)
    """

    # The order of the Rényi bound; subclasses have other orders.
    alpha: float = 0.0
    _also_fixed = frozenset({"alpha"})

    def __init__(
        self,
        num_particles: int = 2,
        *,
        gradient_estimator: GradientEstimator = "auto",
        joint: bool = False,
        **options: Unpack[ELBOOptions],
    ) -> None:
        self._check_options(options)
        check_choice("gradient_estimator", gradient_estimator, get_args(GradientEstimator))
        self.gradient_estimator = gradient_estimator
        self.joint = joint
        super().__init__(num_particles, **options)

    def _use_particles(self, num_particles: int) -> None:
        if self.gradient_estimator == "vimco" and num_particles < 2:
            raise ValueError(
                f"gradient_estimator='vimco' has a leave-one-out baseline and needs "
                f"num_particles >= 2, got {num_particles}; use 'auto' for one particle"
            )
        super()._use_particles(num_particles)
        self._path = PathGradient(self.gradient_estimator, num_particles, self.alpha)
        self.sampler.structures = StructureFinder(
            self.joint, self._path.needs_roots, self.sampler.analyses
        )

    def _weighs(self, site: Site) -> bool:
        return self.num_particles > 1

    def estimate(self, programs: Programs) -> Estimate:
        sample = self._sample(programs)
        if not (sample.blocks and self.num_particles > 1):
            return averaged_estimate(sample, self._path.costs(sample))
        bound = renyi_bound(sample.log_weight, self.alpha)
        surrogate = self._surrogate(sample, bound) if torch.is_grad_enabled() else bound
        return weighted_estimate(sample, bound, surrogate)

    def _sample(self, programs: Programs) -> WeightedParticles:
        if self.gradient_estimator != "vimco":
            return self.sampler.sample(programs)
        return self.sampler.sample(programs, lambda rows, shared: score_function_draws(shared))

    def _surrogate(self, sample: WeightedParticles, bound: Tensor) -> Tensor:
        """Return a tensor ``[*plates]`` whose gradient estimates the gradient of the bound."""
        surrogate = self._path.surrogate(sample, bound)
        if sample.has_local_scores:
            score = sample.local_sum(lambda t, i: t.score)
            order = 1 - self.alpha
            signal = leave_one_out_signal(order * sample.log_weight) / order
            surrogate = surrogate + (signal * score).sum(0)
        return surrogate


# The variational Rényi bound of any order, per datum, for any Pyro program.


class TraceRenyi_ELBO(TraceIWAE_ELBO):
    r"""
    The variational Rényi bound of order alpha of Li and Turner [1], with one weight per datum:

    .. math::
        L_\alpha = \log p(\vartheta) - \log q(\vartheta)
            + \frac{N}{B} \sum_n \frac{1}{1 - \alpha} \log \frac{1}{K} \sum_{k=1}^K \Big(
              \frac{p(x_n, z_{nk} \mid \vartheta)}{q(z_{nk} \mid x_n)} \Big)^{1 - \alpha}, \qquad
        z_{nk} \sim q(z \mid x_n).

    It is a lower bound on the log evidence for every K. For alpha from 0 to 1 its value is between
    the importance weighted bound and the ELBO. Guides trained with a larger alpha concentrate on a
    mode, and with a smaller alpha they cover more of the posterior.

    Plates, minibatches, global latents, scales and masks are handled as in :class:`TraceIWAE_ELBO`,
    which is the case ``alpha=0``. The gradient estimators are the same, with :math:`w_k^{1 -
    \alpha}` instead of :math:`w_k` in normalized weights. It replaces ``RenyiELBO(alpha)``, which
    multiplies the log weights by N/B.

    :param float alpha: the order, at least 0 and other than 1.
    :param int num_particles: K, the draws inside the logarithm.
    :param str gradient_estimator: as in :class:`TraceIWAE_ELBO`.
    :param bool joint: one weight over everything, as in :class:`TraceIWAE_ELBO`.
    :param options: arguments of Pyro's losses; see :class:`MonteCarloELBO`.
    :raises ValueError: for an alpha that is 1, negative or not finite; and as
        :class:`TraceIWAE_ELBO`.

    [1] Li, Turner (2016), *Rényi Divergence Variational Inference*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import TraceRenyi_ELBO
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))
        >>> elbo = TraceRenyi_ELBO(alpha=0.5, num_particles=10)
        >>> x = torch.tensor([-1.0, 0.0, 1.0])
        >>> log_evidence = dist.Normal(0.0, 2**0.5).log_prob(x).sum()  # the guide is exact
        >>> round(-elbo.loss(model, guide, x), 3), round(log_evidence.item(), 3)
        (-4.297, -4.297)
    """

    def __init__(
        self,
        alpha: float = 0.0,
        num_particles: int = 2,
        *,
        gradient_estimator: GradientEstimator = "auto",
        joint: bool = False,
        **options: Unpack[ELBOOptions],
    ) -> None:
        alpha = float(alpha)
        if alpha == 1 or not 0 <= alpha < math.inf:
            raise ValueError(
                f"alpha must be a finite number of at least 0 other than 1, got {alpha}: with a "
                f"negative order the value is no bound, and the bound of order 1 is the ELBO, "
                f"TraceSGVB_ELBO(num_particles={num_particles})"
            )
        self.alpha = alpha
        super().__init__(
            num_particles, gradient_estimator=gradient_estimator, joint=joint, **options
        )
