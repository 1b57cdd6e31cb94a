"""The evidence of models with few latent dimensions, from posterior draws alone."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_mcvae.chains.hmc import HMC
from pyro_mcvae.chains.kernel import Kernel, Target
from pyro_mcvae.chains.step_size import AdaptiveStepSize
from pyro_mcvae.coordinates.chain_checks import named
from pyro_mcvae.coordinates.chain_density import ChainDensity
from pyro_mcvae.coordinates.gradient import GradientMode
from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.evaluation.importance_sampler import ImportanceSampler
from pyro_mcvae.evaluation.labellings import find_labellings
from pyro_mcvae.evaluation.options import Options, judge
from pyro_mcvae.evaluation.weights_of import importance_sampler
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.ops.importance import effective_sample_size, log_mean_exp
from pyro_mcvae.ops.kernel_density import KernelDensity
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.precision import without_autocast

__all__ = ["LowDimensionalEvidence", "low_dimensional_evidence"]

_logger = logging.getLogger(__name__)

_LARGEST = 4
# Draws at which the guide's labellings are compared.
_DRAWS_OF_THE_GUIDE = 200


@dataclass(frozen=True)
class LowDimensionalEvidence:
    r"""
    Estimates of :math:`\log p(x_n)` from posterior draws, one per datum.

    Made by :func:`low_dimensional_evidence`, whose example shows one.

    :ivar log_evidence: shape ``[*plates]``; ``[elements]`` for programs with several separate
        plates, and a scalar where all data share one weight.
    :ivar standard_error: of ``log_evidence``, from the spread between the chains.
    :ivar effective_sample_size: Kish's, of the terms that are averaged: few say that the fitted
        density has mass where the posterior has hardly any.
    :ivar r_hat: of log p(x, z) between and within the chains; above 1.1 they have not yet reached
        the posterior, and the estimate is not to be relied upon.
    :ivar acceptance: the mean acceptance of the chains.
    :ivar step_size: of the kernel, after its adaptation.
    :ivar plates: the names of the plates, leftmost dimension first.
    :ivar scale: N/B of subsampled plates, a number or a tensor.
    :ivar shared: the log density of observations outside of the data's plates.
    :ivar given: latents that were held: point masses of the guide, and, with ``joint=False``,
        global latents.
    """

    log_evidence: Tensor
    standard_error: Tensor
    effective_sample_size: Tensor
    r_hat: Tensor
    acceptance: Tensor
    step_size: Tensor
    plates: tuple[str, ...]
    scale: float | Tensor
    shared: Tensor
    given: tuple[str, ...]

    @property
    def total(self) -> Tensor:
        """The log evidence of all data, in nats; N/B times the minibatch's, where subsampled."""
        return self.shared.to(self.log_evidence) + (self.scale * self.log_evidence).sum()

    @property
    def total_standard_error(self) -> Tensor:
        """The Monte Carlo error of ``total``."""
        return (self.scale * self.standard_error).square().sum().sqrt()


