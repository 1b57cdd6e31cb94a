"""Langevin kernels: one gradient step with noise, unadjusted or with a Metropolis correction."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pyro_mcvae.chains.kernel import Kernel, Proposal, State, Target
from pyro_mcvae.chains.leapfrog import leapfrog, log_momentum
from pyro_mcvae.chains.step_size import StepSize

__all__ = ["MALA", "ULA", "GaussianReverse"]


class _Langevin(Kernel):
    initial_step_size = 0.01
    step_size_power = 2.0

    def propose(self, state: State, target: Target) -> Proposal:
        # One leapfrog step of length sqrt(2 eta) with a fresh momentum u is the Langevin proposal,
        # and the change of u's density is the ratio of reverse and forward densities.
        noise = target.noise(state)
        new, momentum = leapfrog(
            state, noise, target, (2.0 * self.step_size(target.transition)).sqrt()
        )
        return Proposal(new, log_momentum(momentum) - log_momentum(noise))


class ULA(_Langevin):
    r"""
    The unadjusted Langevin algorithm,

    .. math::
        z' = z + \eta \nabla \log \gamma(z) + \sqrt{2 \eta}\, u, \qquad u \sim N(0, I).

    Its stationary density is not :math:`\gamma`, so it serves :class:`~pyro_mcvae.TraceSIS_ELBO`,
    whose weights hold the densities of the move and of a reverse move: by default
    :math:`m(z' \to z) = N(z;\, z' + \eta \nabla \log \gamma(z'),\, 2 \eta)`.

    :param step_size: :math:`\eta`; see :class:`Kernel`. Adapts to an acceptance of 0.9 by default.
    :param GaussianReverse reverse: another reverse kernel, learned with the bound.
    :raises ValueError: if the step size is not positive.

    Example::

        >>> from pyro_mcvae import TraceSIS_ELBO
        >>> elbo = TraceSIS_ELBO(num_steps=5, kernel=ULA(step_size=0.1))
    """

    target_acceptance = 0.9

    def __init__(
        self,
        step_size: float | Tensor | StepSize | None = None,
        reverse: GaussianReverse | None = None,
    ) -> None:
        super().__init__(step_size)
        self.reverse = reverse

    def propose(self, state: State, target: Target) -> Proposal:
        noise = target.noise(state)
        step_size = self.step_size(target.transition)
        new, momentum = leapfrog(state, noise, target, (2.0 * step_size).sqrt())
        log_ratio = log_momentum(momentum) - log_momentum(noise)
        if self.reverse is None:
            return Proposal(new, log_ratio)
        backward = self.reverse.log_prob(state.position, new, target, step_size)
        return Proposal(new, log_ratio, backward - _log_move(noise, step_size, target))


def _log_move(noise: Tensor, step_size: Tensor, target: Target) -> Tensor:
    """
    The density of a Langevin move from its noise, shape ``[*batch]``. Of the position: unlike in
    the ratio of two moves the Jacobian does not cancel.
    """
    density = -0.5 * noise.square() - (2.0 * step_size).sqrt().log() - 0.5 * math.log(2 * math.pi)
    return (density * _ones(noise, target)).sum(-1)


class MALA(_Langevin):
    r"""
    The Metropolis-adjusted Langevin algorithm: the proposal of :class:`ULA`, accepted or rejected.

    :param step_size: :math:`\eta`; see :class:`Kernel`. Adapts to an acceptance of 0.8 by default.
    :raises ValueError: if the step size is not positive.

    Example::

        >>> from pyro_mcvae import TraceAIS_ELBO
        >>> elbo = TraceAIS_ELBO(num_steps=5, kernel=MALA(step_size=0.1))
    """

    adjusted = True


class GaussianReverse(nn.Module):
    r"""
    A learned reverse kernel for :class:`ULA`,

    .. math::
        r(z' \to z) = N\big(z;\, z' + \eta \nabla \log \gamma(z') + \mu,\; 2 \eta\, s^2\big),
        \qquad \mu, \log s = \text{network}(z', \nabla \log \gamma(z'), \beta).

    With a network that returns zeros it is the reversal that ULA uses by default.

    :param network: maps position and gradient, each of shape ``[*batch, D]``, and the inverse
        temperature, a scalar, to :math:`\mu` and :math:`\log s`, each broadcastable to
        ``[*batch, D]``. Its parameters train with the bound if it is an :class:`~torch.nn.Module`.

    Example::

        >>> class Network(torch.nn.Module):
        ...     def __init__(self, dim):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(2 * dim + 1, 2 * dim)
        ...
        ...     def forward(self, position, gradient, beta):
        ...         beta = beta.expand(position.shape[:-1] + (1,))
        ...         return self.linear(torch.cat([position, gradient, beta], -1)).chunk(2, -1)
        >>> from pyro_mcvae import TraceSIS_ELBO
        >>> kernel = ULA(step_size=0.05, reverse=GaussianReverse(Network(dim=2)))
        >>> elbo = TraceSIS_ELBO(num_steps=5, kernel=kernel)
    """

    def __init__(self, network: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.network = network

    def log_prob(self, position: Tensor, new: State, target: Target, step_size: Tensor) -> Tensor:
        r""":math:`\log r(z' \to z)`, shape ``[*batch]``."""
        gradient = target.gradient(new)
        shift, log_scale = self.network(new.position, gradient, target.beta)
        scale = (2.0 * step_size).sqrt() * torch.exp(log_scale)
        standard = (position - new.position - step_size * gradient - shift) / scale
        density = -0.5 * standard.square() - scale.log() - 0.5 * math.log(2 * math.pi)
        return (density * _ones(density, target)).sum(-1)


def _ones(like: Tensor, target: Target) -> Tensor:
    """1 where a coordinate may move: the others have no density."""
    return torch.ones_like(like) if target.movable is None else target.movable.expand_as(like)
