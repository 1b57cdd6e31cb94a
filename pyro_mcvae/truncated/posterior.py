"""Expectations, marginals, modes, draws and entropy of truncated posteriors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property

import pyro
import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_mcvae.ops.weights import normalized_weights
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.sites import is_random
from pyro_mcvae.programs.types import FactorKey, Site, plate_frames
from pyro_mcvae.truncated.joint import GuideDraws, JointRuns
from pyro_mcvae.truncated.search import Population

# What one asks of a truncated posterior: expectations, marginals, modes, draws, entropy.


class StatePosterior:
    r"""
    The truncated posteriors of the data of one call, :math:`q_n(z)` on S states each.

    Made by :meth:`TruncatedPosterior.posterior`; without gradients.

    :ivar runs: the joint density of the call, for those who build on it.
    :ivar population: the states as they are kept.
    :ivar particles: the run of the model with all states.

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
        self, runs: JointRuns, population: Population, particles: WeightedParticles
    ) -> None:
        self.runs, self.population, self.particles = runs, population, particles

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """For each discrete site its value in every state, ``[S, *batch, *event]``."""
        return self.runs.layouts.layout.values(self.population.states, self.runs.data)

    @cached_property
    def log_joint(self) -> Tensor:
        """log p(x_n, z) of every state, ``[S, *plates]``."""
        return self.runs.log_joint(self.particles)

    @cached_property
    def weights(self) -> Tensor:
        """q_n(z), of the same shape, summing to one over the states."""
        return normalized_weights(self.log_joint)

    @property
    def free_energy(self) -> Tensor:
        """The bound on log p(x_n) of each datum: ``[*plates]``."""
        return self.log_joint.logsumexp(0)

    def entropy(self) -> Tensor:
        """The entropy of q_n in nats: ``[*plates]``."""
        # A weight that is rounded to more than 1 would make it negative.
        return torch.special.entr(self.weights).sum(0).clamp_min(0.0)

    def expectation(self, function: Callable[[Mapping[str, Tensor]], Tensor]) -> Tensor:
        r"""
        :math:`\langle f(z) \rangle = \sum_z q_n(z) f(z)`.

        :param function: maps the sites' values, each ``[S, *batch, *event]``, to a tensor
            ``[S, *batch, ...]``, as a decoder does. The batch dims are those of all plates, of size
            1 where a site lies in none; what is summed over plates nested in the data plate keeps
            their dims (``keepdim=True``).
        :returns: shape ``[*batch, ...]``.
        :raises ValueError: for a result of another shape.
        """
        value = function(self.values)
        weight = self._aligned(value.dim())
        # Refuse a result that would meet the weights of other data.
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
        return _weighted_sum(weight, value)

    def marginals(self) -> dict[str, Tensor]:
        """
        The posterior mean of each site, ``[*batch, *event]``; of a categorical site the
        probabilities of its categories, ``[*batch, *event, K]``.
        """
        found = {}
        for name, spec in self.runs.layouts.layout.sites.items():
            value = self.values[name]
            if not spec.ordinal and not spec.one_hot and not value.is_floating_point():
                value = torch.nn.functional.one_hot(value.long() - spec.low, spec.size)
            found[name] = _weighted_sum(self._aligned(value.dim()), value)
        return found

    def map(self) -> dict[str, Tensor]:
        """The most probable state that is known: values ``[*batch, *event]``."""
        best = self._batched(self.log_joint.argmax(0, keepdim=True))
        return {name: self._gather(name, self._padded(best))[0] for name in self.values}

    def sample(self, count: int) -> dict[str, Tensor]:
        """Draws from q_n: values ``[count, *batch, *event]``."""
        index = dist.Categorical(probs=self._batch_weights).sample((count,))
        return {name: self._gather(name, self._padded(index)) for name in self.values}

    @property
    def _batch_weights(self) -> Tensor:
        """The weights in the shape of the plates' batch dims, ``[*batch, S]``."""
        return self._batched(self.weights).movedim(0, -1)

    def _site(self, name: str) -> Site:
        """
        A site of the model's trace with all states side by side.

        :raises ValueError: where the states were run one by one, and for no site of the model.
        """
        nodes = self.particles.runs[0].model_trace.nodes
        if len(self.particles.runs) > 1:
            raise ValueError("the states were run one by one: pass vectorize=True, which says why")
        if name not in nodes:
            raise ValueError(f"the model has no site '{name}', but {sorted(nodes)}")
        return nodes[name]

    def _mean_at(self, site: Site, value: Tensor) -> Tensor:
        """
        The posterior mean of what was computed at a site of the model.

        :param value: broadcast to ``[S, *batch, *event]``, where the site lies in a data plate.
        :returns: ``[*batch, *event]``.
        :raises ValueError: for a site outside the data plate.
        """
        if self.particles.block_of[0].get(FactorKey("model", site["name"])) is None:
            raise ValueError(
                f"site '{site['name']}' lies in no plate of discrete latents, so that no truncated "
                f"posterior weighs its values"
            )
        dim = 1 + self.runs.layouts.nesting + site["fn"].event_dim
        value = value.reshape((1,) * (dim - value.dim()) + value.shape)
        return _weighted_sum(self._aligned(dim), value)

    def _gather(self, name: str, index: Tensor, leading: bool = True) -> Tensor:
        """
        A site's values in the states of an index.

        :param index: batch-shaped, with a dim of draws to the left of all plates; or, with
            ``leading=False``, with the outside's own batch dims (particles, predictions).
        """
        value, nesting = self.values[name], self.runs.layouts.nesting
        index = index.reshape((1,) * (nesting - index.dim()) + index.shape)
        cut = index.dim() - nesting
        outer, batch = index.shape[:cut], index.shape[cut:]
        event = value.shape[1 + nesting :]
        target = torch.broadcast_shapes(batch, value.shape[1 : 1 + nesting])
        at = index.reshape(-1, *batch, *(1,) * len(event)).expand(-1, *target, *event)
        found = value.expand(-1, *target, *event).gather(0, at)
        frames = plate_frames(self.particles.runs[0].model_trace.nodes[name])
        depth = max(-f.dim for f in frames if f.dim is not None)
        # As many batch dims as the model gives the site, where none of the outside stand before.
        inner = target if any(n != 1 for n in outer) and not leading else target[nesting - depth :]
        return found.reshape(*outer, *inner, *event)

    def _batched(self, weight: Tensor) -> Tensor:
        """``[S, *plates]`` to ``[S, *batch]``, 1 where a batch dim is not the data's."""
        dims = self.particles.blocks[0].dims
        sizes = iter(weight.shape[1:])
        batch = [next(sizes) if d in dims else 1 for d in range(-max(-d for d in dims), 0)]
        return weight.reshape(weight.shape[0], *batch)

    def _padded(self, index: Tensor) -> Tensor:
        """``[K, *batch]`` with as many batch dims as all plates take."""
        missing = self.runs.layouts.nesting + 1 - index.dim()
        return index.reshape(len(index), *(1,) * missing, *index.shape[1:])

    def _aligned(self, dim: int) -> Tensor:
        """The weights as ``[S, *batch, 1, ...]``, ``dim`` dims in all."""
        weight = self._padded(self._batched(self.weights))
        return weight.reshape(*weight.shape, *(1,) * (dim - weight.dim()))