@judge(without=("num_particles", "schedule", "coordinates", "warmup", "chunk_size"))
def low_dimensional_evidence(
    programs: Programs,
    options: Options,
    *,
    num_chains: int = 20,
    num_draws: int = 50,
    num_transitions: int = 100,
) -> LowDimensionalEvidence:
    r"""
    The marginal likelihood estimator of Kingma and Welling [1, appendix D].

    For any normalised density f and draws from the posterior

    .. math::
        \frac{1}{p(x_n)} = E_{p(z \mid x_n)} \frac{f(z)}{p(x_n, z)},
        \qquad \log p(x_n) \approx
            -\log \frac{1}{L} \sum_{l=1}^L \frac{f(z_l)}{p(x_n, z_l)},

    the better the closer f is to the posterior (f the prior would be the notorious harmonic mean).
    Chains of :class:`HMC`, from the guide's draws, give posterior draws of each datum; to those of
    one half of the chains f is fitted, a :class:`~pyro_mcvae.ops.kernel_density.KernelDensity`,
    which follows posteriors of several modes; those of the other half, fresh ones, are averaged.
    The chains are independent, so that their spread gives the standard error. The error of the
    logarithm of a mean biases the estimate upwards, by about half of its squared standard error.

    It needs no good guide: this is where chains begin, in its noise, and what scales their
    coordinates. It works for fewer than 5 latent dimensions per datum. For more, and for
    discrete latents, use annealed importance sampling, whose estimates are bounds in expectation.

    Nothing is trained, and kernels are copied. The step size adapts before the first draw,
    unless it is fixed, and is then frozen; every move of HMC takes 0.7 to 1 times of it, lest
    trajectories of one length return to where they began.

    :param model: a Pyro model.
    :param guide: its guide.
    :param args: their arguments; keyword arguments likewise, see ``model_kwargs``.
    :param int num_chains: independent chains per datum, half of which fit f; at least 4.
    :param int num_draws: draws of each chain, one after each transition.
    :param int num_transitions: transitions before the first draw.
    :param Kernel kernel: an adjusted one; ``HMC`` with 4 leapfrog steps, as in [1], adapting to an
        acceptance of 0.9, by default.
    :param joint: one evidence of all data, with global latents among the few dimensions; None if
        the guide draws global ones. False draws these once, for the evidence given them.
    {options}
    :returns: a :class:`LowDimensionalEvidence`.
    :raises ValueError: for 5 dimensions or more, discrete latents, latents outside of a subsampled
        plate, unadjusted kernels and counts that are too small.

    [1] Kingma, Welling (2014), *Auto-Encoding Variational Bayes*.
    [2] Gelfand, Dey (1994), *Bayesian Model Choice: Asymptotics and Exact Calculations*.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def prior(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(0.0, 1.0))
        >>> x = torch.tensor([-1.0, 0.0, 3.0])
        >>> found = low_dimensional_evidence(model, prior, x)
        >>> exact = dist.Normal(0.0, 2**0.5).log_prob(x)
        >>> bool(((found.log_evidence - exact).abs() < 4 * found.standard_error).all())
        True
    """
    num_chains = check_count("num_chains", num_chains, 4)
    num_draws = check_count("num_draws", num_draws, 1)
    num_transitions = check_count("num_transitions", num_transitions, 0)
    with torch.inference_mode(False):  # a step size that adapts is changed in place
        kernel = _prepared(options.kernel)
    with importance_sampler(programs, options) as sampler:
        sampler.progress.expect(num_transitions + num_draws)
        chains = _Chains(sampler, kernel, num_chains)
        chains.move(num_transitions, adapt=True)
        kernel.eval()
        return _estimate(sampler, chains, *chains.move(num_draws))


class _Chains:
    """The chains of one minibatch, in its posterior."""

    def __init__(self, sampler: ImportanceSampler, kernel: Kernel, num_chains: int) -> None:
        self._kernel, self._progress = kernel, sampler.progress
        gradient = GradientMode.of_kernel(kernel.needs_gradient)
        with torch.set_grad_enabled(bool(gradient)):
            log_weight = sampler.log_weight(num_chains, gradient=gradient)
        _check_latents(log_weight)
        density = self.density = ChainDensity(log_weight)
        self._state = density.start()
        sampler.check(self._state.log_weight, density.runs)
        self.valid = log_weight.valid
        self._target = Target(density, log_weight.first.log_weight.new_ones(()), self.valid)
        self._moves = self.valid.any(-1).to(self.valid)
        self.acceptance = self._target.beta

    def move(self, count: int, adapt: bool = False) -> tuple[Tensor, Tensor]:
        """
        So many transitions.

        :returns: positions, ``[count, K, *plates, D]``, and log p(x, z), ``[count, K, *plates]``;
            the present ones while adapting.
        """
        positions, log_joints, rates = [], [], []
        for _ in range(count):
            self._state, info = self._kernel.step(self._state, self._target)
            self._progress.step()
            rates.append((info.acceptance * self._moves).sum() / self._moves.sum())
            if adapt:
                self._kernel.step_size.update(rates[-1])
            else:
                positions.append(self._state.position)
                log_joints.append(self._target.log_density(self._state))
        if adapt:
            return self._state.position, self._target.log_density(self._state)
        self.acceptance = torch.stack(rates).mean()
        return torch.stack(positions), torch.stack(log_joints)

    @property
    def step_size(self) -> Tensor:
        return self._kernel.step_size().detach().clone()


