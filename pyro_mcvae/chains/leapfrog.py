"""The leapfrog integrator, of which every Hamiltonian and Langevin move is made."""

from __future__ import annotations

from torch import Tensor

from pyro_mcvae.chains.kernel import State, Target

_LIMIT = 10.0


def leapfrog(
    state: State, momentum: Tensor, target: Target, step_size: Tensor, num_steps: int = 1
) -> tuple[State, Tensor]:
    r"""
    Volume-preserving, reversible steps along the gradient of the target's log density.

    .. math::
        p &\leftarrow p + \tfrac{\epsilon}{2} \nabla \log \gamma(z) \\
        z &\leftarrow z + \epsilon\, p \\
        p &\leftarrow p + \tfrac{\epsilon}{2} \nabla \log \gamma(z)

    The change of the momentum is limited to 10 of its standard deviations per coordinate (as in
    truncated MALA [1]), so that a density that is steep far out, as under a guide that has not been
    trained yet, does not throw a chain away. The map stays reversible and volume-preserving.

    :param State state: with gradients, which are used again.
    :param ~torch.Tensor momentum: p, shape ``[*batch, D]``.
    :param Target target: gamma; evaluated ``num_steps`` times.
    :param ~torch.Tensor step_size: epsilon, a scalar or shape ``[D]``.
    :returns: the last state and its momentum.

    [1] Roberts, Tweedie (1996), *Exponential Convergence of Langevin Distributions and their
    Discrete Approximations*.
    """
    half = 0.5 * step_size
    for _ in range(num_steps):
        momentum = momentum + (half * target.gradient(state)).clamp(-_LIMIT, _LIMIT)
        state = target.evaluate(state.position + step_size * momentum)
        momentum = momentum + (half * target.gradient(state)).clamp(-_LIMIT, _LIMIT)
    return state, momentum


def log_momentum(momentum: Tensor) -> Tensor:
    """The standard normal log density without its constant, shape ``[*batch]``."""
    return -0.5 * momentum.square().sum(-1)
