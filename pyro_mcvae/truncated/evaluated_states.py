"""The states of one call, evaluated: the run of the model with all of them, and their weights."""

from __future__ import annotations

from functools import cached_property

import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor

from pyro_mcvae.ops.importance import normalized_weights
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.plates import PlateKey, plate_frames, plate_key
from pyro_mcvae.programs.types import Site
from pyro_mcvae.truncated.joint import JointRuns
from pyro_mcvae.truncated.search import Populations

__all__ = ["EvaluatedStates", "weighted_sum"]


class EvaluatedStates:
    """
    What a :class:`StatePosterior` answers from.

    :ivar runs: the joint density of the call.
    :ivar populations: the states as they are kept, by block.
    :ivar sample: the run of the model with all states.
    :ivar values: for each discrete site its value in every state, ``[S, *batch, *event]``.
    """

    def __init__(
        self, runs: JointRuns, populations: Populations, sample: WeightedParticles
    ) -> None:
        self.runs, self.populations, self.sample = runs, populations, sample
        self.values: dict[str, Tensor] = {}
        for b, layout in runs.layouts.searched:
            population, data_index = populations[b], runs.data_index[b]
            assert population is not None
            assert data_index is not None
            self.values.update(layout.values(population.states, data_index))

    @cached_property
    def log_joint(self) -> Tensor:
        """log p(x_n, z) of every state, ``[S, *plates]`` (``[S, elements]`` for several blocks)."""
        return self.runs.mask_impossible(self.sample, self.sample.log_weight)

    @property
    def weights(self) -> Tensor:
        """q_n(z), of the same shape, summing to one over the states."""
        return normalized_weights(self.log_joint)

    def block_weights(self, b: int) -> Tensor:
        """The weights of one block's states in the shape of its batch dims, ``[*batch, S]``."""
        weight = self.sample.split(self.weights)[b]
        return self._batched(b, weight).movedim(0, -1)

    @property
    def subsamples(self) -> dict[str, Tensor]:
        """The minibatch: the indices of each plate."""
        return self.runs.subsamples

    def site(self, name: str) -> Site:
        """A site of the model's trace with all states side by side."""
        nodes = self.sample.runs[0].model_trace.nodes
        if len(self.sample.runs) > 1:
            raise ValueError("the states were run one by one: pass vectorize=True, which says why")
        if name not in nodes:
            raise ValueError(f"the model has no site '{name}', but {sorted(nodes)}")
        return nodes[name]

    def first_site(self, name: str) -> Site:
        """A site of the model as the first of the runs shows it."""
        return self.sample.runs[0].model_trace.nodes[name]

    def frames(self) -> dict[PlateKey, CondIndepStackFrame]:
        """The plates around the discrete sites, as they are in this minibatch."""
        names = {n for _, layout in self.runs.layouts.searched for n in layout.sites}
        return {plate_key(f): f for n in names for f in plate_frames(self.first_site(n))}

    def mean_at(self, site: Site, value: Tensor) -> Tensor:
        """
        The posterior mean of what was computed at a site of the model.

        :param value: broadcast to ``[S, *batch, *event]``, where the site lies in a data plate.
        :returns: ``[*batch, *event]``.
        :raises ValueError: for a site outside of all data plates.
        """
        b = self.sample.block_of[0].get(FactorKey("model", site["name"]))
        if b is None or self.runs.layouts.blocks[b] is None:
            raise ValueError(
                f"site '{site['name']}' lies in no plate of discrete latents, so that no truncated "
                f"posterior weighs its values"
            )
        dim = 1 + self.runs.layouts.nesting + site["fn"].event_dim
        value = value.reshape((1,) * (dim - value.dim()) + value.shape)
        return weighted_sum(self.aligned(b, self.weights, dim), value)

    def _batched(self, b: int, weight: Tensor) -> Tensor:
        """``[S, *plates]`` to ``[S, *batch]``, 1 where a batch dim is not the block's."""
        dims = self.runs.layouts.structure.blocks[b].dims
        sizes = iter(weight.shape[1:])
        depth = max((-d for d in dims), default=0)
        batch = [next(sizes) if d in dims else 1 for d in range(-depth, 0)]
        return weight.reshape(weight.shape[0], *batch)

    def aligned(self, b: int, weight: Tensor, dim: int) -> Tensor:
        """A block's part of ``[S, *plates]`` as ``[S, *batch, 1, ...]``, ``dim`` dims in all."""
        nesting = self.runs.layouts.nesting
        weight = self._batched(b, self.sample.split(weight)[b])
        batch = (1,) * (nesting + 1 - weight.dim()) + weight.shape[1:]
        return weight.reshape(weight.shape[0], *batch, *(1,) * (dim - nesting - 1))

    def gather(self, b: int, name: str, index: Tensor, leading: bool = True) -> Tensor:
        """
        A site's values in the states of an index.

        :param index: ``[K, *plates]``, or with ``leading=False`` batch-shaped, with the outside's
            own batch dims (particles, predictions) to the left of all plates.
        """
        value, nesting = self.values[name], self.runs.layouts.nesting
        if leading:
            index = self._batched(b, index)
            index = index.reshape(len(index), *(1,) * (nesting + 1 - index.dim()), *index.shape[1:])
        elif index.dim() < nesting:
            index = index.reshape((1,) * (nesting - index.dim()) + index.shape)
        cut = index.dim() - nesting
        outer, batch = index.shape[:cut], index.shape[cut:]
        event = value.shape[1 + nesting :]
        target = torch.broadcast_shapes(batch, value.shape[1 : 1 + nesting])
        at = index.reshape(-1, *batch, *(1,) * len(event))
        at = at.expand(-1, *target, *event)
        found = value.expand(-1, *target, *event).gather(0, at)
        site = self.first_site(name)
        depth = max(-f.dim for f in plate_frames(site) if f.dim is not None)
        # As many batch dims as the model gives the site, where none of the outside stand before.
        inner = target if any(n != 1 for n in outer) and not leading else target[nesting - depth :]
        return found.reshape(*outer, *inner, *event)


def weighted_sum(weight: Tensor, value: Tensor) -> Tensor:
    """The sum over states; those of no weight do not count, whatever their value."""
    return torch.where(weight == 0, 0.0, weight * value).sum(0)