def _weighted_sum(weight: Tensor, value: Tensor) -> Tensor:
    """The sum over states; those of no weight do not count, whatever their value."""
    return torch.where(weight == 0, 0.0, weight * value).sum(0)


# A truncated posterior as a Pyro guide: its draws, in the places where the model has its sites.

_MARK = "_pyro_mcvae_states_of"

# Given draws of the other guide, the posterior of the discrete sites.
Ask = Callable[[GuideDraws], StatePosterior]


@contextmanager
def apart() -> Iterator[None]:
    """Hide runs from outer handlers, and outer plates, whose dim they may take, from runs."""
    # Pyro has no public way to free a dim for a while.
    allocator = poutine.runtime._DIM_ALLOCATOR
    stack, allocator._stack = allocator._stack, []
    try:
        with poutine.block():
            yield
    finally:
        allocator._stack = stack


def sample_states(ask: Ask, guide_trace: Trace, nesting: int) -> dict[str, Tensor]:
    """
    Draw a state of each datum, given the draws that ``guide`` has made for all to see.

    :param ask: answers with the truncated posterior given such draws.
    :param guide_trace: what ``guide`` has drawn, in whatever plates stand around it.
    :param nesting: how many batch dims are the programs' own.
    :returns: the values by site.
    """
    nodes = guide_trace.nodes
    made = [s for s in nodes.values() if s["type"] == "sample" and site_is_subsample(s)]
    chosen = {s["name"]: torch.as_tensor(s["value"]) for s in made}
    outer, draws = _per_particle(guide_trace, nesting)
    found = [ask(GuideDraws(values, chosen)) for values in draws]
    plates = _make_plates(found[0], frozenset(chosen))
    # Around this guide another minibatch may be set: that of the other particles of a step.
    before = found[0].runs.subsamples
    now = {n: plate.indices for n, plate in plates.items() if n in before}
    if any(not torch.equal(before[n].to(index), index) for n, index in now.items()):
        found = [ask(GuideDraws(values, {**chosen, **now})) for values in draws]
    layout = found[0].runs.layouts.layout
    weights = torch.stack([p._batch_weights for p in found])
    batch = weights.shape[1:-1]
    inner = (*(1,) * (nesting - len(batch)), *batch) if outer else batch
    with _entered(plates, [key.name for key in layout.plates]):
        index = pyro.sample(
            f"_{layout.name}_state",
            dist.Categorical(logits=weights.log().reshape(*outer, *inner, weights.shape[-1])),
            infer={"is_auxiliary": True, _MARK: tuple(layout.sites)},
        )
    values: dict[str, Tensor] = {}
    for name in layout.sites:
        site = found[0].particles.runs[0].model_trace.nodes[name]
        frames = sorted(plate_frames(site), key=lambda f: f.dim or 0)
        with _entered(plates, [f.name for f in frames]):
            value = found[0]._gather(name, index, leading=False)
            point = dist.Delta(value, event_dim=site["fn"].event_dim)
            values[name] = pyro.sample(name, point)
    return values


