"""Underdamped Langevin dynamics: Hamiltonian steps whose momentum is refreshed in part."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pyro_mcvae.chains.kernel import Kernel, Proposal, State, Target
from pyro_mcvae.chains.leapfrog import leapfrog, log_momentum
from pyro_mcvae.chains.momentum import LearnedMomentum
from pyro_mcvae.chains.step_size import AdaptiveStepSize, LearnedStepSize
from pyro_mcvae.chains.step_size_base import StepSize


class UnderdampedLangevin(Kernel):
    r"""
    Uncorrected Hamiltonian annealing [1, 2]: one leapfrog step of length :math:`\epsilon` on the
    annealed density after the momentum is refreshed in part,

    .. math::
        \tilde p = \mu\, p + \sqrt{1 - \mu^2}\, u, \qquad u \sim N(0, I).

    The first momentum is drawn from N(0, I). For :math:`\mu = 0` it is :class:`~pyro_mcvae.ULA`
    with :math:`\eta = \epsilon^2 / 2`; with momentum the moves of a chain add up, so that a few of
    them go further.

    :param step_size: :math:`\epsilon`; see :class:`Kernel`. Adapts by default, to an acceptance of
        0.9; for a model that is trained already, 0.8 is often tighter:
        ``AdaptiveStepSize(target_acceptance=0.8)``.
    :param momentum: :math:`\mu`, a number of at least 0 and less than 1, a
        :class:`LearnedMomentum`, or a module that maps the number of a transition to a tensor.
    :raises ValueError: if the step size is not positive, or the momentum outside of [0, 1).

    [1] Geffner, Domke (2021), *MCMC Variational Inference via Uncorrected Hamiltonian Annealing*.
    [2] Zhang, Hsu, Li, Finn, Grosse (2021), *Differentiable Annealed Importance Sampling and the
    Perils of Gradient Noise*.

    Example::

        >>> from pyro_mcvae import TraceSIS_ELBO
        >>> elbo = TraceSIS_ELBO(num_steps=10, kernel=UnderdampedLangevin(0.3, momentum=0.9))

    Trained, every transition with a step size and a momentum of its own: the default of
    :class:`~pyro_mcvae.TraceSIS_ELBO`::

        >>> kernel = UnderdampedLangevin.trained(10)
        >>> elbo = TraceSIS_ELBO(kernel=kernel, schedule=LearnedSchedule(10))
    """

    # Gaps at targets 0.8, 0.9, 0.95 and learned (tests/benchmarks/chain_step_size.py, K = 5): pPCA
    # 0.96, 0.97, 1.04, 0.94; a VAE 0.28, 0.16, 0.18, 0.16; a ring 2.8, 2.5, 2.5, 2.5.
    # MNIST from scratch suffers from 0.8, a trained VAE of it gains (docs/results.md).
    target_acceptance = 0.9

    def __init__(
        self,
        step_size: float | Tensor | StepSize | None = None,
        momentum: float | nn.Module = 0.9,
    ) -> None:
        super().__init__(step_size)
        known = isinstance(momentum, nn.Module | int | float) and not isinstance(momentum, bool)
        if not known or not (isinstance(momentum, nn.Module) or 0 <= momentum < 1):
            raise ValueError(
                f"momentum must be at least 0 and less than 1, or a module such as "
                f"LearnedMomentum(), got {momentum!r}"
            )
        self.momentum = momentum

    @classmethod
    def trained(
        cls, num_transitions: int, momentum: float = 0.7, warmup: int = 100
    ) -> UnderdampedLangevin:
        """
        A step size and a momentum for each transition, which train with the bound.

        :param int num_transitions: the ``num_steps`` of the objective.
        :param float momentum: where all momenta start.
        :param int warmup: training steps for which the step size adapts, before those of the
            transitions are learned; see :class:`LearnedStepSize`.
        """
        step_size = LearnedStepSize(AdaptiveStepSize(), num_transitions, warmup)
        # The first transition draws its momentum anew: a parameter of one alone would not be used.
        learned = num_transitions > 1
        return cls(step_size, LearnedMomentum(momentum, num_transitions) if learned else momentum)

    def propose(self, state: State, target: Target) -> Proposal:
        start = target.noise(state)
        if state.momentum is not None:
            kept: Any = self.momentum
            if isinstance(kept, nn.Module):
                kept = kept(target.transition)
            start = kept * state.momentum + (1 - kept**2) ** 0.5 * start
        new, end = leapfrog(state, start, target, self.step_size(target.transition))
        # The refreshment leaves N(0, I) invariant, so only the leapfrog step changes the weight.
        return Proposal(new._replace(momentum=end), log_momentum(end) - log_momentum(start))
