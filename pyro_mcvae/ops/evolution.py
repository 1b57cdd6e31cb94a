r"""
Evolutionary search for discrete states of high joint density [1, 2].

Populations have shape ``[E, S]``: S distinct states for each of E data. Operators are objects:
selections choose parents, crossovers mix them, mutations change single entries of them.

[1] Guiraud, Drefs, Lücke (2021), *Direct Evolutionary Optimization of Variational Autoencoders
with Binary Latents*.
[2] Grathwohl, Swersky, Hashemi, Duvenaud, Maddison (2021), *Oops I Took A Gradient: Scalable
Sampling for Discrete Distributions*.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_mcvae.ops.states import StateSpace

__all__ = [
    "EvolutionaryUpdate",
    "FitnessProportional",
    "GreedyParents",
    "InformedFlips",
    "Mutation",
    "OnePointCrossover",
    "Parents",
    "SparseFlips",
    "UniformFlips",
    "UniformParents",
    "distinct_states",
    "duplicates",
    "keep_best",
]

# Chooses parents: log joint [E, S] and a number P to indices [E, P].
Selection = Callable[[Tensor, int], Tensor]
# Mixes parents: states [E, P, D] to states [E, P, D].
Crossover = Callable[[Tensor], Tensor]


def duplicates(keys: Tensor) -> Tensor:
    """
    Which states repeat an earlier one of their row.

    :param ~torch.Tensor keys: shape ``[E, S]``.
    :returns: booleans of that shape.

    Example::

        >>> duplicates(torch.tensor([[3, 5, 3, 3]]))
        tensor([[False, False,  True,  True]])
    """
    ordered, order = keys.sort(dim=1, stable=True)
    again = ordered[:, 1:] == ordered[:, :-1]
    again = torch.nn.functional.pad(again, (1, 0))
    return torch.zeros_like(again).scatter(1, order, again)


def keep_best(log_joint: Tensor, repeated: Tensor, count: int) -> Tensor:
    """
    The indices of the ``count`` best states of each row, never a repeated one.

    :param ~torch.Tensor log_joint: shape ``[E, C]``; minus infinity is allowed.
    :param ~torch.Tensor repeated: from :func:`duplicates`; at least ``count`` are not repeated.
    :returns: shape ``[E, count]``.
    """
    # Impossible states may stay, if nothing better is known; repetitions may not.
    rank = log_joint.clamp_min(torch.finfo(log_joint.dtype).min)
    rank = rank.masked_fill(repeated, -torch.inf)
    return rank.topk(count, dim=1, sorted=False).indices


def distinct_states(space: StateSpace, states: Tensor, count: int) -> Tensor:
    """
    Distinct states: those given, their repetitions replaced.

    :param ~torch.Tensor states: any states, shape ``[N, S, D]``.
    :param int count: how many distinct ones are wanted, at most ``space.cardinality``.
    :returns: shape ``[N, count, D]``, distinct in each row.

    Example::

        >>> distinct_states(StateSpace([2, 2]), torch.zeros(1, 1, 2, dtype=torch.uint8), 4).shape
        torch.Size([1, 4, 2])
    """
    sizes, device = space.sizes, states.device
    rows = torch.arange(count, device=device) % states.shape[1]
    spare = states.index_select(1, rows).clone()
    # As many leading entries as have enough values: counting through them from a random start
    # makes distinct states, also where these are all that there are.
    last, total = 0, 1
    while last < len(space) and total < 4 * count:
        total, last = total * sizes[last], last + 1
    start = torch.randint(total, (states.shape[0], 1), device=device)
    code = (start + torch.arange(count, device=device)) % total
    for d in range(last):
        spare[..., d] = (code % sizes[d]).to(spare.dtype)
        code = code // sizes[d]
    both = torch.cat([states, spare], dim=1)
    repeated = duplicates(space.keys(space.pack(both)))
    first = repeated.to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
    return both.gather(1, first.unsqueeze(-1).expand(-1, -1, len(space)))


class FitnessProportional:
    r"""
    Parents drawn with replacement in proportion to :math:`\log p(x, z) - \min_z \log p(x, z)`,
    normalised per datum, so that every state but the worst can become a parent.
    """

    def __call__(self, log_joint: Tensor, count: int) -> Tensor:
        possible = log_joint > -torch.inf
        lowest = log_joint.masked_fill(~possible, torch.inf).amin(1, keepdim=True)
        fitness = (log_joint - lowest).masked_fill(~possible, 0).nan_to_num(0.0, 0.0, 0.0)
        total = fitness.cumsum(1)
        # A population of equals has no fitness to go by.
        steps = torch.arange(1, log_joint.shape[1] + 1, device=log_joint.device)
        total = torch.where(total[:, -1:] > 0, total, steps.to(total))
        at = torch.rand(len(total), count, dtype=total.dtype, device=total.device) * total[:, -1:]
        found = torch.searchsorted(total, at, right=True)
        return found.clamp_max(log_joint.shape[1] - 1)


class UniformParents:
    """Parents drawn uniformly, without replacement while there are enough states."""

    def __call__(self, log_joint: Tensor, count: int) -> Tensor:
        order = torch.rand_like(log_joint) - 2.0 * log_joint.isneginf().to(log_joint)
        return _repeat(order.topk(min(count, log_joint.shape[1]), dim=1).indices, count)


class GreedyParents:
    """The best states are the parents."""

    def __call__(self, log_joint: Tensor, count: int) -> Tensor:
        return _repeat(log_joint.topk(min(count, log_joint.shape[1]), dim=1).indices, count)


def _repeat(index: Tensor, count: int) -> Tensor:
    return index.repeat(1, -(-count // index.shape[1]))[:, :count]


class OnePointCrossover:
    """Neighbouring parents exchange their entries beyond a random point, one for each pair."""

    def __call__(self, states: Tensor) -> Tensor:
        rows, count, size = states.shape
        if count < 2 or size < 2:
            return states
        pairs = count // 2
        cut = torch.randint(1, size, (rows, pairs, 1), device=states.device)
        beyond = torch.arange(size, device=states.device) >= cut
        left, right = states[:, 0 : 2 * pairs : 2], states[:, 1 : 2 * pairs : 2]
        children = [torch.where(beyond, right, left), torch.where(beyond, left, right)]
        mixed = torch.stack(children, dim=2).flatten(1, 2)
        return torch.cat([mixed, states[:, 2 * pairs :]], dim=1)


@dataclass
class Parents:
    """
    What a mutation may look at.

    :ivar space: the entries, their values and their moves.
    :ivar states: the parents, shape ``[E, P, D]``.
    :ivar population: all states, shape ``[E, S, D]``.
    :ivar log_joint: of the population, shape ``[E, S]``.
    :ivar keys: of the population, sorted, shape ``[E, S]``.
    :ivar frozen: entries that do not exist (masked out), ``[E, P, D]``, or None.
    :ivar gains: the linearised change of log p under each move, shape ``[E, P, M]``; there only if
        the mutation asks for it with ``informed``.
    """

    space: StateSpace
    states: Tensor
    population: Tensor
    log_joint: Tensor
    keys: Tensor
    frozen: Tensor | None = None
    gains: Tensor | None = None

    def allowed(self) -> Tensor:
        """The moves to states that the population does not have, shape ``[E, P, M]``."""
        device, space = self.states.device, self.space
        entry = space.table("entry", device)
        current = self.states.index_select(-1, entry).long()
        value = space.moved(current)
        # Keys are linear in the entries.
        own = space.keys(space.pack(self.states)).unsqueeze(-1)
        keys = (own + (value - current) * space.unit_keys(device)[entry]).flatten(1)
        at = torch.searchsorted(self.keys, keys).clamp_max(self.keys.shape[1] - 1)
        new = (self.keys.gather(1, at) != keys).reshape(value.shape)
        if any(space.ordinal):
            new = new & (value >= 0) & (value < space.table("move size", device))
        if self.frozen is not None:
            new = new & ~self.frozen[..., space.table("entry", device)]
        return new


class Mutation(ABC):
    """
    Makes children, each by one move, the children of one parent by different moves.

    A subclass says which moves it prefers; one that changes more than single entries overrides
    :meth:`__call__`.

    :cvar bool informed: whether ``parents.gains`` is needed, which costs a backward pass.
    """

    informed = False

    @abstractmethod
    def scores(self, parents: Parents) -> Tensor:
        """Log propensities of the moves, broadcast to ``[E, P, M]``."""

    def __call__(self, parents: Parents, count: int) -> Tensor:
        """
        :param int count: children of each parent.
        :returns: shape ``[E, P, C, D]``; C is less than ``count`` where there are fewer moves.
        """
        space, states = parents.space, parents.states
        allowed = parents.allowed()
        scores = self.scores(parents).expand(allowed.shape)
        noise = -torch.empty_like(scores).exponential_().log()
        # Gumbel-top-k: distinct moves with the propensities of a draw without replacement.
        scores = (scores + noise).masked_fill(~allowed, -torch.inf)
        moves = scores.topk(min(count, space.num_moves), dim=-1, sorted=False).indices
        entry = space.table("entry", states.device)[moves]
        current = states.gather(-1, entry).long()
        # What is not allowed but had to be taken changes nothing, and is dropped as a repetition.
        value = torch.where(allowed.gather(-1, moves), space.moved(current, moves), current)
        children = states.unsqueeze(2).expand(-1, -1, moves.shape[-1], -1)
        return children.scatter(-1, entry.unsqueeze(-1), value.unsqueeze(-1).to(states.dtype))


class UniformFlips(Mutation):
    """A move of a uniformly drawn entry."""

    def scores(self, parents: Parents) -> Tensor:
        return _share(parents)


class SparseFlips(Mutation):
    r"""
    Moves that lead towards the mean activity of the minibatch.

    The activity of a state is the number of its entries that are not zero, and the target is its
    mean under the truncated posteriors of the minibatch, which for a Bernoulli prior is the sum
    of :math:`\pi` at its optimum. A child's expected activity is its parent's, moved to the target
    by at most ``1 - 2 * floor``.

    :param float floor: the least probability of either direction.
    """

    def __init__(self, floor: float = 0.05) -> None:
        if not 0 < floor <= 0.5:
            raise ValueError(f"floor must be a number in (0, 0.5], got {floor!r}")
        self.floor = floor

    def scores(self, parents: Parents) -> Tensor:
        share = _share(parents)
        weight = parents.log_joint.softmax(1).nan_to_num(0.0)
        counts = (parents.population != 0).sum(-1)
        target = (weight * counts).sum() / weight.sum().clamp_min(1e-6)
        on = parents.states != 0
        active = on.sum(-1, keepdim=True).to(share)
        up = (0.5 + 0.5 * (target - active)).clamp(self.floor, 1 - self.floor)
        at = on[..., parents.space.table("entry", on.device)]
        idle = (on.shape[-1] - active).clamp_min(1)
        return share + torch.where(
            at, (1 - up).log() - active.clamp_min(1).log(), up.log() - idle.log()
        )


class InformedFlips(Mutation):
    r"""
    Moves drawn by what the gradient says about them [2]: in proportion to :math:`\exp(d / 2)`,

    .. math:: d_i = (1 - 2 z_i) \, \partial \log p(x, z) / \partial z_i

    for a Bernoulli entry, and likewise for one-hot entries and counts. It costs one forward and
    backward pass at the parents. It only proposes: states are judged by their exact density.
    Entries through which the model passes no gradient count as changing nothing.

    :param float uniform: the share of parents whose children are drawn uniformly instead, so that
        no state is out of reach where gradients mislead.
    """

    informed = True

    def __init__(self, uniform: float = 0.1) -> None:
        if not 0 <= uniform <= 1:
            raise ValueError(f"uniform must be a share between 0 and 1, got {uniform!r}")
        self.uniform = uniform

    def scores(self, parents: Parents) -> Tensor:
        share = _share(parents)
        if parents.gains is None:
            return share
        gains = parents.gains.nan_to_num(0.0, 0.0, 0.0) / 2
        blind = torch.rand(*gains.shape[:2], 1, device=gains.device) < self.uniform
        return share + gains.masked_fill(blind, 0.0)


def _share(parents: Parents) -> Tensor:
    share = parents.space.table("log_share", parents.states.device)
    return share.to(parents.log_joint.dtype)


@dataclass(frozen=True)
class EvolutionaryUpdate:
    """
    One E-step's search: in each generation parents are chosen, mixed and mutated, and the best of
    old states and children are kept.

    :param int num_parents: parents of a generation.
    :param int num_children: children of each parent.
    :param int num_generations: generations of one step.
    :param parents: chooses parents: :class:`FitnessProportional`, :class:`UniformParents`,
        :class:`GreedyParents`, or a function of the log joint ``[E, S]`` and the number P that
        returns indices ``[E, P]``.
    :param mutation: :class:`InformedFlips`, :class:`UniformFlips`, :class:`SparseFlips`, or another
        :class:`Mutation`; a function of :class:`Parents` and the number of children that returns
        states ``[E, P, C, D]`` will do.
    :param crossover: :class:`OnePointCrossover`, None, or a function of states ``[E, P, D]``.
    :raises ValueError: for numbers that are no ints of at least 1 (``num_generations``: of at
        least 0).

    Example::

        >>> EvolutionaryUpdate(num_parents=10, num_children=9, num_generations=4).num_evaluations
        360
    """

    num_parents: int = 5
    num_children: int = 4
    num_generations: int = 1
    parents: Selection = field(default_factory=FitnessProportional)
    mutation: Callable[[Parents, int], Tensor] = field(default_factory=InformedFlips)
    crossover: Crossover | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_parents", 1), ("num_children", 1), ("num_generations", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")

    @property
    def num_evaluations(self) -> int:
        """The children of a datum in one step, at most."""
        return self.num_parents * self.num_children * self.num_generations

    @property
    def informed(self) -> bool:
        """Whether the mutation looks at gradients."""
        return bool(getattr(self.mutation, "informed", False))
