"""The E-step: populations of states, evolved under the exact joint density."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.truncated.evolution import EvolutionaryUpdate, duplicates, keep_best
from pyro_mcvae.truncated.flip_scores import find_flip_scores
from pyro_mcvae.truncated.joint import JointRuns
from pyro_mcvae.truncated.layout import DataIndex, StateLayout
from pyro_mcvae.truncated.mutation import Packed, PackedParents, Parents
from pyro_mcvae.truncated.states import StateSpace

__all__ = ["Population", "Populations", "evaluate", "evolve", "merge", "take_rows"]


@dataclass
class Population:
    """
    The states of the data of a minibatch in one block.

    :ivar packed: the states, packed: ``[E, S, bytes]``.
    :ivar keys: shape ``[E, S]``.
    :ivar log_joint: shape ``[E, S]``; with a graph where gradients are enabled.
    :ivar frozen: which entries are masked out in each state, ``[E, S, D]``; None without masks.
    """

    space: StateSpace
    packed: Tensor
    keys: Tensor
    log_joint: Tensor
    frozen: Tensor | None = None

    @property
    def states(self) -> Tensor:
        """Unpacked when asked for, since few are: ``[E, S, D]``."""
        return self.space.unpack(self.packed)

    def merged(self, other: Population) -> Population:
        """The best of both, as many as there are here, all distinct."""
        keys = torch.cat([self.keys, other.keys], dim=1)
        log_joint = torch.cat([self.log_joint, other.log_joint], dim=1)
        best = keep_best(log_joint.detach(), duplicates(keys), self.keys.shape[1])
        packed = take_rows(torch.cat([self.packed, other.packed], dim=1), best)
        frozen = None
        if self.frozen is not None and other.frozen is not None:
            frozen = take_rows(torch.cat([self.frozen, other.frozen], dim=1), best)
        keys, log_joint = keys.gather(1, best), log_joint.gather(1, best)
        return Population(self.space, packed, keys, log_joint, frozen)


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[e, index[e, i]]``, shape ``[E, I, width]``; several times as fast as ``gather``."""
    start = torch.arange(len(rows), device=rows.device).unsqueeze(-1) * rows.shape[1]
    flat = rows.flatten(0, 1).index_select(0, (index + start).flatten())
    return flat.reshape(*index.shape, rows.shape[-1])


Populations = list["Population | None"]


def evaluate(
    runs: JointRuns, stored: Callable[[StateLayout, DataIndex], Tensor], count: int
) -> tuple[Populations, WeightedParticles]:
    """
    Evaluate all states that are kept for the data of a minibatch.

    :param stored: gives a block's packed states of a minibatch, ``[E, S, bytes]``.
    :param count: how many, S.
    """
    packed: list[Tensor | None] = [None] * len(runs.layouts.blocks)

    def load(b: int) -> Tensor:
        layout, data_index = runs.block(b)
        packed[b] = at = stored(layout, data_index)
        return layout.space.unpack(at)

    sample = runs.run(load, count)
    return [
        None if at is None else _population(runs, sample, b, at) for b, at in enumerate(packed)
    ], sample


def _population(runs: JointRuns, sample: WeightedParticles, b: int, packed: Tensor) -> Population:
    layout = runs.layouts.blocks[b]
    assert layout is not None
    space = layout.space
    frozen = runs.frozen(sample, b) if runs.layouts.masked else None
    joint = runs.log_joint(sample)[b]
    return Population(space, packed, space.keys(packed), joint, frozen)


def evolve(runs: JointRuns, populations: Populations, evolution: EvolutionaryUpdate) -> Populations:
    """Search by all generations of an update; no population loses free energy."""
    if runs.layouts.masked and evolution.num_generations:
        # What is masked out has one value, or the same state would be counted repeatedly.
        bare = [
            None if p is None or p.frozen is None else p.states.masked_fill(p.frozen, 0)
            for p in populations
        ]
        populations = merge(runs, populations, bare)
    for _ in range(evolution.num_generations):
        children = [
            None if p is None else evolution.mutation(p, evolution.num_children).flatten(1, 2)
            for p in _choose(runs, populations, evolution)
        ]
        populations = merge(runs, populations, children)
    return populations


def _choose(
    runs: JointRuns, populations: Populations, evolution: EvolutionaryUpdate
) -> list[Parents | None]:
    parents: list[Parents | None] = []
    for population in populations:
        if population is None:
            parents.append(None)
            continue
        log_joint = population.log_joint.detach()
        index = evolution.parents(log_joint, evolution.num_parents)
        states, frozen = population.space.unpack(take_rows(population.packed, index)), None
        if evolution.crossover is not None:
            states = evolution.crossover(states)
        elif population.frozen is not None:
            frozen = take_rows(population.frozen, index)
        parents.append(
            PackedParents(
                population.space,
                states,
                Packed(population.packed),  # type: ignore[arg-type]
                log_joint,
                population.keys,
                frozen,
            )
        )
    # In inference mode there are no gradients to ask: the mutation then draws uniformly.
    if evolution.informed and not torch.is_inference_mode_enabled():
        count = evolution.num_parents
        scores = find_flip_scores(runs, [None if p is None else p.states for p in parents], count)
        for one, score in zip(parents, scores, strict=True):
            if one is not None:
                one.flip_scores = score
    return parents


def merge(runs: JointRuns, populations: Populations, children: list[Tensor | None]) -> Populations:
    """Evaluate further states, ``[E, C, D]`` for each block, and keep the best."""
    widest = max(c.shape[1] for c in children if c is not None)
    # Blocks of few moves have fewer children than others: they see some of them twice.
    wide = [
        c
        if c is None or c.shape[1] == widest
        else c[:, torch.arange(widest, device=c.device) % c.shape[1]]
        for c in children
    ]
    sample = runs.run(wide, widest)
    return [
        None if p is None or c is None else p.merged(_population(runs, sample, b, p.space.pack(c)))
        for b, (p, c) in enumerate(zip(populations, wide, strict=True))
    ]
