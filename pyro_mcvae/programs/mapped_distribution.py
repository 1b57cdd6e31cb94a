"""Distributions that a program made of one particle's values, as those of all particles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor, nn

from pyro_mcvae.ops.lanes import Lanes
from pyro_mcvae.programs.known_logs import known_logs
from pyro_mcvae.programs.sites import changed_draw
from pyro_mcvae.programs.types import Constraint, Distribution

__all__ = ["MappedDistribution", "leaves_of", "lifted"]

# Their parameters have the shape of the batch, and the event that their constraint says.
_BY_PARAMETERS = (
    dist.Bernoulli,
    dist.Binomial,
    dist.Categorical,
    dist.Cauchy,
    dist.Dirichlet,
    dist.Exponential,
    dist.Gamma,
    dist.Geometric,
    dist.Laplace,
    dist.Normal,
    dist.Poisson,
    dist.StudentT,
    dist.Uniform,
)
# These choose entries by values, which cannot be asked inside of the lanes; of Categorical's form.
_BY_LOGITS = dist.Multinomial, dist.OneHotCategorical
# How deep tensors are looked for in what a distribution is made of.
_DEPTH = 6
_ONE = torch.Size()


def lifted(fn: Distribution, lanes: Lanes, depth: int) -> Distribution:
    """
    The distribution of all particles.

    :param fn: made inside of the lanes.
    :param depth: how many batch dims stand to the right of the lanes.
    :returns: ``fn`` itself where nothing of it is in a lane.
    """
    if not any(lanes.holds(t) for t in _tensors(fn, _DEPTH)):
        return fn
    if type(fn) in _BY_PARAMETERS:
        return _by_parameters(fn, lanes, depth)
    if type(fn) in _BY_LOGITS:
        count = {"total_count": fn.total_count} if type(fn) is dist.Multinomial else {}
        return type(fn)(**count, logits=lanes.lift(fn.logits, depth + 1), validate_args=False)
    if isinstance(fn, torch.distributions.Independent):
        events = fn.reinterpreted_batch_ndims
        return dist.Independent(lifted(fn.base_dist, lanes, depth + events), events)
    if isinstance(fn, ExpandedDistribution):
        base = lifted(fn.base_dist, lanes, depth)
        lead = base.batch_shape[: len(base.batch_shape) - depth]
        pad = (1,) * (depth - len(fn.batch_shape))
        return base.expand((*lead, *pad, *fn.batch_shape))
    if isinstance(fn, MaskedDistribution):
        return lifted(fn.base_dist, lanes, depth).mask(_lift(fn._mask, lanes, depth))
    if type(fn) is dist.Delta:
        value = lanes.lift(fn.v, depth + fn.event_dim)
        return dist.Delta(value, _lift(fn.log_density, lanes, depth), fn.event_dim)
    if type(fn) is dist.Unit:
        return dist.Unit(lanes.lift(fn.log_factor, depth), has_rsample=fn.has_rsample)
    return _mapped(type(fn))(fn, lanes, depth)  # type: ignore[arg-type]


def leaves_of(fn: Distribution | None) -> Iterator[MappedDistribution]:
    """The distributions that have to be asked inside of the lanes."""
    while fn is not None:
        if isinstance(fn, MappedDistribution):
            yield fn
        fn = getattr(fn, "base_dist", None)


def _by_parameters(fn: Distribution, lanes: Lanes, depth: int) -> Distribution:
    own = vars(fn)
    found = {
        name: lanes.lift(own[name], depth + constraint.event_dim)
        for name, constraint in fn.arg_constraints.items()
        if name in own and not (name == "probs" and "logits" in own)
    }
    return type(fn)(**found, validate_args=False)


def _lift(value: bool | float | Tensor, lanes: Lanes, depth: int) -> bool | float | Tensor:
    return lanes.lift(value, depth) if isinstance(value, Tensor) else value


def _tensors(value: object, depth: int) -> Iterator[Tensor]:
    """The tensors that a distribution is made of, its networks' parameters left out."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, depth)
    elif isinstance(value, functools.partial):
        yield from _tensors([*value.args, *value.keywords.values()], depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        for part in vars(value).values():
            yield from _tensors(part, depth - 1)


class MappedDistribution(dist.TorchDistribution):
    """
    A distribution of all particles that is asked for each of them inside of the lanes.

    :param inner: that of one particle, made inside of the lanes.
    :param depth: how many batch dims stand to the right of the lanes.
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {}

    def __init__(self, inner: Distribution, lanes: Lanes, depth: int) -> None:
        self.inner, self._lanes, self._depth = inner, lanes, depth
        self._known: tuple[Tensor, Tensor] | None = None
        pad = (1,) * (depth - len(inner.batch_shape))
        shape = *lanes.sizes_of(_tensors(inner, _DEPTH)), *pad, *inner.batch_shape
        super().__init__(torch.Size(shape), inner.event_shape, False)

    @property
    def has_rsample(self) -> bool:
        return bool(self.inner.has_rsample)

    @property
    def support(self) -> Constraint:
        return self.inner.support

    def remember(self, value: Tensor, inner_value: Tensor) -> None:
        """Compute the density inside of the lanes, while these are open."""
        with known_logs(inner_value):
            log_prob = self.inner.log_prob(inner_value)
        self._known = value, self._lanes.lift(log_prob, self._depth)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._known is None or self._known[0] is not value:
            inner = self.inner.batch_shape + self.inner.event_shape
            with self._lanes.opened():
                depth = self._depth + len(self.event_shape)
                self.remember(
                    value, changed_draw(lambda v: self._lanes.lower(v, inner, depth), value)
                )
        assert self._known is not None
        return self._known[1]

    def sample(self, sample_shape: torch.Size = _ONE) -> Tensor:
        with torch.no_grad():
            return self._draw(self.inner.sample, sample_shape)

    def rsample(self, sample_shape: torch.Size = _ONE) -> Tensor:
        return self._draw(self.inner.rsample, sample_shape)

    def _draw(self, draw: Callable[[], Tensor], sample_shape: torch.Size) -> Tensor:
        if sample_shape:
            raise NotImplementedError("one draw of each particle")
        with self._lanes.opened():
            drawn = self._lanes.lift(draw(), self._depth + len(self.event_shape))
        return drawn.expand(self.shape())


@functools.cache
def _mapped(kind: type) -> type[MappedDistribution]:
    """By the name that errors call it, and that tells one kind from another."""
    return type(kind.__name__, (MappedDistribution,), {})
