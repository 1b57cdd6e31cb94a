"""Markov kernels: the base class, ULA, MALA, HMC, random walk and underdamped Langevin."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import hardtanh

from pyro_mcvae.chains.parameters import (
    AdaptiveStepSize,
    LearnedMomentum,
    LearnedStepSize,
    StepSize,
    as_step_size,
    check_transitions,
)
from pyro_mcvae.chains.score_network import SizedByChain
from pyro_mcvae.ops.checks import check_count, check_flag

# The base of all Markov kernels: states with cached gradients, targets, acceptance.


class State(NamedTuple):
    r"""
    The position of chains, and the values computed there.

    :class:`Kernel` has an example.

    :ivar position: shape ``[*batch, D]``.
    :ivar log_base: the log density at :math:`\beta = 0`, shape ``[*batch]``.
    :ivar log_weight: log w, shape ``[*batch]``.
    :ivar grad_base: the gradient of ``log_base``, shape ``[*batch, D]``; None if not computed.
    :ivar grad_weight: the gradient of ``log_weight``, of the same shape; None if not computed.
    :ivar momentum: for kernels that keep one between transitions, shape ``[*batch, D]``.

    Example::

        >>> import torch
        >>> from pyro_mcvae.chains.kernels import State
        >>> position = torch.zeros(3, 2)
        >>> State(position, -position.square().sum(-1), position.sum(-1)).log_weight
        tensor([0., 0., 0.])
    """

    position: Tensor
    log_base: Tensor
    log_weight: Tensor
    grad_base: Tensor | None = None
    grad_weight: Tensor | None = None
    momentum: Tensor | None = None

    @property
    def grad_joint(self) -> Tensor | None:
        """Return the gradient of ``log_base + log_weight``, shape ``[*batch, D]``."""
        if self.grad_base is None or self.grad_weight is None:
            return None
        return self.grad_base + self.grad_weight


@dataclass(frozen=True)
class Target:
    r"""
    One annealed density, :math:`\log \gamma_\beta = \log \text{base} + \beta \log w`.

    :class:`Kernel` has an example.

    :ivar evaluate: computes the :class:`.State` at a position.
    :ivar beta: the inverse temperature, a scalar.
    :ivar movable: 1 where a coordinate may move and 0 where it may not, broadcastable to positions;
        None if all may.
    :ivar transition: the index of the transition, from 0, for kernels with separate parameters per
        transition: ``self.step_size(target.transition)``. It is -1 (the last) for chains at the
        posterior.

    Example::

        >>> import torch
        >>> from pyro_mcvae.chains.kernels import State, Target
        >>> def evaluate(position):
        ...     return State(position, torch.zeros(len(position)), position.sum(-1))
        >>> target = Target(evaluate, torch.tensor(0.5))
        >>> target.log_density(target.evaluate(torch.ones(3, 2)))
        tensor([1., 1., 1.])
    """

    evaluate: Callable[[Tensor], State]
    beta: Tensor
    movable: Tensor | None = None
    transition: int = -1

    def log_density(self, state: State) -> Tensor:
        """Return the log density, shape ``[*batch]``."""
        if not self.beta.requires_grad:
            return state.log_base + self.beta * state.log_weight
        # The gradient of a learned schedule would be 0 * inf at a state of zero density.
        usable = state.log_weight.isfinite()
        density = state.log_base + self.beta * torch.where(usable, state.log_weight, 0.0)
        return torch.where(usable, density, -math.inf)

    def log_change(self, new: State, old: State) -> Tensor:
        """Return the difference of the log density between two states, shape ``[*batch]``."""
        if self.beta.requires_grad and torch.is_grad_enabled():
            return self.log_density(new) - self.log_density(old)
        change = new.log_base - old.log_base
        return change + self.beta * (new.log_weight - old.log_weight)

    def gradient(self, state: State) -> Tensor:
        """
        Return the gradient of the log density, shape ``[*batch, D]``; zero for fixed coordinates.
        """
        if state.grad_base is None or state.grad_weight is None:
            raise ValueError("this kernel uses gradients: set needs_gradient = True in its class")
        gradient = state.grad_base + self.beta * state.grad_weight
        return gradient if self.movable is None else gradient * self.movable

    def noise(self, state: State) -> Tensor:
        """Draw standard normal noise in the shape of the position; zero for fixed coordinates."""
        noise = torch.randn_like(state.position)
        return noise if self.movable is None else noise * self.movable


def finite(gradient: Tensor) -> Tensor:
    """
    Replace non-finite gradients by zero, so that chains move only by noise there. The result is
    still a function of the position, so it is the same for forward and reverse moves.
    """
    fixed = gradient.detach()
    # isfinite() takes twice the operations.
    return gradient.masked_fill(fixed - fixed != 0, 0.0)


def of_moving(gradient: Tensor, movable: Tensor | None) -> Tensor:
    """
    Return a gradient whose mean and variance over the batch are, for each coordinate, those of the
    movable entries. Step sizes adapt to these.

    :param gradient: shape ``[*batch, D]``.
    :param movable: 1 where an entry may move, 0 where not, broadcastable to it; None if all may.
    """
    if movable is None:
        return gradient
    moves = movable.expand_as(gradient) > 0
    dims = tuple(range(gradient.dim() - 1))
    fraction = moves.to(gradient).mean(dims).clamp_min(torch.finfo(gradient.dtype).tiny)
    mean = torch.where(moves, gradient, 0.0).mean(dims) / fraction
    return mean + torch.where(moves, gradient - mean, 0.0) / fraction.sqrt()


class Proposal(NamedTuple):
    r"""
    A proposed move, and the log ratio of its densities.

    :class:`Kernel` has an example.

    :ivar state: the proposed state.
    :ivar log_ratio: :math:`\log m(z' \to z) - \log m(z \to z')`, shape ``[*batch]``: the log
        density of the reverse move minus that of the forward move.

    Example::

        >>> import torch
        >>> from pyro_mcvae import Proposal
        >>> from pyro_mcvae.chains.kernels import State
        >>> position = torch.ones(3, 2)
        >>> symmetric = Proposal(State(position, torch.zeros(3), torch.zeros(3)), torch.zeros(3))
    """

    state: State
    log_ratio: Tensor


class Info(NamedTuple):
    r"""
    A record of one transition.

    :class:`Kernel` has an example.

    :ivar log_ratio: the increment of the log weight by an unadjusted move, shape ``[*batch]``.
    :ivar acceptance: :math:`\alpha`, detached, shape ``[*batch]``; for unadjusted kernels the
        acceptance probability that a Metropolis correction would have.
    :ivar accepted: a mask of the accepted moves; None for unadjusted kernels.
    :ivar log_prob: the log probability of the decision, :math:`\log \alpha` or
        :math:`\log (1 - \alpha)`, with its gradient; None for unadjusted kernels.

    Example::

        >>> import torch
        >>> from pyro_mcvae.chains.kernels import Info
        >>> Info(log_ratio=torch.zeros(3), acceptance=torch.ones(3)).acceptance
        tensor([1., 1., 1.])
    """

    log_ratio: Tensor
    acceptance: Tensor
    accepted: Tensor | None = None
    log_prob: Tensor | None = None


class Kernel(nn.Module, ABC):
    r"""
    Base class of Markov kernels.

    A custom kernel implements :meth:`propose`. With ``adjusted = True`` its proposals are accepted
    with probability

    .. math::
        \alpha = \min\Big(1, \frac{\gamma(z')\, m(z' \to z)}{\gamma(z)\, m(z \to z')}\Big),

    separately for each datum, which leaves the target invariant. Such kernels are for
    :class:`~pyro_mcvae.TraceAIS_ELBO`. Unadjusted kernels always move. They are for
    :class:`~pyro_mcvae.TraceSIS_ELBO`, whose weights correct the error.

    :cvar bool adjusted: whether moves are accepted or rejected.
    :cvar bool needs_gradient: whether :meth:`propose` uses gradients of the target.
    :cvar float laziness: the fraction of moves that are always rejected, if adjusted.
    :cvar float initial_step_size: the default initial value of an adaptive step size.
    :cvar float step_size_power: the step size is proportional to this power of the width of a
        density. It is 1 for lengths, and 2 for the squared lengths of Langevin moves.
    :cvar float target_acceptance: the acceptance to which the step size adapts by default.

    :param step_size: a number, a tensor of shape ``[D]``, or a
        :class:`~pyro_mcvae.StepSize`; None adapts.
    :raises ValueError: if the step size is not positive.

    A proposal must be a differentiable function of the state and of continuous noise, because
    gradients of bounds pass through it. A discrete choice would need a score-function term.

    Example, the preconditioned Crank-Nicolson proposal, which needs no gradient and leaves the
    standard normal base of noise coordinates invariant in any dimension::

        >>> import torch
        >>> from pyro_mcvae import Kernel, Proposal
        >>> from pyro_mcvae.chains.kernels import Target
        >>> class CrankNicolson(Kernel):
        ...     adjusted = True
        ...     needs_gradient = False
        ...
        ...     def propose(self, state, target):
        ...         step = self.step_size(target.transition).clamp(max=1)
        ...         noise = target.noise(state)
        ...         new = target.evaluate((1 - step**2).sqrt() * state.position + step * noise)
        ...         return Proposal(new, self._log_normal(state) - self._log_normal(new))
        ...
        ...     def _log_normal(self, state):
        ...         return -0.5 * state.position.square().sum(-1)
        >>> from pyro_mcvae.chains.annealing import evaluator
        >>> normal = evaluator(lambda z: (-0.5 * z.square().sum(-1), torch.zeros(z.shape[:-1])))
        >>> target = Target(normal, torch.tensor(1.0))
        >>> state, info = CrankNicolson(0.5).step(normal(torch.zeros(3, 2)), target)
        >>> state.position.shape, info.acceptance
        (torch.Size([3, 2]), tensor([1., 1., 1.]))
    """

    adjusted: bool = False
    needs_gradient: bool = True
    laziness: float = 0.0
    initial_step_size: float = 0.1
    step_size_power: float = 1.0
    target_acceptance: float = 0.8

    def __init__(self, step_size: float | Tensor | StepSize | None = None) -> None:
        super().__init__()
        self.step_size = as_step_size(step_size)
        # A leapfrog step of 2 is stable under N(0, 1). The eta of Langevin is its square over 2.
        most = math.inf if self.adjusted else 2.0
        for part in self.step_size.modules():
            if isinstance(part, AdaptiveStepSize):
                part.complete(
                    self.initial_step_size, self.target_acceptance, self.step_size_power, most
                )

    @abstractmethod
    def propose(self, state: State, target: Target) -> Proposal:
        """Propose a move. Return it with the log ratio of the reverse and forward densities."""

    def check_transitions(self, num_steps: int) -> None:
        """
        Check that per-transition parameters have one value for each transition of the chain.

        :raises ValueError: naming the parameter.
        """
        for name, part in self.named_modules():
            check_transitions(name, getattr(part, "num_transitions", None), num_steps)

    def step(self, state: State, target: Target) -> tuple[State, Info]:
        """
        Make one transition.

        :param State state: the current state of the chains.
        :param Target target: the target density.
        :returns: the new state and an :class:`.Info`.
        """
        proposal = self.propose(state, target)
        if not _is_of(proposal, state):
            raise _no_proposal(type(self).__name__, proposal, state)
        if self.adjusted:
            return self._decide(proposal, state, target)
        with torch.no_grad():
            change = target.log_change(proposal.state, state) + proposal.log_ratio
            acceptance = change.clamp(max=0.0).exp().nan_to_num(0.0)
        return proposal.state, Info(proposal.log_ratio, acceptance)

    def _decide(self, proposal: Proposal, state: State, target: Target) -> tuple[State, Info]:
        """Accept or reject a move, separately for each datum."""
        change = target.log_change(proposal.state, state) + proposal.log_ratio
        # A state with zero or NaN density must be rejected.
        log_accept = change.masked_fill(change.isnan(), -math.inf).clamp(max=0.0)
        if self.laziness:
            log_accept = log_accept + math.log1p(-self.laziness)
        acceptance = log_accept.detach().exp()
        accepted = torch.rand_like(acceptance) < acceptance
        pairs = zip(proposal.state, state, strict=True)
        new = State(*(_select(accepted, a, b) for a, b in pairs))  # type: ignore[arg-type]
        log_prob = _log_prob(accepted, log_accept)
        return new, Info(proposal.log_ratio, acceptance, accepted, log_prob)


def _is_of(proposal: object, state: State) -> bool:
    """Return whether a proposal's shape matches a state."""
    return (
        isinstance(proposal, Proposal)
        and isinstance(proposal.state, State)
        and proposal.state.position.shape == state.position.shape
        and tuple(getattr(proposal.log_ratio, "shape", ())) in ((), state.log_weight.shape)
    )


def _no_proposal(name: str, proposal: object, state: State) -> ValueError:
    got = f"a {type(getattr(proposal, 'state', proposal)).__name__}"
    if isinstance(proposal, Proposal) and isinstance(proposal.state, State):
        parts = proposal.state.position, proposal.log_ratio
        got = " and ".join(str(tuple(getattr(part, "shape", ()))) for part in parts)
    return ValueError(
        f"{name}.propose must return a Proposal(state, log_ratio) with a state from "
        f"target.evaluate(position), for positions of shape {tuple(state.position.shape)} and a "
        f"log ratio per chain, of shape {tuple(state.log_weight.shape)} (sum over coordinates, "
        f".sum(-1)), got {got}"
    )


def _select(accepted: Tensor, new: Tensor | None, old: Tensor | None) -> Tensor | None:
    if new is None or old is None:
        return None
    extra = new.dim() - accepted.dim()
    return torch.where(accepted.reshape(accepted.shape + (1,) * extra), new, old)


def _log_prob(accepted: Tensor, log_accept: Tensor) -> Tensor:
    """Return log alpha, or log(1 - alpha) where the move is rejected."""
    # Where log(1 - alpha) is not used, replace its argument, because 0 * inf is NaN.
    if_rejected = log_accept.masked_fill(accepted, -1.0)
    return torch.where(accepted, log_accept, torch.log(-torch.expm1(if_rejected)))


# The leapfrog integrator, for all Hamiltonian and Langevin moves.

_LIMIT = 10.0


def leapfrog(
    state: State, momentum: Tensor, target: Target, step_size: Tensor, num_steps: int = 1
) -> tuple[State, Tensor]:
    r"""
    Take volume-preserving, reversible steps along the gradient of the target's log density.

    .. math::
        p &\leftarrow p + \tfrac{\epsilon}{2} \nabla \log \gamma(z) \\
        z &\leftarrow z + \epsilon\, p \\
        p &\leftarrow p + \tfrac{\epsilon}{2} \nabla \log \gamma(z)

    The change of the momentum is limited to 10 of its standard deviations per coordinate, as in
    truncated MALA [1]. So chains do not diverge where the density is very steep, as with an
    untrained guide. The map remains reversible and volume-preserving.

    :param State state: the first state, with gradients.
    :param ~torch.Tensor momentum: p, shape ``[*batch, D]``.
    :param Target target: gamma, which is evaluated ``num_steps`` times.
    :param ~torch.Tensor step_size: epsilon, a scalar or shape ``[D]``.
    :returns: the last state and its momentum.

    [1] Roberts, Tweedie (1996), *Exponential Convergence of Langevin Distributions and their
    Discrete Approximations*.
    """
    half = 0.5 * step_size
    for _ in range(num_steps):
        # The gradient of clamp() takes five operations.
        momentum = momentum + hardtanh(half * target.gradient(state), -_LIMIT, _LIMIT)
        state = target.evaluate(state.position + step_size * momentum)
        momentum = momentum + hardtanh(half * target.gradient(state), -_LIMIT, _LIMIT)
    return state, momentum


def log_momentum_ratio(new: Tensor, old: Tensor) -> Tensor:
    """
    Return the difference of the standard normal log density of two momenta, shape ``[*batch]``.
    """
    return -0.5 * (new.square() - old.square()).sum(-1)


class MassMatrix(SizedByChain):
    r"""
    The leapfrog step with a learned inverse mass matrix :math:`F F^\top`.

    .. math::
        p &\leftarrow p + \tfrac{\epsilon}{2} F^\top \nabla \log \gamma(z) \\
        z &\leftarrow z + \epsilon\, F p \\
        p &\leftarrow p + \tfrac{\epsilon}{2} F^\top \nabla \log \gamma(z)

    F has the shape ``[D, D]``, and is initially the identity. It may be any matrix: each line
    changes z or p by a function of the other, so the step is reversible and volume-preserving.
    Call it like :func:`leapfrog`.
    """

    _sized = "factor"
    factor: nn.Parameter

    def _create(self, dim: int) -> None:
        self.factor = nn.Parameter(torch.eye(dim))

    def forward(
        self, state: State, momentum: Tensor, target: Target, step_size: Tensor
    ) -> tuple[State, Tensor]:
        self.create(state.position)

        def times(vector: Tensor, factor: Tensor) -> Tensor:
            product = vector @ factor
            return product if target.movable is None else product * target.movable

        def kick(state: State) -> Tensor:
            gradient = 0.5 * step_size * target.gradient(state)
            return times(gradient, self.factor).clamp(-_LIMIT, _LIMIT)

        momentum = momentum + kick(state)
        state = target.evaluate(state.position + step_size * times(momentum, self.factor.mT))
        return state, momentum + kick(state)


# Random-walk Metropolis.


class RandomWalk(Kernel):
    r"""
    Random-walk Metropolis, :math:`z' = z + \sigma u` with :math:`u \sim N(0, I)`.

    It needs no gradient of the model, so its chains need only forward passes.

    :param step_size: :math:`\sigma`; see :class:`Kernel`. Adapts to an acceptance of 0.3 by
        default, which is suitable for several dimensions.
    :raises ValueError: if the step size is not positive.

    Example::

        >>> from pyro_mcvae import RandomWalk, TraceAIS_ELBO
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


# Langevin kernels: one gradient step with noise, unadjusted or with a Metropolis correction.


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
        return Proposal(new, self._log_ratio(noise, momentum, new, target))

    def _log_ratio(self, noise: Tensor, momentum: Tensor, new: State, target: Target) -> Tensor:
        return log_momentum_ratio(momentum, noise)


class GaussianReverse(nn.Module):
    r"""
    A learned Gaussian reversal of the moves of :class:`ULA` [1].

    The weight of a move from z to z' has, instead of the density of ULA's own reverse move,

    .. math::
        l(z' \to z) = N\big(z;\; z' + \eta \nabla \log \gamma(z') + \sqrt{2 \eta}\, m,\;
            2 \eta\, e^{2 s}\big), \qquad (m, s) = \text{network}(z', \nabla \log \gamma(z'),
            \beta) .

    :math:`m = s = 0` is ULA's own reversal. :math:`E[\exp W] = p(x)` for any network, because l is
    a density of z. The network is trained with the bound.

    :param network: a module that maps positions, gradients of the target, both of shape
        ``[*batch, D]``, and the inverse temperature, a scalar, to m and s, of shape ``[*batch, D]``
        or broadcastable to it.
    :raises ValueError: if the network is no module.

    [1] Thin, Kotelevskii, Doucet, Durmus, Moulines, Panov (2021), *Monte Carlo Variational
    Auto-Encoders*.

    Example, a network that starts as ULA's own reversal::

        >>> import torch
        >>> from pyro_mcvae import GaussianReverse, TraceSIS_ELBO, ULA
        >>> class Reverse(torch.nn.Module):
        ...     def __init__(self, dim):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(2 * dim + 1, 2 * dim)
        ...         torch.nn.init.zeros_(self.linear.weight)
        ...         torch.nn.init.zeros_(self.linear.bias)
        ...
        ...     def forward(self, position, gradient, beta):
        ...         beta = beta.expand(position[..., :1].shape)
        ...         return self.linear(torch.cat([position, gradient, beta], -1)).chunk(2, -1)
        >>> kernel = ULA(0.1, reverse=GaussianReverse(Reverse(3)))
        >>> elbo = TraceSIS_ELBO(num_steps=5, kernel=kernel)
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise ValueError(f"network must be a module, got {network!r}")
        self.network = network

    def forward(self, noise: Tensor, state: State, target: Target) -> Tensor:
        r"""
        Return the log density of the reverse move, without the constant of a standard normal.

        :param noise: the reverse move in units of :math:`\sqrt{2 \eta}`, shape ``[*batch, D]``.
        :param State state: z'.
        :returns: shape ``[*batch]``.
        :raises ValueError: if the network returns anything but two tensors of this shape.
        """
        gradient = target.gradient(state)
        result = self.network(state.position, gradient, target.beta)
        try:
            shift, log_scale = (part.expand(noise.shape) for part in result)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"the network of GaussianReverse must return a shift and a log scale of shape "
                f"{tuple(noise.shape)} each, such as output.chunk(2, -1): {error}"
            ) from error
        if target.movable is not None:
            shift, log_scale = shift * target.movable, log_scale * target.movable
        standard = (noise - shift) * (-log_scale).exp()
        return (-0.5 * standard.square() - log_scale).sum(-1)


class ULA(_Langevin):
    r"""
    The unadjusted Langevin algorithm,

    .. math::
        z' = z + \eta \nabla \log \gamma(z) + \sqrt{2 \eta}\, u, \qquad u \sim N(0, I).

    Its stationary density is not :math:`\gamma`. Use it with :class:`~pyro_mcvae.TraceSIS_ELBO`.
    Its weights have the densities of the move and of the reverse move,
    :math:`m(z' \to z) = N(z;\, z' + \eta \nabla \log \gamma(z'),\, 2 \eta)`.

    :param step_size: :math:`\eta`; see :class:`Kernel`. Adapts to an acceptance of 0.9 by default.
    :param reverse: a :class:`GaussianReverse`, whose learned density replaces that of the reverse
        move in the weights, and in the acceptance to which the step size adapts.
    :raises ValueError: if the step size is not positive, or the reversal of another type.

    Example::

        >>> from pyro_mcvae import TraceSIS_ELBO, ULA
        >>> elbo = TraceSIS_ELBO(num_steps=5, kernel=ULA(step_size=0.1))
    """

    target_acceptance = 0.9

    def __init__(
        self,
        step_size: float | Tensor | StepSize | None = None,
        *,
        reverse: GaussianReverse | None = None,
    ) -> None:
        super().__init__(step_size)
        if not (reverse is None or isinstance(reverse, GaussianReverse)):
            raise ValueError(f"reverse must be a GaussianReverse(network), got {reverse!r}")
        self.reverse = reverse

    def _log_ratio(self, noise: Tensor, momentum: Tensor, new: State, target: Target) -> Tensor:
        if self.reverse is None:
            return super()._log_ratio(noise, momentum, new, target)
        # The noise of the reverse move is the final momentum in the opposite direction.
        log_reverse: Tensor = self.reverse(-momentum, new, target)
        return log_reverse + 0.5 * noise.square().sum(-1)


class MALA(_Langevin):
    r"""
    The Metropolis-adjusted Langevin algorithm: the proposal of :class:`ULA`, accepted or rejected.

    :param step_size: :math:`\eta`; see :class:`Kernel`. Adapts to an acceptance of 0.8 by default.
    :raises ValueError: if the step size is not positive.

    Example::

        >>> from pyro_mcvae import MALA, TraceAIS_ELBO
        >>> elbo = TraceAIS_ELBO(num_steps=5, kernel=MALA(step_size=0.1))
    """

    adjusted = True


# Hamiltonian Monte Carlo.


class HMC(Kernel):
    r"""
    Hamiltonian Monte Carlo with a fresh momentum, :math:`L` leapfrog steps and a Metropolis
    correction [1].

    With one leapfrog step of length :math:`\sqrt{2 \eta}` it is :class:`~pyro_mcvae.MALA`.

    :param step_size: the length of a leapfrog step; see :class:`Kernel`. Adapts to an acceptance
        of 0.8 by default.
    :param int num_leapfrog: L, the number of leapfrog steps. Each evaluates the model and its
        gradient once.
    :param float jitter: every move takes ``1 - jitter`` to 1 times the step size, at random. Moves
        of a fixed length may return to their start repeatedly, so use a jitter such as 0.3 for
        chains that should mix.
    :param float laziness: the fraction of moves that are always rejected, which leaves the target
        invariant. The score of a rejection, :math:`\nabla \log (1 - \alpha)`, has an infinite
        variance near :math:`\alpha = 1`, and one such step can undo training. A laziness such as
        0.03 bounds it.
    :raises ValueError: if the step size is not positive, ``num_leapfrog`` less than 1, or
        ``jitter`` or ``laziness`` not in [0, 1).

    [1] Neal (2011), *MCMC using Hamiltonian Dynamics*.

    Example::

        >>> from pyro_mcvae import HMC, TraceAIS_ELBO
        >>> elbo = TraceAIS_ELBO(num_steps=3, kernel=HMC(step_size=0.1, num_leapfrog=3))
    """

    adjusted = True

    def __init__(
        self,
        step_size: float | Tensor | StepSize | None = None,
        *,
        num_leapfrog: int = 3,
        jitter: float = 0.0,
        laziness: float = 0.0,
    ) -> None:
        super().__init__(step_size)
        num_leapfrog = check_count("num_leapfrog", num_leapfrog)
        for name, fraction in {"jitter": jitter, "laziness": laziness}.items():
            if not 0.0 <= fraction < 1.0:
                raise ValueError(f"{name} must be at least 0 and less than 1, got {fraction!r}")
        self.num_leapfrog = num_leapfrog
        self.jitter = jitter
        self.laziness = laziness

    def propose(self, state: State, target: Target) -> Proposal:
        start = target.noise(state)
        step = self.step_size(target.transition)
        if self.jitter:
            step = step * (1 - self.jitter * torch.rand((), dtype=step.dtype, device=step.device))
        new, end = leapfrog(state, start, target, step, self.num_leapfrog)
        return Proposal(new, log_momentum_ratio(end, start))


# Underdamped Langevin dynamics: Hamiltonian steps with a partial refreshment of the momentum.


class UnderdampedLangevin(Kernel):
    r"""
    Uncorrected Hamiltonian annealing [1, 2]: a partial refreshment of the momentum, and one
    leapfrog step of length :math:`\epsilon` on the annealed density:

    .. math::
        \tilde p = \mu\, p + \sqrt{1 - \mu^2}\, u, \qquad u \sim N(0, I).

    The first momentum is drawn from N(0, I). For :math:`\mu = 0` it is :class:`~pyro_mcvae.ULA`
    with :math:`\eta = \epsilon^2 / 2`. With momentum, successive moves have similar directions, so
    a chain moves further.

    ``full_mass`` learns an inverse mass matrix :math:`F F^\top` with the bound. It is the same for
    all transitions and data. Positions move by :math:`\epsilon F p`, and momenta by
    :math:`\tfrac{\epsilon}{2} F^\top \nabla \log \gamma`. Chains can then follow correlations that
    the guide does not have. F has :math:`D^2` entries, and is initially the identity.

    ``reverse`` learns the reversal of the refreshments [3, 4]. Without it the weight uses
    :math:`N(p;\, \mu \tilde p,\, 1 - \mu^2)`, which is exact for chains in equilibrium. With it
    the weight uses

    .. math::
        r_k(p \mid z, \tilde p)
            = N\big(p;\, \mu \tilde p + (1 - \mu^2)\, s_k(z, \tilde p),\, 1 - \mu^2\big),

    where :math:`s_k` is a :class:`ScoreNetwork`. :math:`E[\exp W] = p(x)` for any F and any
    :math:`s_k`.

    :param step_size: :math:`\epsilon`; see :class:`Kernel`. By default it adapts to an acceptance
        of 0.9. For a trained model 0.8 is often tighter:
        ``AdaptiveStepSize(target_acceptance=0.8)``.
    :param momentum: :math:`\mu`, a number of at least 0 and less than 1, or a
        :class:`LearnedMomentum`. Another module maps the number of a transition to a tensor.
    :param bool full_mass: whether to learn a mass matrix.
    :param reverse: a :class:`ScoreNetwork`, or a module that maps positions, refreshed momenta
        and the number of a transition to :math:`s_k`, shape ``[*batch, D]``.
    :ivar integrator: the leapfrog step. With ``full_mass`` it is a module, and
        ``integrator.factor`` is F.
    :raises ValueError: if the step size is not positive, or the momentum outside [0, 1).

    [1] Geffner, Domke (2021), *MCMC Variational Inference via Uncorrected Hamiltonian Annealing*.
    [2] Zhang, Hsu, Li, Finn, Grosse (2021), *Differentiable Annealed Importance Sampling and the
    Perils of Gradient Noise*.
    [3] Doucet, Grathwohl, Matthews, Strathmann (2022), *Score-Based Diffusion meets Annealed
    Importance Sampling*.
    [4] Geffner, Domke (2023), *Langevin Diffusion Variational Inference*.

    Example::

        >>> from pyro_mcvae import LearnedSchedule, TraceSIS_ELBO, UnderdampedLangevin
        >>> elbo = TraceSIS_ELBO(num_steps=10, kernel=UnderdampedLangevin(0.3, momentum=0.9))

    With a trained step size and momentum for each transition, the default of
    :class:`~pyro_mcvae.TraceSIS_ELBO`::

        >>> kernel = UnderdampedLangevin.trained(10)
        >>> elbo = TraceSIS_ELBO(kernel=kernel, schedule=LearnedSchedule(10))

    With a mass matrix, for a posterior with correlations that the guide cannot represent::

        >>> kernel = UnderdampedLangevin.trained(10, full_mass=True)
        >>> elbo = TraceSIS_ELBO(kernel=kernel, schedule=LearnedSchedule(10), defensive=0.01)
    """

    # Gaps at targets 0.8, 0.9, 0.95 and learned (tests/benchmarks/chain_step_size.py, K = 5): pPCA
    # 0.96, 0.97, 1.04, 0.94; a VAE 0.28, 0.16, 0.18, 0.16; a ring 2.8, 2.5, 2.5, 2.5.
    # MNIST from scratch suffers from 0.8, a trained VAE of it gains (docs/results.md).
    target_acceptance = 0.9

    def __init__(
        self,
        step_size: float | Tensor | StepSize | None = None,
        *,
        momentum: float | nn.Module = 0.9,
        full_mass: bool = False,
        reverse: nn.Module | None = None,
    ) -> None:
        super().__init__(step_size)
        known = isinstance(momentum, nn.Module | int | float) and not isinstance(momentum, bool)
        if not known or not (isinstance(momentum, nn.Module) or 0 <= momentum < 1):
            raise ValueError(
                f"momentum must be at least 0 and less than 1, or a module such as "
                f"LearnedMomentum(), got {momentum!r}"
            )
        if not (reverse is None or isinstance(reverse, nn.Module)):
            raise ValueError(f"reverse must be a module such as ScoreNetwork(), got {reverse!r}")
        check_flag("full_mass", full_mass)
        self.momentum: Any = momentum
        self.reverse = reverse
        self.integrator = MassMatrix() if full_mass else leapfrog

    @classmethod
    def trained(
        cls,
        num_transitions: int,
        momentum: float = 0.7,
        warmup: int = 100,
        full_mass: bool = False,
        reverse: nn.Module | None = None,
    ) -> UnderdampedLangevin:
        """
        Make a kernel with a trained step size and momentum for each transition.

        :param int num_transitions: the ``num_steps`` of the objective.
        :param float momentum: the initial value of all momenta.
        :param int warmup: the number of training steps in which one step size adapts, before the
            step sizes of the transitions are trained; see :class:`LearnedStepSize`.
        :param bool full_mass: whether to learn a mass matrix.
        :param reverse: a :class:`ScoreNetwork` with the same number of transitions.
        """
        step_size = LearnedStepSize(AdaptiveStepSize(), num_transitions, warmup=warmup)
        # The first transition draws its momentum, so a single transition would not use a parameter.
        learned = num_transitions > 1
        return cls(
            step_size,
            momentum=LearnedMomentum(momentum, num_transitions) if learned else momentum,
            full_mass=full_mass,
            reverse=reverse,
        )

    def propose(self, state: State, target: Target) -> Proposal:
        start = target.noise(state)
        if state.momentum is not None:
            coefficient: Any = self.momentum
            if isinstance(coefficient, nn.Module):
                coefficient = coefficient(target.transition)
            start = coefficient * state.momentum + (1 - coefficient**2) ** 0.5 * start
        new, end = self.integrator(state, start, target, self.step_size(target.transition))
        # The refreshment leaves N(0, I) invariant, so only the leapfrog step changes the weight.
        log_ratio = log_momentum_ratio(end, start)
        if self.reverse is not None and state.momentum is not None:
            log_ratio = log_ratio + self._learned_reversal(state, start, coefficient, target)
        return Proposal(new._replace(momentum=end), log_ratio)

    def _learned_reversal(
        self, state: State, start: Tensor, coefficient: Any, target: Target
    ) -> Tensor:
        """Return the term of the learned reversal in the log ratio, shape ``[*batch]``."""
        assert self.reverse is not None
        assert state.momentum is not None
        drift = self.reverse(state.position, start, target.transition)
        drift = drift if target.movable is None else drift * target.movable
        # log N(r; v s, v) - log N(r; 0, v), without a division by v, which may be close to 0.
        residual = state.momentum - coefficient * start - 0.5 * (1 - coefficient**2) * drift
        return (drift * residual).sum(-1)
