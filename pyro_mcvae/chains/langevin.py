"""Langevin kernels: one gradient step with noise, unadjusted or with a Metropolis correction."""

from __future__ import annotations

from pyro_mcvae.chains.kernel import Kernel, Proposal, State, Target
from pyro_mcvae.chains.leapfrog import leapfrog, log_momentum


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
    whose weights hold the densities of the move and of its reverse,
    :math:`m(z' \to z) = N(z;\, z' + \eta \nabla \log \gamma(z'),\, 2 \eta)`.

    :param step_size: :math:`\eta`; see :class:`Kernel`. Adapts to an acceptance of 0.9 by default.
    :raises ValueError: if the step size is not positive.

    Example::

        >>> from pyro_mcvae import TraceSIS_ELBO
        >>> elbo = TraceSIS_ELBO(num_steps=5, kernel=ULA(step_size=0.1))
    """

    target_acceptance = 0.9


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
