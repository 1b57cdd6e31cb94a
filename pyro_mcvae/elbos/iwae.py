"""The importance weighted bound, per datum, for any Pyro program."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyro_mcvae.elbos.base import ELBOOptions, MonteCarloELBO
from pyro_mcvae.elbos.elbo_terms import averaged_estimate, weighted_estimate
from pyro_mcvae.elbos.estimate import Estimate
from pyro_mcvae.elbos.path_gradient import PathGradient
from pyro_mcvae.ops.checks import check_choice
from pyro_mcvae.ops.importance import leave_one_out_signal, renyi_bound
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.messengers import score_function_draws
from pyro_mcvae.programs.types import Site
from pyro_mcvae.structure.finder import StructureFinder

GradientEstimator = Literal["auto", "reparam", "stl", "dreg", "vimco"]


class TraceIWAE_ELBO(MonteCarloELBO):
    r"""
    The importance weighted bound of Burda et al. [1], one weight per datum:

    .. math::
        L = \log p(\theta) - \log q(\theta)
            + \frac{N}{B} \sum_n \log \frac{1}{K} \sum_{k=1}^K
              \frac{p(x_n, z_{nk} \mid \theta)}{q(z_{nk} \mid x_n)}, \qquad
        z_{nk} \sim q(z \mid x_n).

    It is a lower bound on the log evidence for every K and minibatch size, rises with K, and is
    the ELBO for K = 1. It replaces ``RenyiELBO(alpha=0)``, which multiplies N/B into the weights,
    gives discrete guides no gradient, and draws a minibatch per particle; for another alpha there
    is :class:`TraceRenyi_ELBO`.

    * *Local* latents, inside the plates that all of them share, are drawn K times and weighed per
      element of these plates. *Global* latents :math:`\theta`, outside of every plate, are drawn
      once per step and enter as in the plain ELBO. A program without plated latents has one
      weight, over all its latents.
    * The scale N/B of subsampled plates stays outside of the logarithm. Where it cannot (the
      latents lie outside of a subsampled plate, as in Bayesian regression on minibatches), no
      importance weighted bound exists, and the latents' K draws are averaged as in the plain
      ELBO; a log message says so.
    * ``poutine.scale`` and ``poutine.mask`` act inside of the weights: a scale tempers the bound
      (as for KL annealing), it does not multiply it. To multiply the loss, multiply the loss.
    * What depends on which latent is found out by running the programs, once for each structure
      that they show. A local latent that steers Python (``if z > 0``, ``z.item()``) counts as
      one on which everything depends. ``bounds(...).plates`` names the plates of the weights.

    **Gradient estimators** have the same value and, for the model, the same gradient. For the
    guide's reparameterized sites:

    ``"reparam"``
        the bound's own gradient, through the draws and the densities.
    ``"stl"``
        drops the gradient of log q with respect to its own parameters (*sticking the landing*
        [2]): less noise near the optimum, but biased for K > 1.
    ``"dreg"``
        doubly reparameterized [3]: unbiased, with a signal-to-noise ratio that grows with K where
        that of ``"reparam"`` falls [4].
    ``"auto"`` (default)
        the mixture of ``"reparam"`` and ``"dreg"`` with the least noise, as measured in the step on
        other draws, which leaves it unbiased: nearly ``"dreg"`` where the guide is about right, and
        nearly ``"reparam"`` where it is much narrower than the posterior, as AutoGuides begin.
        ``"reparam"`` for K = 1, where it is exactly the gradient of the ELBO, for one weight over
        everything with fewer than 6 particles, and for flows with parameters of their own and other
        classes with their own ``log_prob``, a density that ``"dreg"`` has to evaluate once more.

    ``"stl"`` and ``"dreg"`` act on the sites whose distribution does not depend on another
    reparameterized draw of the guide; sites further down a structured guide use ``"reparam"``, and
    so do distributions that mask themselves (``dist.mask``; ``poutine.mask`` is taken account of),
    and those whose support has learned ends (``Uniform(low, high)``), of which no score function
    is right.
    Local sites that cannot be reparameterized always use VIMCO [5], a score function with a
    leave-one-out baseline per datum (for K = 1, Pyro's plate-wise score function);
    ``"vimco"`` uses it for all local sites.

    :param int num_particles: K, the draws inside of the logarithm.
    :param str gradient_estimator: one of the above.
    :param bool joint: one weight over everything, global latents drawn K times as well; without
        subsampled plates only. On small full data with global latents it is a tighter bound.
    :param options: ``max_plate_nesting``, ``vectorize_particles``, ``strict_enumeration_warning``
        and ``retain_graph``, as in Pyro; see :class:`MonteCarloELBO`.
    :raises ValueError: if ``num_particles`` is not an int of at least 1, for an unknown
        estimator, for ``"vimco"`` with one particle, and for ``joint`` with a subsampled plate.

    [1] Burda, Grosse, Salakhutdinov (2016), *Importance Weighted Autoencoders*.
    [2] Roeder, Wu, Duvenaud (2017), *Sticking the Landing*.
    [3] Tucker, Lawson, Gu, Maddison (2019), *Doubly Reparameterized Gradient Estimators for Monte
    Carlo Objectives*.
    [4] Rainforth et al. (2018), *Tighter Variational Bounds are Not Necessarily Better*.
    [5] Mnih, Rezende (2016), *Variational Inference for Monte Carlo Objectives*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
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
        >>> bool(abs(elbo.loss(model, guide, x) + log_evidence) < 0.2)
        True
    """

    # The order of the Rényi bound that this one is; another in a subclass.
    alpha: float = 0.0
    _also_fixed = frozenset({"alpha"})

    def __init__(
        self,
        num_particles: int = 2,
        gradient_estimator: GradientEstimator = "auto",
        joint: bool = False,
        **options: Unpack[ELBOOptions],
    ) -> None:
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
        bound = renyi_bound(sample.log_weight.detach(), self.alpha)
        surrogate = self._surrogate(sample) if torch.is_grad_enabled() else bound
        return weighted_estimate(sample, bound, surrogate)

    def _sample(self, programs: Programs) -> WeightedParticles:
        if self.gradient_estimator != "vimco":
            return self.sampler.sample(programs)
        return self.sampler.sample(programs, lambda rows, shared: score_function_draws(shared))

    def _surrogate(self, sample: WeightedParticles) -> Tensor:
        """Per datum, a tensor whose gradient estimates that of the bound: ``[*plates]``."""
        surrogate = self._path.surrogate(sample)
        if sample.has_local_scores:
            score = sample.local_sum(lambda t, i: t.score)
            order = 1 - self.alpha
            signal = leave_one_out_signal(order * sample.log_weight) / order
            surrogate = surrogate + (signal * score).sum(0)
        return surrogate
