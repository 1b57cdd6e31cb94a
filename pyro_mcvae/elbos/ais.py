"""The annealed importance sampling bound (A-MCVAE) for any Pyro program."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from pyro_mcvae.chains.hmc import HMC
from pyro_mcvae.chains.kernel import Kernel
from pyro_mcvae.chains.schedules import Schedule
from pyro_mcvae.elbos.chain import ChainELBO, ChainOptions


class TraceAIS_ELBO(ChainELBO):
    r"""
    Annealed importance sampling with Metropolis-adjusted moves: A-MCVAE of Thin et al. [1].

    The guide's draw :math:`z_0` is moved along
    :math:`\log \gamma_\beta = (1 - \beta) \log q(z \mid x) + \beta \log p(x, z)` by kernels that
    leave :math:`\gamma_{\beta_k}` invariant, and

    .. math::
        W = \sum_{k=1}^K (\beta_k - \beta_{k-1}) \log \frac{p(x, z_{k-1})}{q(z_{k-1} \mid x)},
        \qquad L = E[W] \le \log p(x),

    per datum: each datum's moves are accepted and weighed by themselves, N/B and global latents
    stay outside as in :class:`TraceIWAE_ELBO`. Gradients pass through the draws, the moves and the
    densities; the accept bits :math:`a_k` are not reparameterized and add the score-function term

    .. math::
        \sum_k (R_k - b_k)\, \nabla \log \Pr(a_k), \qquad
        R_k = \sum_{j > k} (\beta_{j+1} - \beta_j) \log w(z_j),

    with the mean of the other particles' :math:`R_k` as the baseline :math:`b_k`. It differs from
    the paper's estimator (the whole W as signal) in :math:`R_k`, what comes after the decision,
    and in leaving out the last move, on which W does not depend: the same expectation, with less
    noise the more moves are rejected. W needs 2K - 1 evaluations of the model with its gradient
    (K with :class:`MALA`, one less than :class:`TraceSIS_ELBO`).

    A move is two leapfrog steps of :class:`HMC` by default, along a schedule that is learned with
    the bound. One move in 33 is rejected whatever it is, which bounds the score of a rejection.
    The step size starts small and adapts after each training step; ``eval()`` freezes it.
    ``kernel=MALA()`` is the paper's, with a linear schedule unless it is given too.

    Coordinates, masks, discrete sites, kinks of the model such as those of ReLU, and the
    ``"reweighted"`` gradient (which makes the last move too, and takes one particle) are those of
    :class:`TraceSIS_ELBO`.

    :param int num_steps: K; 5 if neither it nor a schedule is given.
    :param Kernel kernel: an adjusted one, :class:`HMC` (two leapfrog steps by default),
        :class:`MALA` or :class:`RandomWalk`, or one's own.
    :param schedule: a :class:`~pyro_mcvae.Schedule` or a tensor from 0 to 1; by default
        :class:`LearnedSchedule`, or :class:`LinearSchedule` where a kernel is given or with the
        ``"reweighted"`` gradient.
    :param int num_particles: independent chains, whose W are averaged; at least 2 for the
        baseline, unless K is 1.
    :param bool multi_sample: average :math:`\exp W` inside of the logarithm instead, which is
        tighter for several particles; the signal is then VIMCO's.
    :param str coordinates: ``"noise"`` or ``"latent"``.
    :param str gradient_estimator: ``"auto"``, ``"full"`` or ``"reweighted"``.
    :param bool joint: move and weigh global latents together with local ones, one weight over
        everything; without subsampled plates only.
    :param num_categories: the most probable values of each discrete site of the guide, to be
        summed; 1 by default, ``math.inf`` for all.
    :param int num_samples: draws from the others; 1 by default.
    :param budget: instead of both, as of :class:`~pyro_mcvae.TraceRaoBlackwell_ELBO`.
    :param baseline: a :class:`~pyro_mcvae.Baseline` of the discrete sites, or None.
    :param options: ``max_plate_nesting``, ``vectorize_particles``, ``strict_enumeration_warning``
        and ``retain_graph``, as in Pyro; see :class:`~pyro_mcvae.elbos.base.MonteCarloELBO`.
    :ivar last_step: acceptance, step size and log weights of the last step, a
        :class:`~pyro_mcvae.elbos.chain_record.ChainRecord`.
    :raises ValueError: for ``num_steps`` below 1, a schedule that does not increase from 0 to 1,
        an unadjusted kernel, one particle with the full gradient, counts out of range; at the first
        step for programs in which no latent can be weighed by itself, and for discrete sites that
        cannot have slots.
    :raises RuntimeError: from ``loss_and_grads``, if the model cannot be differentiated twice.

    [1] Thin, Kotelevskii, Doucet, Durmus, Moulines, Panov (2021), *Monte Carlo Variational
    Auto-Encoders*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import MALA
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(0.0, 1.0))
        >>> x = torch.tensor([-1.0, 0.0, 1.0])
        >>> exact = dist.Normal(0.0, 2**0.5).log_prob(x).sum()
        >>> elbo = TraceAIS_ELBO(20, MALA(0.3), num_particles=100)
        >>> bool(abs(elbo.loss(model, guide, x) + exact) < 0.15)
        True
    """

    _adjusted = True

    def __init__(
        self,
        num_steps: int | None = None,
        kernel: Kernel | None = None,
        schedule: Schedule | Tensor | None = None,
        num_particles: int = 2,
        multi_sample: bool = False,
        **options: Unpack[ChainOptions],
    ) -> None:
        super().__init__(num_steps, kernel, schedule, num_particles, multi_sample, **options)

    def _use_particles(self, num_particles: int) -> None:
        if num_particles < 2 and self.num_steps > 1 and self.gradient_estimator != "reweighted":
            raise ValueError(
                f"the score-function terms of TraceAIS_ELBO take the other particles as their "
                f"baseline and need num_particles >= 2, got {num_particles}; for one particle use "
                f"TraceSIS_ELBO, or gradient_estimator='reweighted'"
            )
        super()._use_particles(num_particles)

    def _default_kernel(self, trained: bool) -> Kernel:
        return HMC(num_leapfrog=2, laziness=0.03)

    def _wrong_kernel(self, name: str) -> str:
        return (
            f"TraceAIS_ELBO needs kernels that leave their target invariant, which {name} does "
            f"not: use MALA, HMC or RandomWalk, or TraceSIS_ELBO for {name}"
        )
