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

from pyro_mcvae.ops.compat import without_plates
from pyro_mcvae.ops.weights import normalized_weights
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.sites import is_random
from pyro_mcvae.programs.types import LeadingDimsError, Site, plate_frames
from pyro_mcvae.truncated.joint import GuideDraws, JointRuns
from pyro_mcvae.truncated.search import Population

# Queries of a truncated posterior: expectations, marginals, modes, draws, entropy.


class StatePosterior:
    r"""
    The truncated posteriors of the data of one call, :math:`q_n(z)` on S states each.

    It is returned by :meth:`TruncatedPosterior.posterior`, and has no gradients.

    :ivar runs: the joint density of the call, for extensions.
    :ivar population: the stored states.
    :ivar particles: the run of the model with all states.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import TruncatedPosterior
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Bernoulli(0.5))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> x = torch.tensor([0.5, 3.0])
        >>> posterior = TruncatedPosterior(model, num_states=2).posterior(x)
        >>> posterior.marginals()["z"]  # exact: sigmoid(x - 0.5)
        tensor([0.5000, 0.9241])
        >>> posterior.map()["z"][1]
        tensor(1.)
    """

    def __init__(
        self, runs: JointRuns, population: Population, particles: WeightedParticles
    ) -> None:
        self.runs, self.population, self.particles = runs, population, particles

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Return the value of each discrete site in every state, ``[S, *batch, *event]``."""
        return self.runs.model_layout.layout.values(self.population.states, self.runs.data)

    @cached_property
    def log_joint(self) -> Tensor:
        """Return log p(x_n, z) of every state, ``[S, *plates]``."""
        return self.runs.log_joint(self.particles)

    @cached_property
    def weights(self) -> Tensor:
        """Return q_n(z), ``[S, *plates]``, which sums to one over the states."""
        return normalized_weights(self.log_joint)

    @property
    def free_energy(self) -> Tensor:
        """Return the bound on log p(x_n) of each datum: ``[*plates]``."""
        return self.log_joint.logsumexp(0)

    def entropy(self) -> Tensor:
        """Return the entropy of q_n in nats: ``[*plates]``."""
        # A weight rounded above 1 would make it negative.
        return torch.special.entr(self.weights).sum(0).clamp_min(0.0)

    def expectation(self, function: Callable[[Mapping[str, Tensor]], Tensor]) -> Tensor:
        r"""
        Return :math:`\langle f(z) \rangle = \sum_z q_n(z) f(z)`.

        :param function: maps the sites' values, each ``[S, *batch, *event]``, to a tensor
            ``[S, *batch, ...]``, like a decoder. The batch dims are those of all plates, with size
            1 for plates without the site. Sums over plates nested in the data plate must
            keep their dims (``keepdim=True``).
        :returns: shape ``[*batch, ...]``.
        :raises ValueError: for a result of another shape.
        """
        value = function(self.values)
        weight = self._aligned(value.dim())
        # Reject a result that would be multiplied by the weights of other data.
        nesting = self.runs.model_layout.nesting
        value_batch, batch = value.shape[: nesting + 1], weight.shape[: nesting + 1]
        if len(value_batch) != len(batch) or any(
            n not in (1, size) for n, size in zip(value_batch, batch, strict=True) if size != 1
        ):
            raise ValueError(
                f"the function returned shape {tuple(value.shape)}, but the weights of states and "
                f"data have {tuple(batch)}: return [states, *batch, ...] with as many batch dims "
                f"as the sites' values have ({nesting}), for example by keepdim=True"
            )
        return _weighted_sum(weight, value)

    def marginals(self) -> dict[str, Tensor]:
        """
        Return the posterior mean of each site, ``[*batch, *event]``.

        For a categorical site, return the probabilities of its categories,
        ``[*batch, *event, K]``.
        """
        means = {}
        for name, spec in self.runs.model_layout.layout.sites.items():
            value = self.values[name]
            if not spec.ordinal and not spec.one_hot and not value.is_floating_point():
                value = torch.nn.functional.one_hot(value.long() - spec.low, spec.size)
            means[name] = _weighted_sum(self._aligned(value.dim()), value)
        return means

    def map(self) -> dict[str, Tensor]:
        """Return the most probable stored state: values ``[*batch, *event]``."""
        best = self._batched(self.log_joint.argmax(0, keepdim=True))
        return {name: self._gather(name, self._padded(best))[0] for name in self.values}

    def sample(self, count: int) -> dict[str, Tensor]:
        """Draw from q_n: values ``[count, *batch, *event]``."""
        index = dist.Categorical(probs=self._batch_weights).sample((count,))
        return {name: self._gather(name, self._padded(index)) for name in self.values}

    @property
    def _batch_weights(self) -> Tensor:
        """Return the weights in the shape of the plates' batch dims, ``[*batch, S]``."""
        return self._batched(self.weights).movedim(0, -1)

    def _gather(self, name: str, index: Tensor, leading: bool = True) -> Tensor:
        """
        Return a site's values in the states of an index.

        :param index: batch-shaped, with a dim of draws to the left of all plates; or, with
            ``leading=False``, with outer batch dims (particles, predictions).
        """
        value, nesting = self.values[name], self.runs.model_layout.nesting
        index = index.reshape((1,) * (nesting - index.dim()) + index.shape)
        cut = index.dim() - nesting
        outer, batch = index.shape[:cut], index.shape[cut:]
        event = value.shape[1 + nesting :]
        target = torch.broadcast_shapes(batch, value.shape[1 : 1 + nesting])
        at = index.reshape(-1, *batch, *(1,) * len(event)).expand(-1, *target, *event)
        values = value.expand(-1, *target, *event).gather(0, at)
        frames = plate_frames(self.particles.runs[0].model_trace.nodes[name])
        depth = max(-f.dim for f in frames if f.dim is not None)
        # The batch dims of the site in the model, unless there are outer dims to the left.
        inner = target if any(n != 1 for n in outer) and not leading else target[nesting - depth :]
        return values.reshape(*outer, *inner, *event)

    def _batched(self, weight: Tensor) -> Tensor:
        """Reshape ``[S, *plates]`` to ``[S, *batch]``, with 1 for batch dims outside the data."""
        dims = self.particles.blocks[0].dims
        sizes = iter(weight.shape[1:])
        batch = [next(sizes) if d in dims else 1 for d in range(-max(-d for d in dims), 0)]
        return weight.reshape(weight.shape[0], *batch)

    def _padded(self, index: Tensor) -> Tensor:
        """Pad ``[K, *batch]`` to the number of batch dims of all plates."""
        missing = self.runs.model_layout.nesting + 1 - index.dim()
        return index.reshape(len(index), *(1,) * missing, *index.shape[1:])

    def _aligned(self, dim: int) -> Tensor:
        """Return the weights as ``[S, *batch, 1, ...]`` with ``dim`` dims."""
        weight = self._padded(self._batched(self.weights))
        return weight.reshape(*weight.shape, *(1,) * (dim - weight.dim()))


