"""The variational Rényi bound of any order, per datum, for any Pyro program."""

from __future__ import annotations

import math

from typing_extensions import Unpack

from pyro_mcvae.elbos.base import ELBOOptions
from pyro_mcvae.elbos.iwae import GradientEstimator, TraceIWAE_ELBO


class TraceRenyi_ELBO(TraceIWAE_ELBO):
    r"""
    The variational Rényi bound of order alpha of Li and Turner [1], one weight per datum:

    .. math::
        L_\alpha = \log p(\theta) - \log q(\theta)
            + \frac{N}{B} \sum_n \frac{1}{1 - \alpha} \log \frac{1}{K} \sum_{k=1}^K \Big(
              \frac{p(x_n, z_{nk} \mid \theta)}{q(z_{nk} \mid x_n)} \Big)^{1 - \alpha}, \qquad
        z_{nk} \sim q(z \mid x_n).

    For alpha from 0 to 1 it lies between the importance weighted bound and the ELBO, and is a lower
    bound on the log evidence for every K. A larger alpha seeks a mode more, a smaller one covers
    more; a negative one tends to an upper bound as K grows, and is no bound for a finite K.

    Plates, minibatches, global latents, scales and masks are treated as in
    :class:`TraceIWAE_ELBO`, which it is for ``alpha=0``; so are the gradient estimators, with
    :math:`w_k^{1 - \alpha}` in the place of :math:`w_k` in normalised weights, and ``"dreg"`` and
    VIMCO as they follow for the order alpha. It replaces ``RenyiELBO(alpha)``, which multiplies N/B
    into the weights.

    :param float alpha: the order, other than 1.
    :param int num_particles: K, the draws inside of the logarithm.
    :param str gradient_estimator: as in :class:`TraceIWAE_ELBO`.
    :param bool joint: one weight over everything, as in :class:`TraceIWAE_ELBO`.
    :param options: Pyro's own; see :class:`MonteCarloELBO`.
    :raises ValueError: for an alpha that is 1 or not finite, and as :class:`TraceIWAE_ELBO`.

    [1] Li, Turner (2016), *Rényi Divergence Variational Inference*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
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
        >>> bool(abs(elbo.loss(model, guide, x) + log_evidence) < 1e-4)
        True
    """

    def __init__(
        self,
        alpha: float = 0.0,
        num_particles: int = 2,
        gradient_estimator: GradientEstimator = "auto",
        joint: bool = False,
        **options: Unpack[ELBOOptions],
    ) -> None:
        alpha = float(alpha)
        if alpha == 1 or not math.isfinite(alpha):
            raise ValueError(
                f"alpha must be a finite number other than 1, got {alpha}: the bound of order 1 is "
                f"the ELBO, TraceSGVB_ELBO(num_particles={num_particles})"
            )
        self.alpha = alpha
        super().__init__(num_particles, gradient_estimator, joint, **options)
