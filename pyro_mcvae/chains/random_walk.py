"""Random-walk Metropolis."""

from __future__ import annotations

from pyro_mcvae.chains.kernel import Kernel, Proposal, State, Target


class RandomWalk(Kernel):
    r"""
    Random-walk Metropolis, :math:`z' = z + \sigma u` with :math:`u \sim N(0, I)`.

    Needs no gradient of the model, so that its chains cost forward passes only.

    :param step_size: :math:`\sigma`; see :class:`Kernel`. Adapts to an acceptance of 0.3 by
        default, which serves several dimensions.
    :raises ValueError: if the step size is not positive.

    Example::

        >>> from pyro_mcvae import TraceAIS_ELBO
        >>> elbo = TraceAIS_ELBO(num_steps=5, kernel=RandomWalk(step_size=0.5))
    """

    adjusted = True
    needs_gradient = False
    target_acceptance = 0.3

    def propose(self, state: State, target: Target) -> Proposal:
        new = target.evaluate(
            state.position + self.step_size(target.transition) * target.noise(state)
        )
        return Proposal(new, new.log_base.new_zeros(new.log_base.shape))