def _estimate(
    sampler: ImportanceSampler, chains: _Chains, positions: Tensor, log_joints: Tensor
) -> LowDimensionalEvidence:
    count, num_chains = positions.shape[:2]
    half = num_chains // 2
    rest = num_chains - half
    with without_autocast():
        fitted = KernelDensity(positions[:, :half].flatten(0, 1), chains.valid[0])
        log_f = fitted.log_prob(positions[:, half:].flatten(0, 1))
    log_ratio = log_f.reshape(count, rest, *log_f.shape[1:]) - log_joints[:, half:]
    by_chain = log_mean_exp(log_ratio)
    log_mean = log_mean_exp(by_chain)
    error = (by_chain - log_mean).exp().std(0) / rest**0.5
    r_hat = _r_hat(log_joints)
    if bool((r_hat > 1.1).any()):
        _logger.warning(
            "the chains of %d of %d data have not reached the posterior (r_hat up to %.2f): take "
            "more num_transitions, another kernel or a better guide",
            int((r_hat > 1.1).sum()),
            r_hat.numel(),
            float(r_hat.max()),
        )
    ends = chains.density.log_weight(positions[-1].detach()).sample
    labellings = find_labellings(sampler, _DRAWS_OF_THE_GUIDE, ends)
    if labellings is not None and labellings.added is not None:
        # The chains and the density that is fitted to them are of one labelling.
        log_mean = log_mean - labellings.added.to(log_mean)
    return LowDimensionalEvidence(
        -log_mean,
        error,
        effective_sample_size(log_ratio.flatten(0, 1)),
        r_hat,
        chains.acceptance,
        chains.step_size,
        sampler.reference.plate_names,
        sampler.reference.scale,
        sampler.shared(),
        sampler.given,
    )


def _r_hat(values: Tensor) -> Tensor:
    """Gelman and Rubin's, for draws of shape ``[draws, chains, *plates]``."""
    count = len(values)
    if count < 2:
        return torch.ones_like(values[0, 0])
    within = values.var(0).mean(0)
    between = values.mean(0).var(0)
    found = ((count - 1) / count + between / within).sqrt()
    # A constant density, as under a flat posterior, has nothing to compare.
    return torch.where(within > 0, found, 1.0)


def _prepared(kernel: Kernel | None) -> Kernel:
    """A copy of the kernel, of which nothing that it learns comes back."""
    if kernel is None:
        kernel = HMC(AdaptiveStepSize(target_acceptance=0.9), num_leapfrog=4)
    if not isinstance(kernel, Kernel) or not kernel.adjusted:
        raise ValueError(
            f"the chains need a kernel that leaves the posterior invariant, such as HMC(), MALA() "
            f"or RandomWalk(), got {kernel!r}"
        )
    kernel = copy.deepcopy(kernel).train()
    if isinstance(kernel, HMC):
        kernel.jitter = max(kernel.jitter, 0.3)
    if isinstance(kernel.step_size, AdaptiveStepSize):
        kernel.step_size.per_coordinate = False  # noise is whitened
    return kernel


def _check_latents(log_weight: LogWeight) -> None:
    if log_weight.plan.discrete:
        raise ValueError(
            f"posterior draws are made along gradients, but the guide's site"
            f"{named(log_weight.plan.discrete)} discrete: use log_evidence, or marginalise them in "
            f"the model"
        )
    dims = int(log_weight.valid.sum(-1).max())
    if dims > _LARGEST:
        raise ValueError(
            f"a density fitted to draws is reliable in at most {_LARGEST} latent dimensions per "
            f"weight (of a datum; of all data where the guide draws global latents), but the guide "
            f"draws {dims}: use log_evidence with a schedule"
        )
