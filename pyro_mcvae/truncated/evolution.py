r"""
Evolutionary search for discrete states of high joint density [1].

Populations have shape ``[E, S]``: S distinct states for each of E data. Operators are objects:
selections choose parents, crossovers mix them, mutations change single entries of them.

[1] Guiraud, Drefs, Lücke (2021), *Direct Evolutionary Optimization of Variational Autoencoders
with Binary Latents*.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.truncated.mutation import InformedFlips, Parents
from pyro_mcvae.truncated.states import StateSpace

__all__ = [
    "EvolutionaryUpdate",
    "FitnessProportional",
    "GreedyParents",
    "OnePointCrossover",
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
    device = states.device
    # Of counts that may be many as many values as are wanted, near zero and ever farther apart.
    both = zip(space.sizes, space.ordinal, strict=True)
    sizes = tuple(min(n, count) if many else n for n, many in both)
    cycle = torch.arange(count, device=device) % states.shape[1]
    spare = states.index_select(1, cycle).clone()
    # As many leading entries as have enough values: counting through them from a random start
    # makes distinct states, also where these are all that there are.
    last, total = 0, 1
    while last < len(space) and total < (4 if sizes[:last] == space.sizes[:last] else 1) * count:
        total, last = total * sizes[last], last + 1
    start = torch.randint(total, (states.shape[0], 1), device=device)
    code = (start + torch.arange(count, device=device)) % total
    for d in range(last):
        at = code % sizes[d]
        spare[..., d] = _ladder(space.sizes[d], sizes[d], device)[at].to(spare.dtype)
        code = code // sizes[d]
    found = torch.cat([states, spare], dim=1)
    repeated = duplicates(space.keys(space.pack(found)))
    first = repeated.to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
    return found.gather(1, first.unsqueeze(-1).expand(-1, -1, len(space)))


def _ladder(size: int, count: int, device: torch.device) -> Tensor:
    """``count`` of the values below ``size``, from zero to the last one."""
    every = torch.arange(count, device=device)
    if count == size:
        return every
    far = torch.logspace(0, math.log10(size), count, dtype=torch.double, device=device) - 1
    return torch.maximum(every, far.round().long().clamp_max(size - 1))


class FitnessProportional:
    r"""
    Parents drawn with replacement in proportion to

    .. math:: f(z) + \tfrac{1}{10} \bar{f}, \qquad
        f(z) = \log p(x, z) - \min_{z'} \log p(x, z') ,

    per datum, with the mean :math:`\bar{f}` over its states: every state that is possible can
    become a parent, also the worst, through which alone a better one may be reached.

    Example::

        >>> parents = FitnessProportional()(torch.tensor([[-9.0, -9.0, -3.0]]), 10_000)
        >>> bool(abs((parents == 2).double().mean() - 6.2 / 6.6) < 0.02)
        True
        >>> update = EvolutionaryUpdate(parents=FitnessProportional())
    """

    _FLOOR = 0.1

    def __call__(self, log_joint: Tensor, count: int) -> Tensor:
        possible = log_joint > -torch.inf
        lowest = log_joint.masked_fill(~possible, torch.inf).amin(1, keepdim=True)
        fitness = (log_joint - lowest).masked_fill(~possible, 0).nan_to_num(0.0, 0.0, 0.0)
        fitness = fitness + self._FLOOR * fitness.mean(1, keepdim=True) * possible
        total = fitness.cumsum(1)
        # A population of equals has no fitness to go by.
        steps = torch.arange(1, log_joint.shape[1] + 1, device=log_joint.device)
        total = torch.where(total[:, -1:] > 0, total, steps.to(total))
        at = torch.rand(len(total), count, dtype=total.dtype, device=total.device) * total[:, -1:]
        found = torch.searchsorted(total, at, right=True)
        return found.clamp_max(log_joint.shape[1] - 1)


class UniformParents:
    """
    Parents drawn uniformly, without replacement while there are enough states.

    Example::

        >>> UniformParents()(torch.tensor([[-9.0, -1.0, -3.0]]), 3).sort().values
        tensor([[0, 1, 2]])
    """

    def __call__(self, log_joint: Tensor, count: int) -> Tensor:
        order = torch.rand_like(log_joint) - 2.0 * log_joint.isneginf().to(log_joint)
        return _repeat(order.topk(min(count, log_joint.shape[1]), dim=1).indices, count)


class GreedyParents:
    """
    The best states are the parents.

    Example::

        >>> GreedyParents()(torch.tensor([[-9.0, -1.0, -3.0]]), 2)
        tensor([[1, 2]])
    """

    def __call__(self, log_joint: Tensor, count: int) -> Tensor:
        return _repeat(log_joint.topk(min(count, log_joint.shape[1]), dim=1).indices, count)


def _repeat(index: Tensor, count: int) -> Tensor:
    return index.repeat(1, -(-count // index.shape[1]))[:, :count]


class OnePointCrossover:
    """
    Neighbouring parents exchange their entries beyond a random point, one for each pair.

    Example::

        >>> children = OnePointCrossover()(torch.tensor([[[0, 0, 0], [1, 1, 1]]]))
        >>> children.sum(1)
        tensor([[1, 1, 1]])
    """

    def __call__(self, states: Tensor) -> Tensor:
        num_data, count, size = states.shape
        if count < 2 or size < 2:
            return states
        pairs = count // 2
        cut = torch.randint(1, size, (num_data, pairs, 1), device=states.device)
        beyond = torch.arange(size, device=states.device) >= cut
        left, right = states[:, 0 : 2 * pairs : 2], states[:, 1 : 2 * pairs : 2]
        children = [torch.where(beyond, right, left), torch.where(beyond, left, right)]
        mixed = torch.stack(children, dim=2).flatten(1, 2)
        return torch.cat([mixed, states[:, 2 * pairs :]], dim=1)


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
        least 0), and for operators that cannot be called.

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
            check_count(name, value, least)
        for name, example in (
            ("parents", "FitnessProportional()"),
            ("mutation", "UniformFlips()"),
            ("crossover", "None or OnePointCrossover()"),
        ):
            value = getattr(self, name)
            if not callable(value) and not (name == "crossover" and value is None):
                raise ValueError(
                    f"{name} must be an operator such as {example}, or a function, got {value!r}"
                )

    @property
    def num_evaluations(self) -> int:
        """The children of a datum in one step, at most."""
        return self.num_parents * self.num_children * self.num_generations

    @property
    def informed(self) -> bool:
        """Whether the mutation looks at gradients."""
        return bool(getattr(self.mutation, "informed", False))
