"""The estimator of the marginal likelihood of Kingma and Welling (2014), for few latents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyro_mcvae.chains.kernels import HMC, Target
from pyro_mcvae.chains.parameters import AdaptiveStepSize
from pyro_mcvae.evaluation.options import (
    Counted,
    EvaluatorOptions,
    make_options,
    make_programs,
    with_options,
)
from pyro_mcvae.evaluation.weights import weights_of
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.programs.types import Program

# Kernel density estimates need a number of draws that grows exponentially with the dimension.
_MOST = 5


class LowDimensionalEvidence(NamedTuple):
    """
    The result of :func:`.low_dimensional_evidence`.

    :ivar log_evidence: the estimate of log p(x_n) in nats, shape ``[*plates]``.
    :ivar standard_error: its standard error for independent draws, in nats, shape ``[*plates]``. It
        is too small if few draws reach the tails of f, where the ratio is large.
    """

    log_evidence: Tensor
    standard_error: Tensor


@with_options(schedule=1)
def low_dimensional_evidence(
    model: Program,
    guide: Program,
    *args: object,
    num_draws: int = 50,
    num_transitions: int = 60,
    model_kwargs: Mapping[str, object] | None = None,
    **options: Unpack[EvaluatorOptions],
) -> LowDimensionalEvidence:
    r"""
    Estimate log p(x) of each datum from draws of its posterior, for up to five latent dimensions
    [1, appendix D].

    .. math::
        \frac{1}{p(x)} = E_{p(z \mid x)}\Big[ \frac{f(z)}{p(x, z)} \Big]
            \approx \frac{1}{L} \sum_{l=1}^L \frac{f(z_l)}{p(x, z_l)}

    for any density f. 2 L chains of Hamiltonian Monte Carlo start from draws of the guide. The
    last positions of the first half determine f, a kernel density estimate, and those of the second
    half are the :math:`z_l`. The coordinates are those of the guide's noise, so latents may have
    any continuous support.

    The estimate of 1/p(x) is unbiased if the chains have reached the posterior. The estimate of
    log p(x) is then too high in expectation, while that of :func:`log_evidence` is too low. Modes
    that no chain reaches remain undetected. Use :func:`log_evidence` for anything but a comparison
    with the paper: its weights are unbiased for any chain, and it has a diagnostic.

    :param model: a Pyro model.
    :param guide: its guide.
    :param args: their arguments.
    :param int num_draws: L.
    :param int num_transitions: the number of transitions of each chain before its draw.
    :param model_kwargs: as in :func:`log_evidence`.
    :param options: as in :func:`log_evidence`. ``kernel`` is by default :class:`HMC` with 4
        leapfrog steps and an acceptance of 0.9, as in the paper.
    :returns: a :class:`.LowDimensionalEvidence`.
    :raises ValueError: for more than five dimensions, unadjusted kernels, discrete or masked
        latents, and as :func:`log_evidence`.

    [1] Kingma, Welling (2014), *Auto-Encoding Variational Bayes*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import low_dimensional_evidence
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 0.8))
        >>> x = torch.tensor([-1.0, 0.0, 1.0])
        >>> result = low_dimensional_evidence(model, guide, x, num_draws=200, seed=0)
        >>> exact = dist.Normal(0.0, 2**0.5).log_prob(x)
        >>> print(result.log_evidence.numpy().round(1), exact.numpy().round(1))
        [-1.5 -1.2 -1.5] [-1.5 -1.3 -1.5]
    """
    defaults: dict[str, Any] = {"schedule": 1}
    if options.get("kernel") is None:
        step_size = AdaptiveStepSize(target_acceptance=0.9)
        options["kernel"] = HMC(step_size, num_leapfrog=4, jitter=0.3)
    settings = make_options("low_dimensional_evidence", options, **defaults)
    programs = make_programs(model, guide, args, model_kwargs)
    num_draws = check_count("num_draws", num_draws, 2)
    num_transitions = check_count("num_transitions", num_transitions)
    annealing = settings.annealing()
    assert annealing is not None
    if not annealing.kernel.adjusted:
        raise ValueError(
            f"low_dimensional_evidence needs a kernel that leaves the posterior invariant, which "
            f"{type(annealing.kernel).__name__} does not: use HMC, MALA or RandomWalk"
        )
    with weights_of(programs, settings, annealing, "low_dimensional_evidence") as sampler:
        sampler.start_chains("chains", annealing.num_steps + num_transitions)
        chain, density = sampler.chain(2 * num_draws, last_transition=True)
        movable = density.log_weight.movable
        if movable is not None and not bool(movable.all()):
            raise ValueError(
                "low_dimensional_evidence needs data with the same latents, but some latents are "
                "masked: use log_evidence"
            )
        dim = chain.state.position.shape[-1]
        if dim > _MOST:
            raise ValueError(
                f"low_dimensional_evidence estimates a density of {dim} latent dimensions from "
                f"draws, which is possible for at most {_MOST}: use log_evidence"
            )
        target = Target(density, chain.state.position.new_ones(()))
        state = density(chain.state.position)
        transition = Counted(annealing.transition(programs, num_transitions), sampler.stage)
        for _ in range(num_transitions):
            state, _ = transition.step(state, target)
        log_joint = (state.log_base + state.log_weight)[num_draws:].detach()
        position = state.position.detach()
    log_ratio = kernel_density(position[:num_draws], position[num_draws:]) - log_joint
    mean = log_ratio.logsumexp(0) - math.log(num_draws)
    error = (log_ratio - mean).exp().std(0) / num_draws**0.5
    return LowDimensionalEvidence(-mean, error)


def kernel_density(draws: Tensor, at: Tensor) -> Tensor:
    r"""
    Return the log of a Gaussian kernel density estimate, with Silverman's widths.

    .. math:: f(z) = \frac{1}{L} \sum_l \prod_d N(z_d;\, z_{ld},\, h_d^2), \qquad
        h_d = s_d \Big( \frac{4}{(D + 2) L} \Big)^{1 / (D + 4)}

    :param draws: shape ``[L, *plates, D]``. s is their standard deviation.
    :param at: shape ``[M, *plates, D]``.
    :returns: shape ``[M, *plates]``.

    Example::

        >>> log_density = kernel_density(torch.randn(500, 1), torch.zeros(1, 1))
        >>> bool((log_density.exp() - 0.399).abs() < 0.08)
        True
    """
    count, dim = len(draws), draws.shape[-1]
    width = draws.std(0) * (4 / ((dim + 2) * count)) ** (1 / (dim + 4))
    width = width.clamp_min(torch.finfo(width.dtype).tiny)
    distance = ((at.unsqueeze(1) - draws) / width).square().sum(-1)
    log_kernel = -0.5 * distance - width.log().sum(-1) - 0.5 * dim * math.log(2 * math.pi)
    return log_kernel.logsumexp(1) - math.log(count)
