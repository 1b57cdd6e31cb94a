"""Hamiltonian Monte Carlo."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_mcvae.chains.kernel import Kernel, Proposal, State, Target
from pyro_mcvae.chains.leapfrog import leapfrog, log_momentum
from pyro_mcvae.chains.step_size_base import StepSize
from pyro_mcvae.ops.checks import check_count


class HMC(Kernel):
    r"""
    Hamiltonian Monte Carlo with a fresh momentum, :math:`L` leapfrog steps and a Metropolis
    correction [1].

    With one leapfrog step of length :math:`\sqrt{2 \eta}` it is :class:`~pyro_mcvae.MALA`.

    :param step_size: the length of a leapfrog step; see :class:`Kernel`. Adapts to an acceptance
        of 0.8 by default.
    :param int num_leapfrog: L, each of which evaluates the model and its gradient once.
    :param float jitter: every move takes ``1 - jitter`` to 1 times the step size, drawn anew. Moves
        of one length may return to where they began, again and again: chains that are to forget
        their beginning should take some, 0.3 say.
    :param float laziness: the share of moves that are rejected whatever they are, which leaves the
        target invariant. The score of a rejection, :math:`\nabla \log (1 - \alpha)`, has no finite
        variance where :math:`\alpha` comes close to 1, and one such step can throw a model back;
        with some laziness, 0.03 say, it is bounded.
    :raises ValueError: if the step size is not positive, ``num_leapfrog`` less than 1, or
        ``jitter`` or ``laziness`` not in [0, 1).

    [1] Neal (2011), *MCMC using Hamiltonian Dynamics*.

    Example::

        >>> from pyro_mcvae import TraceAIS_ELBO
        >>> elbo = TraceAIS_ELBO(num_steps=3, kernel=HMC(step_size=0.1, num_leapfrog=3))
    """

    adjusted = True

    def __init__(
        self,
        step_size: float | Tensor | StepSize | None = None,
        num_leapfrog: int = 3,
        jitter: float = 0.0,
        laziness: float = 0.0,
    ) -> None:
        super().__init__(step_size)
        num_leapfrog = check_count("num_leapfrog", num_leapfrog)
        for name, share in {"jitter": jitter, "laziness": laziness}.items():
            if not 0.0 <= share < 1.0:
                raise ValueError(f"{name} must be at least 0 and less than 1, got {share!r}")
        self.num_leapfrog = num_leapfrog
        self.jitter = jitter
        self.laziness = laziness

    def propose(self, state: State, target: Target) -> Proposal:
        start = target.noise(state)
        step = self.step_size(target.transition)
        if self.jitter:
            step = step * (1 - self.jitter * torch.rand((), dtype=step.dtype, device=step.device))
        new, end = leapfrog(state, start, target, step, self.num_leapfrog)
        return Proposal(new, log_momentum(end) - log_momentum(start))
