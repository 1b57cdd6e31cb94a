"""The E-step: populations of states, improved under the exact joint density."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.truncated.evolution import EvolutionaryUpdate, Parents
from pyro_mcvae.truncated.joint import JointRuns, Leaves
from pyro_mcvae.truncated.state_layout import DataIndex, StatesError
from pyro_mcvae.truncated.states import StateSpace, duplicates, keep_best, take_rows


@dataclass(frozen=True)
class PriorDraws:
    """
    Proposals for a truncated posterior's search: states drawn from the model.

    :param int count: the number of draws per datum and step.
    :raises ValueError: if it is not an int of at least 1.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Bernoulli(0.5 * torch.ones(9)).to_event(1))
        ...         pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x)
        >>> guide = TruncatedPosterior(model, num_states=8, proposals=PriorDraws(2))
    """

    count: int = 4

    def __post_init__(self) -> None:
        check_count("count", self.count)


# Called with the model's arguments, returns for each discrete site values [C, *batch, *event].
Proposals = Callable[..., Mapping[str, Tensor]]


@dataclass
class Population:
    """
    The states of the data of a minibatch.

    :ivar packed: the states, packed: ``[E, S, bytes]``.
    :ivar keys: their keys, shape ``[E, S]``.
    :ivar log_joint: their log joint, shape ``[E, S]``; with a graph if gradients are enabled.
    """

    space: StateSpace
    packed: Tensor
    keys: Tensor
    log_joint: Tensor

    @property
    def states(self) -> Tensor:
        """Unpack the states, on access only, because few are needed: ``[E, S, D]``."""
        return self.space.unpack(self.packed)

    def merged(self, other: Population) -> Population:
        """Return the best distinct states of both populations, as many as in this one."""
        keys = torch.cat([self.keys, other.keys], dim=1)
        log_joint = torch.cat([self.log_joint, other.log_joint], dim=1)
        best = keep_best(log_joint.detach(), duplicates(keys), self.keys.shape[1])
        packed = take_rows(torch.cat([self.packed, other.packed], dim=1), best)
        return Population(self.space, packed, keys.gather(1, best), log_joint.gather(1, best))


def evaluate(
    runs: JointRuns, stored: Callable[[DataIndex], Tensor], count: int
) -> tuple[Population, WeightedParticles]:
    """
    Evaluate all states stored for the data of a minibatch.

    :param stored: returns the packed states of a minibatch, ``[E, S, bytes]``.
    :param count: their number S.
    """
    packed: list[Tensor] = []
    space = runs.layouts.layout.space

    def load() -> Tensor:
        packed.append(stored(runs.data))
        return space.unpack(packed[0])

    sample = runs.run(load, count)
    joint = runs.log_joint_rows(sample)
    return Population(space, packed[0], space.keys(packed[0]), joint), sample


def evolve(runs: JointRuns, population: Population, evolution: EvolutionaryUpdate) -> Population:
    """Search by all generations of an update; the free energy never decreases."""
    for _ in range(evolution.num_generations):
        log_joint = population.log_joint.detach()
        index = evolution.parents(log_joint, evolution.num_parents)
        states = population.space.unpack(take_rows(population.packed, index))
        parents = Parents(population.space, states, population.packed, log_joint, population.keys)
        # In inference mode there are no gradients: the mutation then draws uniformly.
        if evolution.informed and not torch.is_inference_mode_enabled():
            parents.flip_scores = _flip_scores(runs, states)
        children = evolution.mutation(parents, evolution.num_children).flatten(1, 2)
        population = _merge(runs, population, children)
    return population


def propose(
    runs: JointRuns, population: Population, proposals: PriorDraws | Proposals
) -> Population:
    """Merge proposed states: draws from the model, or the user's proposals."""
    layout = runs.layouts.layout
    if isinstance(proposals, PriorDraws):
        sample = runs.run(None, proposals.count)
        nodes = [run.model_trace.nodes for run in sample.runs]
        values: Mapping[str, Tensor] = {
            n: nodes[0][n]["value"]
            if sample.runs[0].leading is not None
            else torch.stack([t[n]["value"] for t in nodes])
            for n in layout.sites
        }
    else:
        values = proposals(*runs.args, **runs.kwargs)
        missing = [name for name in layout.sites if name not in values]
        if missing:
            raise StatesError(
                f"proposals= returned values of {sorted(values)}, but not of '{missing[0]}': "
                f"return a value [count, *batch, *event] for each discrete site"
            )
    return _merge(runs, population, layout.states(values, runs.data))


def _merge(runs: JointRuns, population: Population, states: Tensor) -> Population:
    """Evaluate more states, ``[E, C, D]``, and keep the best."""
    joint = runs.log_joint_rows(runs.run(states, states.shape[1]))
    packed = population.space.pack(states)
    return population.merged(
        Population(population.space, packed, population.space.keys(packed), joint)
    )


def _flip_scores(runs: JointRuns, states: Tensor) -> Tensor | None:
    """
    Return the linearized change of the log joint under each move of some states, ``[E, C, D]``.

    :returns: shape ``[E, C, M]``; None if the model passes no gradient.
    """
    leaves: Leaves = {}
    with torch.enable_grad():
        total = runs.run(states, states.shape[1], leaves).log_weight
        total = total.masked_fill(~total.detach().isfinite(), 0.0).sum()
    if not leaves or not total.requires_grad:
        return None
    raw = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    gradients: dict[str, Tensor | None] = {}
    for name in runs.layouts.layout.sites:
        parts = [g for (n, _), g in zip(leaves, raw, strict=True) if n == name]
        present = [g for g in parts if g is not None]
        if parts and len(present) == len(parts):
            gradients[name] = torch.stack(present) if len(present) > 1 else present[0]
    return runs.layouts.layout.flip_scores(states, gradients, runs.data)
