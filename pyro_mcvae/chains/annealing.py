r"""
Annealed chains and their importance weights, on tensors without Pyro.

A chain starts at a draw :math:`z_0` from a base density. It moves through the densities
:math:`\log \gamma_\beta = \log \text{base} + \beta \log w` towards :math:`\beta = 1`. Its log
weight W has :math:`E[\exp W] = \int \gamma_1`, the evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pyro_mcvae.chains.kernels import Info, State, Target, finite, of_moving
from pyro_mcvae.ops.weights import leave_one_out_mean, leave_one_out_signal


class Transition(Protocol):
    """A :class:`Kernel`, or a recorded one."""

    adjusted: bool

    def step(self, state: State, target: Target) -> tuple[State, Info]:
        """Make one transition."""


@dataclass(frozen=True, slots=True)
class Chain:
    """
    The result of a chain.

    :ivar log_weight: W, shape ``[*batch]``.
    :ivar start: the first state.
    :ivar state: the last state.
    :ivar infos: the :class:`.Info` of each transition.
    :ivar to_go: for each transition the part of W after it, shape ``[*batch]``; empty for
        unadjusted kernels.
    :ivar weight: the weight of each chain in means, shape ``[*batch]``; None for equal weights.
    :ivar past: for each transition, the part of W before it, shape ``[*batch]``.
    :ivar movable: 1 where a coordinate may move, 0 where it is fixed; None if all may move.
    """

    log_weight: Tensor
    start: State
    state: State
    infos: list[Info]
    to_go: list[Tensor]
    weight: Tensor | None = None
    movable: Tensor | None = None
    past: list[Tensor] = field(default_factory=list)

    def mean(self, value: Tensor, keep: int = 0) -> Tensor:
        """
        Return the weighted mean over all chains that can move; a scalar.

        :param value: shape ``[*any, *batch]``.
        :param int keep: how many of the first dims are kept.
        """
        dims = tuple(range(keep, value.dim()))
        weight = self.weight
        if self.movable is not None:
            moves = self.movable.any(-1).to(value)
            weight = moves if weight is None else weight * moves
        if weight is None:
            return value.mean(dims)
        weight = weight.expand(value.shape)
        return (weight * value).sum(dims) / weight.sum(dims)

    @property
    def gradient(self) -> Tensor | None:
        """Return the gradients to which step sizes adapt, shape ``[*batch, D]``."""
        gradient = self.start.grad_joint
        return None if gradient is None else of_moving(gradient, self.movable)

    @property
    def mean_acceptance(self) -> Tensor:
        """
        Return the mean acceptance of all transitions, to which step sizes adapt; for unadjusted
        kernels it is the geometric mean. An unadjusted transition costs about -log acceptance nats
        of the bound, so a few diverged chains matter. An arithmetic mean would not detect them.
        Without diverged chains both means are about equal.
        """
        acceptance = torch.stack([info.acceptance for info in self.infos])
        if self.infos[0].accepted is not None:
            return self.mean(acceptance)
        return self.mean(acceptance.clamp_min(torch.finfo(acceptance.dtype).tiny).log()).exp()


def anneal(
    start: State,
    betas: Tensor,
    kernel: Transition,
    evaluate: Callable[[Tensor], State],
    movable: Tensor | None = None,
    last_transition: bool = True,
) -> Chain:
    r"""
    Run a chain along a schedule and compute its weight.

    For unadjusted kernels (sequential importance sampling, *SIS*) the log weight is, with the
    density :math:`m_k` of moves for :math:`\gamma_{\beta_k}`,

    .. math::
        W = \log \gamma_1(z_K) - \log \text{base}(z_0)
            + \sum_{k=1}^K \log \frac{m_k(z_k \to z_{k-1})}{m_k(z_{k-1} \to z_k)},

    and for adjusted kernels (annealed importance sampling, *AIS*)

    .. math:: W = \sum_{k=1}^K (\beta_k - \beta_{k-1}) \log w(z_{k-1}).

    Step k of a chain moves for the target :math:`\gamma_{\beta_k}`. The weight of AIS does not
    depend on the last move.

    :param State start: a draw from the base density.
    :param ~torch.Tensor betas: the schedule, shape ``[K + 1]``.
    :param Kernel kernel: moves the chain.
    :param evaluate: computes the :class:`.State` at a position.
    :param movable: 1 where a coordinate may move, 0 where not; None if all may.
    :param bool last_transition: False omits the last move of AIS and its evaluation. This move
        affects only the draw, not the weight.
    :returns: a :class:`Chain`.

    [1] Neal (2001), *Annealed Importance Sampling*.
    [2] Thin et al. (2021), *Monte Carlo Variational Auto-Encoders*.

    Example, the normalizing constant of a normal density with standard deviation 1/2::

        >>> import torch
        >>> from pyro_mcvae.chains.annealing import anneal, evaluator
        >>> from pyro_mcvae import MALA, LinearSchedule
        >>> def density(z):
        ...     log_base = -0.5 * (z.square() + 1.8379).sum(-1)
        ...     return log_base, (-2 * z.square()).sum(-1) - log_base
        >>> evaluate = evaluator(density)
        >>> start = evaluate(torch.randn(1000, 1))
        >>> chain = anneal(start, LinearSchedule(20)(), MALA(0.3), evaluate)
        >>> evidence = chain.log_weight.logsumexp(0) - torch.tensor(1000.0).log()
        >>> round(evidence.item(), 1)  # of log(pi / 2) / 2 = 0.23
        0.2
    """
    if not start.position.shape[-1]:
        return Chain(start.log_weight, start, start, [], [])  # nothing can move
    state, infos, log_weights = start, [], []
    for k in range(1, len(betas) - (kernel.adjusted and not last_transition)):
        log_weights.append(state.log_weight)
        state, info = kernel.step(state, Target(evaluate, betas[k], movable, transition=k - 1))
        infos.append(info)
    if kernel.adjusted:
        parts = _parts(betas, [*log_weights, state.log_weight])
        to_go = parts.flip(0).cumsum(0).flip(0).unbind()
        past, steps = list(parts.cumsum(0).unbind()), slice(1, len(infos) + 1)
        return Chain(to_go[0], start, state, infos, list(to_go[steps]), None, movable, past)
    log_weight = state.log_base + state.log_weight - start.log_base
    log_weight = log_weight + sum((i.log_ratio for i in infos[1:]), infos[0].log_ratio)
    return Chain(log_weight, start, state, infos, [], movable=movable)


def _parts(betas: Tensor, log_weights: list[Tensor]) -> Tensor:
    """
    Return the increments of W, shape ``[K + 1, *batch]``; the last one is zero.

    :param log_weights: log w before each step, at least.
    """
    steps = range(1, len(betas))
    increments = [_times(betas[k] - betas[k - 1], log_weights[k - 1]) for k in steps]
    return torch.stack([*increments, torch.zeros_like(increments[0])])


def _times(step: Tensor, log_weight: Tensor) -> Tensor:
    """
    Return a coefficient times an increment, without a gradient to it at states with weight zero.
    """
    if not step.requires_grad:
        return step * log_weight
    usable = log_weight.isfinite()
    return torch.where(usable, step * torch.where(usable, log_weight, 0.0), log_weight.detach())


def anneal_back(
    start: State,
    betas: Tensor,
    kernel: Transition,
    evaluate: Callable[[Tensor], State],
    movable: Tensor | None = None,
) -> Tensor:
    r"""
    Return the log weight of AIS run backwards, from the posterior to the base density [1].

    .. math::
        W = \sum_{k=1}^K (\beta_k - \beta_{k-1}) \log w(z_{k-1}), \qquad
        E \exp(-W) = \frac{1}{p(x)},

    where :math:`z_{K-1}` is an exact draw from the posterior, and step k, in decreasing order, has
    the target :math:`\gamma_{\beta_k}`. The expectation of W is an upper bound on
    :math:`\log p(x)`, while that of :func:`anneal` is a lower bound.

    :param State start: a draw from the posterior, :math:`\gamma_1`.
    :param Kernel kernel: adjusted, so that it is reversible.
    :returns: W, shape ``[*batch]``.
    :raises ValueError: for an unadjusted kernel.

    The other arguments are those of :func:`anneal`.

    [1] Grosse, Ghahramani, Adams (2015), *Sandwiching the Marginal Likelihood Using Bidirectional
    Monte Carlo*.

    Example, the normalizing constant of a normal density with standard deviation 1/2::

        >>> from pyro_mcvae import MALA, LinearSchedule
        >>> def density(z):
        ...     log_base = -0.5 * (z.square() + 1.8379).sum(-1)
        ...     return log_base, (-2 * z.square()).sum(-1) - log_base
        >>> evaluate = evaluator(density)
        >>> start = evaluate(torch.randn(1000, 1) / 2)
        >>> log_weight = anneal_back(start, LinearSchedule(20)(), MALA(0.3), evaluate)
        >>> exact = 0.5 * torch.tensor(torch.pi / 2).log()
        >>> bool(0 < log_weight.mean() - exact < 0.1)
        True
    """
    if not kernel.adjusted:
        raise ValueError(
            f"only kernels that leave their target invariant can be run backwards, which "
            f"{type(kernel).__name__} does not: use HMC, MALA or RandomWalk"
        )
    if not start.position.shape[-1]:
        return start.log_weight  # nothing can move
    state, last = start, len(betas) - 1
    log_weight = (betas[last] - betas[last - 1]) * state.log_weight
    for k in range(last - 1, 0, -1):
        state, _ = kernel.step(state, Target(evaluate, betas[k], movable, transition=k - 1))
        log_weight = log_weight + (betas[k] - betas[k - 1]) * state.log_weight
    return log_weight


def accept_score(chain: Chain, multi_sample: bool = False) -> Tensor:
    r"""
    Return the score-function term of an AIS bound's gradient, for accept decisions, which are not
    reparameterized.

    .. math::
        \frac{1}{P} \sum_{i=1}^P \sum_k (R_k^i - b_k^i)\, \nabla \log \Pr(a_k^i),
        \qquad b_k^i = \frac{1}{P - 1} \sum_{j \ne i} R_k^j,

    where :math:`R_k` is the part of W after transition k, because the part before it does not
    depend on :math:`a_k`. The baseline is the mean over the other particles, per datum. It is 0 for
    one particle, as in Algorithm 2 of Thin et al. (2021). The bound
    with ``multi_sample`` is the logarithm of the mean of :math:`\exp W`. Its signal is that of
    VIMCO [1]: the bound minus the bound with :math:`R_k^i` replaced by :math:`b_k^i`.

    :param Chain chain: a chain of an adjusted kernel, with P particles in the first dimension.
    :param bool multi_sample: whether the bound averages inside the logarithm.
    :returns: a tensor with this gradient, shape ``[*plates]``.
    :raises ValueError: for an unadjusted kernel.

    [1] Mnih, Rezende (2016), *Variational Inference for Monte Carlo Objectives*.
    """
    total = torch.zeros_like(chain.log_weight[0])
    if len(chain.to_go) < len(chain.infos):
        raise ValueError("the kernel is not adjusted: its chain has no accept bits to score")
    for info, to_go, past in zip(chain.infos, chain.to_go, chain.past, strict=False):
        to_go, log_prob = to_go.detach(), info.log_prob
        assert log_prob is not None
        baseline = leave_one_out_mean(to_go) if len(to_go) > 1 else torch.zeros_like(to_go)
        if multi_sample and len(to_go) > 1:
            substitute = past.detach() + baseline  # W - to_go may be -inf + inf
            total = total + (leave_one_out_signal(chain.log_weight, substitute) * log_prob).sum(0)
        else:
            total = total + ((to_go - baseline) * log_prob).mean(0)
    return total


def evaluator(
    density: Callable[[Tensor], tuple[Tensor, Tensor]], create_graph: bool = True
) -> Callable[[Tensor], State]:
    """
    Return a function that computes the :class:`.State`, with gradients, of a density at a position.

    :param density: maps positions ``[*batch, D]`` to ``log_base`` and ``log_weight``, ``[*batch]``.
    :param bool create_graph: whether gradients can be differentiated again.

    Example::

        >>> import torch
        >>> from pyro_mcvae.chains.annealing import evaluator
        >>> evaluate = evaluator(lambda z: (-z.square().sum(-1), z.sum(-1)), create_graph=False)
        >>> evaluate(torch.ones(1, 2)).grad_base
        tensor([[-2., -2.]])
    """

    def evaluate(position: Tensor) -> State:
        with torch.enable_grad():
            if not create_graph:
                position = position.detach()
            if not position.requires_grad:
                position = position.clone().requires_grad_()
            log_base, log_weight = density(position)
            return State(
                position,
                log_base,
                log_weight,
                _gradient(log_base, position, create_graph),
                _gradient(log_weight, position, create_graph),
            )

    return evaluate


def _gradient(value: Tensor, position: Tensor, create_graph: bool) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(position)
    (gradient,) = torch.autograd.grad(
        value.sum(), position, create_graph=create_graph, retain_graph=True, allow_unused=True
    )
    return torch.zeros_like(position) if gradient is None else finite(gradient)
