"""What every Markov kernel shares: states with cached gradients, targets, acceptance."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyro_mcvae.chains.step_size import AdaptiveStepSize, as_step_size
from pyro_mcvae.chains.step_size_base import StepSize
from pyro_mcvae.chains.transitions import check_transitions


class State(NamedTuple):
    r"""
    Where chains stand, with everything that was computed there. :class:`Kernel` has an example.

    :ivar position: shape ``[*batch, D]``.
    :ivar log_base: the log density at :math:`\beta = 0`, shape ``[*batch]``.
    :ivar log_weight: log w, shape ``[*batch]``.
    :ivar grad_base: the gradient of ``log_base``, shape ``[*batch, D]``; None if not computed.
    :ivar grad_weight: the gradient of ``log_weight``, likewise.
    :ivar momentum: for kernels that keep one between transitions, shape ``[*batch, D]``.

    Example::

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
        """The gradient of ``log_base + log_weight``, likewise."""
        if self.grad_base is None or self.grad_weight is None:
            return None
        return self.grad_base + self.grad_weight


@dataclass(frozen=True)
class Target:
    r"""
    One annealed density, :math:`\log \gamma_\beta = \log \text{base} + \beta \log w`.

    :class:`Kernel` has an example.

    :ivar evaluate: computes the :class:`State` at a position.
    :ivar beta: the inverse temperature, a scalar.
    :ivar movable: 1 where a coordinate may move and 0 where it may not, broadcastable to positions;
        None if all may.
    :ivar transition: which transition of a chain moves with respect to it, from 0, for kernels
        with parameters of each transition: ``self.step_size(target.transition)``. -1, the last, for
        chains that stay at the posterior.

    Example::

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
        """Shape ``[*batch]``."""
        if not self.beta.requires_grad:
            return state.log_base + self.beta * state.log_weight
        # A learned schedule's gradient would be 0 * inf at a state of zero density.
        usable = state.log_weight.isfinite()
        density = state.log_base + self.beta * torch.where(usable, state.log_weight, 0.0)
        return torch.where(usable, density, -math.inf)

    def gradient(self, state: State) -> Tensor:
        """
        Shape ``[*batch, D]``; zero where the coordinate may not move.
        """
        if state.grad_base is None or state.grad_weight is None:
            raise ValueError("this kernel uses gradients: set needs_gradient = True in its class")
        gradient = state.grad_base + self.beta * state.grad_weight
        return gradient if self.movable is None else gradient * self.movable

    def noise(self, state: State) -> Tensor:
        """Standard normal noise in the shape of the position, zero where it may not move."""
        noise = torch.randn_like(state.position)
        return noise if self.movable is None else noise * self.movable


def finite(gradient: Tensor) -> Tensor:
    """
    A gradient with zeros where it is not finite: there a chain moves by its noise alone. A function
    of the position all the same, so that forward and reverse moves agree on it.
    """
    return torch.where(gradient.isfinite(), gradient, 0.0)


def of_moving(gradient: Tensor, movable: Tensor | None) -> Tensor:
    """
    Return a gradient that has, for each coordinate, the mean and the variance over the batch of the
    entries that may move: step sizes adapt by these.

    :param gradient: shape ``[*batch, D]``.
    :param movable: 1 where an entry may move, 0 where not, broadcastable to it; None if all may.
    """
    if movable is None:
        return gradient
    moves = movable.expand_as(gradient) > 0
    dims = tuple(range(gradient.dim() - 1))
    share = moves.to(gradient).mean(dims).clamp_min(torch.finfo(gradient.dtype).tiny)
    mean = torch.where(moves, gradient, 0.0).mean(dims) / share
    return mean + torch.where(moves, gradient - mean, 0.0) / share.sqrt()


class Proposal(NamedTuple):
    r"""
    :class:`Kernel` has an example.

    :ivar state: the proposed state.
    :ivar log_ratio: :math:`\log m(z' \to z) - \log m(z \to z')`, shape ``[*batch]``; the reverse
        move's log density minus the forward one's.

    Example::

        >>> position = torch.ones(3, 2)
        >>> symmetric = Proposal(State(position, torch.zeros(3), torch.zeros(3)), torch.zeros(3))
    """

    state: State
    log_ratio: Tensor


class Info(NamedTuple):
    r"""
    What happened in one transition.

    :class:`Kernel` has an example.

    :ivar log_ratio: what an unadjusted move adds to the log weight, shape ``[*batch]``.
    :ivar acceptance: :math:`\alpha`, detached, shape ``[*batch]``; for unadjusted kernels the
        probability that the move would have been accepted with.
    :ivar accepted: which moves were accepted; None for unadjusted kernels.
    :ivar log_prob: the log probability of what was decided, :math:`\log \alpha` or
        :math:`\log (1 - \alpha)`, with its gradient; None for unadjusted kernels.

    Example::

        >>> Info(log_ratio=torch.zeros(3), acceptance=torch.ones(3)).accepted is None
        True
    """

    log_ratio: Tensor
    acceptance: Tensor
    accepted: Tensor | None = None
    log_prob: Tensor | None = None


class Kernel(nn.Module, ABC):
    r"""
    Base class of Markov kernels.

    A kernel of one's own writes :meth:`propose`. With ``adjusted = True`` its proposals are
    accepted with probability

    .. math::
        \alpha = \min\Big(1, \frac{\gamma(z')\, m(z' \to z)}{\gamma(z)\, m(z \to z')}\Big),

    each datum by itself, which leaves the target invariant; such kernels serve
    :class:`~pyro_mcvae.TraceAIS_ELBO`. Unadjusted ones always move, and serve
    :class:`~pyro_mcvae.TraceSIS_ELBO`, whose weights account for the error.

    :cvar bool adjusted: whether moves are accepted or rejected.
    :cvar bool needs_gradient: whether :meth:`propose` asks the target for gradients.
    :cvar float laziness: the share of moves that are rejected whatever they are, if adjusted.
    :cvar float initial_step_size: where an adaptive step size starts by default.
    :cvar float step_size_power: how the step size goes with the width of a density; 1 for lengths,
        2 for those that are squared, as Langevin's are.
    :cvar float target_acceptance: what it adapts to by default.

    :param step_size: a number, a tensor of shape ``[D]``, or a
        :class:`~pyro_mcvae.StepSize`; None adapts.
    :raises ValueError: if the step size is not positive.

    A proposal must be a differentiable function of the state and of continuous noise: gradients
    of bounds pass through it. A discrete choice inside of it would need a score-function term.

    Example, the preconditioned Crank-Nicolson proposal, which needs no gradient and leaves the
    standard normal base of noise coordinates invariant in any dimension::

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
        # A leapfrog step of 2 is stable under N(0, 1), and Langevin's eta is its square over 2.
        most = math.inf if self.adjusted else 2.0
        for part in self.step_size.modules():
            if isinstance(part, AdaptiveStepSize):
                part.complete(
                    self.initial_step_size, self.target_acceptance, self.step_size_power, most
                )

    @abstractmethod
    def propose(self, state: State, target: Target) -> Proposal:
        """Propose a move, and say how much likelier its reverse is."""

    def check_transitions(self, num_steps: int) -> None:
        """
        Check that parameters of each transition are as many as a chain's transitions.

        :raises ValueError: naming the parameter.
        """
        for name, part in self.named_modules():
            check_transitions(name, getattr(part, "num_transitions", None), num_steps)

    def step(self, state: State, target: Target) -> tuple[State, Info]:
        """
        One transition.

        :param State state: where the chains stand.
        :param Target target: the density to move in.
        :returns: the new state and an :class:`Info`.
        """
        proposal = self.propose(state, target)
        if not _is_of(proposal, state):
            raise _no_proposal(type(self).__name__, proposal, state)
        if self.adjusted:
            return self._decide(proposal, state, target)
        with torch.no_grad():
            change = self._log_change(proposal, state, target)
        return proposal.state, Info(proposal.log_ratio, change.clamp(max=0.0).exp())

    def _decide(self, proposal: Proposal, state: State, target: Target) -> tuple[State, Info]:
        """Accept or reject a move, each datum by itself."""
        log_accept = self._log_change(proposal, state, target).clamp(max=0.0)
        if self.laziness:
            log_accept = log_accept + math.log1p(-self.laziness)
        acceptance = log_accept.detach().exp()
        accepted = torch.rand_like(acceptance) < acceptance
        pairs = zip(proposal.state, state, strict=True)
        new = State(*(_select(accepted, a, b) for a, b in pairs))  # type: ignore[arg-type]
        log_prob = _log_prob(accepted, log_accept)
        return new, Info(proposal.log_ratio, acceptance, accepted, log_prob)

    @staticmethod
    def _log_change(proposal: Proposal, state: State, target: Target) -> Tensor:
        """The logarithm of the Metropolis ratio."""
        change = target.log_density(proposal.state) - target.log_density(state)
        change = change + proposal.log_ratio
        # A state of zero density, or NaN: nobody should go there.
        return change.masked_fill(change.isnan(), -math.inf)


def _is_of(proposal: object, state: State) -> bool:
    """Whether it is a proposal for such a state."""
    return (
        isinstance(proposal, Proposal)
        and isinstance(proposal.state, State)
        and proposal.state.position.shape == state.position.shape
        and tuple(getattr(proposal.log_ratio, "shape", ())) in ((), state.log_weight.shape)
    )


def _no_proposal(name: str, proposal: object, state: State) -> ValueError:
    if not (isinstance(proposal, Proposal) and isinstance(proposal.state, State)):
        found = type(getattr(proposal, "state", proposal)).__name__
        return ValueError(
            f"{name}.propose must return a Proposal(state, log_ratio) with a state from "
            f"target.evaluate(position), got a {found}"
        )
    position, ratio = (tuple(getattr(t, "shape", ())) for t in (proposal.state[0], proposal[1]))
    return ValueError(
        f"{name}.propose must return positions of shape {tuple(state.position.shape)} and a "
        f"log ratio per chain, of shape {tuple(state.log_weight.shape)} (sum over coordinates, "
        f".sum(-1)), got {position} and {ratio}"
    )


def _select(accepted: Tensor, new: Tensor | None, old: Tensor | None) -> Tensor | None:
    if new is None or old is None:
        return None
    extra = new.dim() - accepted.dim()
    return torch.where(accepted.reshape(accepted.shape + (1,) * extra), new, old)


def _log_prob(accepted: Tensor, log_accept: Tensor) -> Tensor:
    """log alpha, or log(1 - alpha) where rejected."""
    # Each branch is given a harmless argument where the other is taken: 0 * inf is NaN.
    if_accepted = torch.where(accepted, log_accept, 0.0)
    if_rejected = torch.where(accepted, -1.0, log_accept)
    return torch.where(accepted, if_accepted, torch.log(-torch.expm1(if_rejected)))