def _weighted_sum(weight: Tensor, value: Tensor) -> Tensor:
    """Sum over states, except those of weight zero, whose value may be NaN."""
    return torch.where(weight == 0, 0.0, weight * value).sum(0)


# A truncated posterior as a Pyro guide: its draws, at the sites and in the plates of the model.

_MARK = "_pyro_mcvae_states_of"

# Returns the posterior of the discrete sites given draws of the other guide.
PosteriorOf = Callable[[GuideDraws], StatePosterior]


@contextmanager
def hidden_from_handlers() -> Iterator[None]:
    """Hide runs from outer handlers, and outer plates (and their dims) from runs."""
    with without_plates(), poutine.block():
        yield


def sample_states(posterior_of: PosteriorOf, guide_trace: Trace, nesting: int) -> dict[str, Tensor]:
    """
    Draw a state of each datum, given the visible draws of ``guide``.

    :param posterior_of: returns the truncated posterior given such draws.
    :param guide_trace: the trace of ``guide``.
    :param nesting: the number of batch dims of the programs' plates.
    :returns: the values by site.
    :raises LeadingDimsError: for draws of ``guide`` inside outer plates.
    """
    nodes = guide_trace.nodes
    plate_sites = [s for s in nodes.values() if s["type"] == "sample" and site_is_subsample(s)]
    chosen = {s["name"]: torch.as_tensor(s["value"]) for s in plate_sites}
    draws = {}
    for site in filter(is_random, nodes.values()):
        name, value = site["name"], site["value"]
        if value.dim() - site["fn"].event_dim > nesting:
            raise LeadingDimsError(
                f"the guide= of a TruncatedPosterior draws site '{name}' with shape "
                f"{tuple(value.shape)} inside plates of other particles or predictions, but the "
                f"states of each draw need a separate run: pass vectorize_particles=False, or "
                f"parallel=False"
            )
        draws[name] = value
    posterior = posterior_of(GuideDraws(draws, chosen))
    plates = _make_plates(posterior, frozenset(chosen))
    # An outer handler may set another minibatch, that of the other particles of a step.
    before = posterior.runs.subsamples
    now = {n: plate.indices for n, plate in plates.items() if n in before}
    if any(not torch.equal(before[n].to(index), index) for n, index in now.items()):
        posterior = posterior_of(GuideDraws(draws, {**chosen, **now}))
    layout = posterior.runs.model_layout.layout
    with _entered(plates, [key.name for key in layout.plates]):
        index = pyro.sample(
            f"_{layout.name}_state",
            dist.Categorical(logits=posterior._batch_weights.log()),
            infer={"is_auxiliary": True, _MARK: tuple(layout.sites)},
        )
    values: dict[str, Tensor] = {}
    for name in layout.sites:
        site = posterior.particles.runs[0].model_trace.nodes[name]
        frames = sorted(plate_frames(site), key=lambda f: f.dim or 0)
        with _entered(plates, [f.name for f in frames]):
            value = posterior._gather(name, index, leading=False)
            point = dist.Delta(value, event_dim=site["fn"].event_dim)
            values[name] = pyro.sample(name, point)
    return values


def drawn_from_states(site: Site) -> tuple[str, ...]:
    """Return the sites whose states are indexed by a guide's site; empty for other sites."""
    names: tuple[str, ...] = site["infer"].get(_MARK, ())
    return names


def _make_plates(posterior: StatePosterior, hidden: frozenset[str]) -> dict[str, pyro.plate]:
    """Make the plates of the minibatch; hide those that the guide has already made."""
    nodes, subsamples = posterior.particles.runs[0].model_trace.nodes, posterior.runs.subsamples
    # One frame of each plate around the discrete sites, with the sizes of this minibatch.
    frames = {f.name: f for n in posterior.values for f in plate_frames(nodes[n])}
    plates = {}
    for frame in frames.values():
        index, full = subsamples.get(frame.name), frame.full_size or frame.size
        with poutine.block() if frame.name in hidden else ExitStack():
            plates[frame.name] = pyro.plate(frame.name, full, subsample=index, dim=frame.dim)
    return plates


def _entered(plates: Mapping[str, pyro.plate], names: list[str]) -> ExitStack:
    stack = ExitStack()
    for name in names:
        stack.enter_context(plates[name])
    return stack
