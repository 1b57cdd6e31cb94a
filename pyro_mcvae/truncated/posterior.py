"""What one asks of a truncated posterior: expectations, marginals, modes, draws, entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from pyro import distributions as dist
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor

from pyro_mcvae.ops.importance import normalized_weights
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.sites import PlateKey, plate_frames, plate_key
from pyro_mcvae.programs.types import Site
from pyro_mcvae.truncated.joint import JointRuns
from pyro_mcvae.truncated.layout import StateLayout
from pyro_mcvae.truncated.search import Populations

__all__ = ["StatePosterior"]


class StatePosterior:
    r"""
    The truncated posteriors of the data of one call, :math:`q_n(z)` on S states each.

    Made by :meth:`TruncatedPosterior.posterior`; without gradients.

    :ivar values: for each discrete site its value in every state, ``[S, *batch, *event]``.
    :ivar populations: the states as they are kept, by block.
    :ivar weighted: the run of the model with all states.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Bernoulli(0.5))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> x = torch.tensor([0.5, 3.0])
        >>> posterior = TruncatedPosterior(model, num_states=2).posterior(x)
        >>> torch.allclose(posterior.marginals()["z"], (x - 0.5).sigmoid())
        True
        >>> posterior.map()["z"][1]
        tensor(1.)
    """

    def __init__(
        self, runs: JointRuns, populations: Populations, sample: WeightedParticles
    ) -> None:
        self.runs, self.populations, self.weighted = runs, populations, sample
        self.values: dict[str, Tensor] = {}
        for b, layout in runs.layouts.searched:
            population, data_index = populations[b], runs.data_index[b]
            assert population is not None
            assert data_index is not None
            self.values.update(layout.values(population.states, data_index))

    @property
    def subsamples(self) -> dict[str, Tensor]:
        """The minibatch: the indices of each plate."""
        return self.runs.subsamples

    @cached_property
    def log_joint(self) -> Tensor:
        """log p(x_n, z) of every state, ``[S, *plates]`` (``[S, elements]`` for several blocks)."""
        return self.runs.mask_impossible(self.weighted, self.weighted.log_weight)

    @property
    def weights(self) -> Tensor:
        """q_n(z), of the same shape, summing to one over the states."""
        return normalized_weights(self.log_joint)

    @property
    def free_energy(self) -> Tensor:
        """The bound on log p(x_n) of each datum: ``[*plates]``."""
        # A block without discrete sites has one draw, the same in every row.
        parts = [
            own[:1] if population is None else own.logsumexp(0, keepdim=True)
            for own, population in zip(
                self.weighted.split(self.log_joint), self.populations, strict=True
            )
        ]
        return self.weighted.join(parts)[0]

    def entropy(self) -> Tensor:
        """The entropy of q_n in nats: ``[*plates]``."""
        # A weight that is rounded to more than 1 would make it negative.
        return torch.special.entr(self.weights).sum(0).clamp_min(0.0)

    def expectation(
        self, function: Callable[[Mapping[str, Tensor]], Tensor], plate: str | None = None
    ) -> Tensor:
        r"""
        :math:`\langle f(z) \rangle = \sum_z q_n(z) f(z)`.

        :param function: maps the sites' values, each ``[S, *batch, *event]``, to a tensor
            ``[S, *batch, ...]``, as a decoder does. The batch dims are those of all plates, of size
            1 where a site lies in none; what is summed over plates nested in a data plate keeps
            their dims (``keepdim=True``).
        :param str plate: the data plate that is meant, where a program has several side by side:
            the function is given the values of its sites only.
        :returns: shape ``[*batch, ...]``.
        :raises ValueError: for a result of another shape, and for a program with several data
            plates if ``plate`` names none of them.
        """
        b, layout = self._block_of_plate(plate)
        value = function({name: self.values[name] for name in layout.sites})
        weight = self._aligned(b, self.weights, value.dim())
        self._check_batch(value, weight)
        return _weighted_sum(weight, value)

    def marginals(self) -> dict[str, Tensor]:
        """
        The posterior mean of each site, ``[*batch, *event]``; of a categorical site the
        probabilities of its categories, ``[*batch, *event, K]``.
        """
        found = {}
        for b, layout in self.runs.layouts.searched:
            for name, spec in layout.sites.items():
                value = self.values[name]
                if not spec.ordinal and not spec.one_hot and not value.is_floating_point():
                    value = torch.nn.functional.one_hot(value.long() - spec.low, spec.size)
                weight = self._aligned(b, self.weights, value.dim())
                found[name] = _weighted_sum(weight, value)
        return found

    def site(self, name: str) -> Site:
        """A site of the model's trace with all states side by side."""
        nodes = self.weighted.runs[0].model_trace.nodes
        if len(self.weighted.runs) > 1:
            raise ValueError("the states were run one by one: pass vectorize=True, which says why")
        if name not in nodes:
            raise ValueError(f"the model has no site '{name}', but {sorted(nodes)}")
        return nodes[name]

    def mean_at(self, site: Site, value: Tensor) -> Tensor:
        """
        The posterior mean of what was computed at a site of the model.

        :param value: broadcast to ``[S, *batch, *event]``, where the site lies in a data plate.
        :returns: ``[*batch, *event]``.
        :raises ValueError: for a site outside of all data plates.
        """
        b = self.weighted.block_of[0].get(FactorKey("model", site["name"]))
        if b is None or self.runs.layouts.blocks[b] is None:
            raise ValueError(
                f"site '{site['name']}' lies in no plate of discrete latents, so that no truncated "
                f"posterior weighs its values"
            )
        dim = 1 + self.runs.layouts.nesting + site["fn"].event_dim
        value = value.reshape((1,) * (dim - value.dim()) + value.shape)
        return _weighted_sum(self._aligned(b, self.weights, dim), value)

    def map(self) -> dict[str, Tensor]:
        """The most probable state that is known: values ``[*batch, *event]``."""
        found = {}
        for b, layout in self.runs.layouts.searched:
            best = self.weighted.split(self.log_joint)[b].argmax(0, keepdim=True)
            for name in layout.sites:
                found[name] = self.gather(b, name, best)[0]
        return found

    def sample(self, count: int) -> dict[str, Tensor]:
        """Draws from q_n: values ``[count, *batch, *event]``."""
        found = {}
        for b, layout in self.runs.layouts.searched:
            index = dist.Categorical(probs=self.block_weights(b)).sample((count,))
            for name in layout.sites:
                found[name] = self.gather(b, name, index)
        return found

    def block_weights(self, b: int) -> Tensor:
        """The weights of one block's states in the shape of its batch dims, ``[*batch, S]``."""
        weight = self.weighted.split(self.weights)[b]
        return self._batched(b, weight).movedim(0, -1)

    def first_site(self, name: str) -> Site:
        """A site of the model as the first of the runs shows it."""
        return self.weighted.runs[0].model_trace.nodes[name]

    def frames(self) -> dict[PlateKey, CondIndepStackFrame]:
        """The plates around the discrete sites, as they are in this minibatch."""
        names = {n for _, layout in self.runs.layouts.searched for n in layout.sites}
        return {plate_key(f): f for n in names for f in plate_frames(self.first_site(n))}

    def _batched(self, b: int, weight: Tensor) -> Tensor:
        """``[S, *plates]`` to ``[S, *batch]``, 1 where a batch dim is not the block's."""
        dims = self.runs.layouts.structure.blocks[b].dims
        sizes = iter(weight.shape[1:])
        depth = max((-d for d in dims), default=0)
        batch = [next(sizes) if d in dims else 1 for d in range(-depth, 0)]
        return weight.reshape(weight.shape[0], *batch)

    def _aligned(self, b: int, weight: Tensor, dim: int) -> Tensor:
        """A block's part of ``[S, *plates]`` as ``[S, *batch, 1, ...]``, ``dim`` dims in all."""
        nesting = self.runs.layouts.nesting
        weight = self._batched(b, self.weighted.split(weight)[b])
        batch = (1,) * (nesting + 1 - weight.dim()) + weight.shape[1:]
        return weight.reshape(weight.shape[0], *batch, *(1,) * (dim - nesting - 1))

    def _block_of_plate(self, plate: str | None) -> tuple[int, StateLayout]:
        searched = self.runs.layouts.searched
        found = [s for s in searched if plate is None or plate in (p.name for p in s[1].plates)]
        if len(found) != 1:
            names = ", ".join(repr(layout.plates[-1].name) for _, layout in searched)
            raise ValueError(
                f"plate={plate!r} names no single one of the data plates, which have weights of "
                f"their own: pass one of {names}"
            )
        return found[0]

    def _check_batch(self, value: Tensor, weight: Tensor) -> None:
        """Refuse a result that would meet the weights of other data."""
        nesting = self.runs.layouts.nesting
        own, batch = value.shape[: nesting + 1], weight.shape[: nesting + 1]
        if len(own) != len(batch) or any(
            n not in (1, size) for n, size in zip(own, batch, strict=True) if size != 1
        ):
            raise ValueError(
                f"the function returned shape {tuple(value.shape)}, and the weights of states and "
                f"data have {tuple(batch)}: return [states, *batch, ...] with as many batch dims "
                f"as the sites' values have ({nesting}), as keepdim=True keeps them"
            )

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


def _weighted_sum(weight: Tensor, value: Tensor) -> Tensor:
    """The sum over states; those of no weight do not count, whatever their value."""
    return torch.where(weight == 0, 0.0, weight * value).sum(0)
