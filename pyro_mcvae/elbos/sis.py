"""The annealed Langevin bound (L-MCVAE) for any Pyro program."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from pyro_mcvae.chains.annealing import Chain
from pyro_mcvae.chains.kernel import Kernel
from pyro_mcvae.chains.langevin import ULA
from pyro_mcvae.chains.schedules import Schedule
from pyro_mcvae.chains.underdamped import UnderdampedLangevin
from pyro_mcvae.elbos.chain import ChainELBO, ChainOptions
from pyro_mcvae.elbos.defensive import defended, defensive_share


class TraceSIS_ELBO(ChainELBO):
    r"""
    Sequential importance sampling with unadjusted Langevin moves: L-MCVAE of Thin et al. [1].

    The guide's draw :math:`z_0` is moved K times along
    :math:`\log \gamma_\beta = (1 - \beta) \log q(z \mid x) + \beta \log p(x, z)` towards the
    posterior, and weighed by what the moves did:

    .. math::
        W = -\log q(z_0 \mid x) + \sum_{k=1}^K
              \log \frac{m_k(z_k \to z_{k-1})}{m_k(z_{k-1} \to z_k)} + \log p(x, z_K),
        \qquad L = E[W] \le \log p(x),

    where :math:`m_k` moves with respect to :math:`\gamma_{\beta_k}`. :math:`E[\exp W] = p(x)` for
    any kernel, step size and schedule, so L is a lower bound, per datum, with N/B outside of it
    and global latents around it as in :class:`TraceIWAE_ELBO`. Everything is reparameterized: one
    backward pass differentiates the whole chain, gradients of the model included.

    * **Cost**: K + 1 evaluations of the model with its gradient; the guide is run once where its
      sites do not depend on each other, and with the model otherwise.
    * **Coordinates**: chains move the noise :math:`\epsilon` of the guide's draws
      :math:`z = T(\epsilon)` by default, with
      :math:`\log \gamma_\beta(\epsilon) = \log \text{base}(\epsilon) + \beta \log w(T(\epsilon))`.
      The guide has whitened it, so that one step size serves all, and any support, AutoGuide or
      flow is treated alike. ``"latent"`` moves the latents (unconstrained ones, where their
      support is constrained), as the paper does. Sites whose noise is not explicit (Gamma, Beta,
      Dirichlet) move as unconstrained latents in either case.
    * **Transitions**: each has a step size and a momentum of its own
      (:meth:`UnderdampedLangevin.trained`), which train with the bound, as the schedule does: they
      are parameters of the objective, in Pyro's store under SVI and in ``elbo(model,
      guide).parameters()``. Step sizes start small and adapt for 100 training steps before they
      learn; where no optimizer takes them, they go on adapting. ``eval()`` freezes what adapts.
      With a kernel that is given the schedule is linear and nothing defends the weights, unless
      these are given too: ``kernel=ULA()`` is the paper's.
    * **Lost chains**: nothing rejects an unadjusted step that is too long, and its weight and
      gradient may be of any size, which ruins a model that has just begun to train. So each weight
      is a defensive mixture [2] with that of the chain's beginning, a plain importance weight,

      .. math:: W' = \log\big((1 - \alpha)\, e^W + \alpha\, w(z_0)\big),
          \qquad E[e^{W'}] = p(x),

      with :math:`\alpha` = ``defensive``, 0.01 by default: a lost chain counts as its first draw,
      with the gradient of that, and a good one pays 0.01 nats.
    * Coordinates that a mask takes out of the guide do not move.
    * **Discrete sites** of the guide are held. Each slot of their values has its own chain, and

      .. math:: L = \sum_y q(y) E[W_y], \qquad
          W_y = \log \frac{\gamma_1(z_K, y)}{\gamma_0(z_0, y)}
              + \sum_k \log \frac{m_k(z_k \to z_{k-1})}{m_k(z_{k-1} \to z_k)},

      with :math:`\gamma_0 = q(z, y)`, sums over the most probable ones and samples the rest, as
      :class:`TraceRaoBlackwell_ELBO` does; its gradient has the score functions of q(y).

    The gradient differentiates :math:`\nabla \log p`, along which the chain moves, once more.
    Where that jumps, as through ReLU, autograd's second derivative leaves the jumps out, and the
    gradient of L would be biased. ``gradient_estimator="auto"`` finds such operations, names them
    in a log line, and smooths them where they move the chain, and nowhere else: there
    :math:`\max(d, 0)` has the derivative :math:`\text{sigmoid}(d / \tau)`, where :math:`\tau` is a
    fifth of the spread of d. Chains may move along any function of their position, so
    :math:`E[\exp W] = p(x)` still holds, and the gradient is that of L. ``"full"`` smooths nothing.
    Jumps that cannot be smoothed (``torch.where``, sorting, max pooling, functions of one's own)
    are named as well.

    ``gradient_estimator="reweighted"`` runs the chain without a graph: about half the cost, and
    memory that does not grow with K, also for models without double backward. The
    model's parameters follow :math:`\sum_i \tilde w_i \nabla \log p(x, z_K^i)` with normalised
    weights of the chains' ends, the guide's follow the plain ELBO. It is biased for finitely many
    particles (it is not the gradient of L, which is still the value reported), as reweighted
    wake-sleep is.

    :param int num_steps: K; 5 if neither it nor a schedule is given.
    :param Kernel kernel: an unadjusted one, :class:`UnderdampedLangevin` (trained transitions by
        default; :class:`ULA` with the ``"reweighted"`` gradient, which trains none), :class:`ULA`,
        or one's own.
    :param schedule: a :class:`~pyro_mcvae.Schedule` or a tensor from 0 to 1; by default
        :class:`LearnedSchedule`, or :class:`LinearSchedule` where a kernel is given or nothing
        trains.
    :param int num_particles: independent chains, whose W are averaged.
    :param bool multi_sample: average :math:`\exp W` inside of the logarithm instead, which is
        tighter for several particles.
    :param float defensive: :math:`\alpha`, from 0 to below 1; 0.01 by default, and 0 where a kernel
        is given, or ``"reweighted"``.
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
        an adjusted kernel, counts out of range; at the first step for programs in which no
        latent can be weighed by itself, and for discrete sites that cannot have slots.
    :raises RuntimeError: from ``loss_and_grads``, if the model cannot be differentiated twice.

    [1] Thin, Kotelevskii, Doucet, Durmus, Moulines, Panov (2021), *Monte Carlo Variational
    Auto-Encoders*.
    [2] Hesterberg (1995), *Weighted Average Importance Sampling and Defensive Mixture
    Distributions*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     slope = pyro.param("slope", torch.tensor(0.1))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(slope * x, 0.7))
        >>> elbo = TraceSIS_ELBO(num_steps=5)
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=elbo)
        >>> losses = [svi.step(torch.tensor([-2.0, 0.0, 2.0])) for _ in range(100)]
        >>> bool(abs(pyro.param("slope") - 0.5) < 0.2)
        True
        >>> elbo.last_step.acceptance.shape
        torch.Size([5])
    """

    _adjusted = False

    def __init__(
        self,
        num_steps: int | None = None,
        kernel: Kernel | None = None,
        schedule: Schedule | Tensor | None = None,
        num_particles: int = 1,
        multi_sample: bool = False,
        defensive: float | None = None,
        **options: Unpack[ChainOptions],
    ) -> None:
        super().__init__(num_steps, kernel, schedule, num_particles, multi_sample, **options)
        reweighted = self.gradient_estimator == "reweighted"
        self.defensive = defensive_share(defensive, kernel is None and not reweighted, reweighted)

    def _log_weight(self, chain: Chain) -> Tensor:
        return defended(chain, self.defensive) if self.defensive else chain.log_weight

    def _default_kernel(self, trained: bool) -> Kernel:
        return UnderdampedLangevin.trained(self.num_steps) if trained else ULA()

    def _wrong_kernel(self, name: str) -> str:
        return (
            f"TraceSIS_ELBO weighs every move by its density, which the rejections of {name} do "
            f"not have: use ULA or UnderdampedLangevin, or TraceAIS_ELBO for {name}"
        )