def drawn_from_states(site: Site) -> tuple[str, ...]:
    """The sites whose states a guide's site is the index of; nothing where it is no such index."""
    found: tuple[str, ...] = site["infer"].get(_MARK, ())
    return found


def _per_particle(
    guide_trace: Trace, nesting: int
) -> tuple[tuple[int, ...], list[dict[str, Tensor]]]:
    """
    The random draws of a guide, and of each element of the plates around it.

    :returns: the sizes of these plates' dims, and the draws of each of their elements.
    """
    sites = [s for s in guide_trace.nodes.values() if is_random(s)]
    shapes = {s["name"]: s["value"].shape for s in sites}
    cuts = {s["name"]: len(shapes[s["name"]]) - s["fn"].event_dim - nesting for s in sites}
    outer = torch.broadcast_shapes(*(shapes[n][: max(cut, 0)] for n, cut in cuts.items()))
    if not outer:
        return (), [{s["name"]: s["value"] for s in sites}]
    draws: list[dict[str, Tensor]] = [{} for _ in range(outer.numel())]
    for site in sites:
        name, own = site["name"], _own_shape(site, nesting)
        lead = shapes[name][: max(cuts[name], 0)]
        value = site["value"].reshape(*lead, *own).expand(*outer, *own)
        for one, part in zip(draws, value.reshape(-1, *own), strict=True):
            one[name] = part
    return tuple(outer), draws


def _own_shape(site: Site, nesting: int) -> torch.Size:
    """The shape of a draw that is made in the guide's own plates only."""
    value, fn = site["value"], site["fn"]
    depth = max((-f.dim for f in plate_frames(site) if f.dim and -f.dim <= nesting), default=0)
    batch = value.shape[: value.dim() - fn.event_dim][-nesting:] if nesting else torch.Size()
    # Outside of plates a draw has dims of size one, which the outer plates have put there.
    cut = len(batch) - depth
    keep = batch[cut:] if cut > 0 and all(n == 1 for n in batch[:cut]) else batch
    return keep + value.shape[value.dim() - fn.event_dim :]


def _make_plates(posterior: StatePosterior, known: frozenset[str]) -> dict[str, pyro.plate]:
    """The plates of the minibatch; those that the guide has made are not shown a second time."""
    nodes, subsamples = posterior.particles.runs[0].model_trace.nodes, posterior.runs.subsamples
    # One frame of each plate around the discrete sites, as they are in this minibatch.
    frames = {f.name: f for n in posterior.values for f in plate_frames(nodes[n])}
    made = {}
    for frame in frames.values():
        index, full = subsamples.get(frame.name), frame.full_size or frame.size
        with poutine.block() if frame.name in known else ExitStack():
            made[frame.name] = pyro.plate(frame.name, full, subsample=index, dim=frame.dim)
    return made


def _entered(plates: Mapping[str, pyro.plate], names: list[str]) -> ExitStack:
    stack = ExitStack()
    for name in names:
        stack.enter_context(plates[name])
    return stack
