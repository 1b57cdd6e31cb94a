r"""
Coordinates of a guide's draws: what a chain moves, a search changes, or a sum enumerates.

A reparameterized distribution draws :math:`z = T(\epsilon)` from noise with a fixed density. In
*noise* coordinates the noise is the state: its density is known, it is unconstrained, and it is
whitened by the guide. Distributions whose noise is not explicit (Gamma, Dirichlet) use
*unconstrained* values instead, and discrete ones the *value* itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from pyro import distributions as dist
from torch import Tensor
from torch.distributions import biject_to

from pyro_mcvae.tracing.precision import without_autocast
from pyro_mcvae.tracing.sites import is_masked

__all__ = [
    "Coordinate",
    "NoCoordinateError",
    "Noise",
    "NoiseCoordinate",
    "UnconstrainedCoordinate",
    "ValueCoordinate",
    "coordinate_of",
    "register_noise",
]

Coordinates = Literal["noise", "latent", "value"]


class NoCoordinateError(ValueError):
    """A guide site has neither explicit noise nor an unconstrained form."""


class Coordinate(ABC):
    """
    A parameterization of one guide site's draw.

    :ivar event_shape: the shape of the coordinate of one batch element.
    :ivar reparameterized: whether gradients may pass through draws, to the guide's parameters.
    """

    event_shape: torch.Size
    reparameterized: bool = True

    @abstractmethod
    def draw(self) -> Tensor:
        """A draw of the coordinate such that ``value(draw())`` follows the site's distribution."""

    @abstractmethod
    def value(self, coordinate: Tensor) -> Tensor:
        """The site's value at a coordinate."""

    @abstractmethod
    def at(self, value: Tensor) -> Tensor:
        """
        The coordinate of a given value, the inverse of :meth:`value`.

        :raises NoCoordinateError: if it is not known.
        """

    @abstractmethod
    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        """The density of the coordinate under the guide, batch-shaped."""


class NoiseCoordinate(Coordinate):
    r"""
    Noise of independent standard variables: :math:`z = T(\epsilon)`, with T the guide's.

    :param fn: the site's distribution, for its batch shape.
    :param Noise noise: how its draws are made.
    """

    def __init__(self, fn: Any, noise: Noise) -> None:
        self.batch_shape = fn.batch_shape
        self.reparameterized = not _forbids_rsample(fn)
        self.noise = noise
        self.event_shape = noise.event_shape
        self._masked = is_masked(fn)
        # The noise and its density at the last call of log_prob, which log_base then shares.
        self._latest: tuple[Tensor, Tensor] | None = None

    @property
    def normal(self) -> bool:
        """Whether the density of the noise is the standard normal one."""
        return isinstance(self.noise.standard, StandardNormal)

    def draw(self) -> Tensor:
        with torch.no_grad():
            return self.noise.standard.sample(self.batch_shape + self.event_shape)

    def value(self, coordinate: Tensor) -> Tensor:
        with without_autocast():
            return self.noise.transform(coordinate)

    def at(self, value: Tensor) -> Tensor:
        if self.noise.inverse is None:
            raise NoCoordinateError("the noise that a given value was made of is not known")
        return self.noise.inverse(value)

    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        if self._latest is not None and self._latest[0] is coordinate:
            return self._latest[1]
        return _sum_event(self.noise.standard.log_prob(coordinate), len(self.event_shape))

    def log_prob(self, coordinate: Tensor) -> Tensor | None:
        r"""
        :math:`\log q(T(\epsilon)) = \log \text{base}(\epsilon) - \log |\det T'|`, the site's
        density, where the determinant does not depend on the noise: cheaper than the distribution's
        own, and without the way through the value. None elsewhere, and where the distribution masks
        itself, of which the noise knows nothing.
        """
        if self.noise.log_scale is None or self._masked:
            return None
        self._latest = None
        self._latest = coordinate, self.log_base(coordinate, coordinate)
        return self._latest[1] - self._log_det

    @cached_property
    def _log_det(self) -> Tensor:
        assert self.noise.log_scale is not None
        log_scale = self.noise.log_scale().expand(self.batch_shape + self.event_shape)
        return _sum_event(log_scale, len(self.event_shape))


class UnconstrainedCoordinate(Coordinate):
    """The value itself, mapped to the real line where its support is constrained."""

    def __init__(self, fn: Any) -> None:
        # A mask takes density out of the weight, but the draw still has it.
        fn = self.fn = _without_masks(fn)
        self.reparameterized = fn.has_rsample
        self.transform = biject_to(fn.support)
        self.event_shape = self.transform.inverse_shape(fn.batch_shape + fn.event_shape)[
            len(fn.batch_shape) :
        ]

    def draw(self) -> Tensor:
        value = self.fn.rsample() if self.fn.has_rsample else self.fn.sample()
        # An alias: a flow knows the density of the tensor that it drew, without a gradient to it.
        return self.transform.inv(value.view_as(value))

    def value(self, coordinate: Tensor) -> Tensor:
        return self.transform(coordinate)

    def at(self, value: Tensor) -> Tensor:
        return self.transform.inv(value)

    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        log_det = self.transform.log_abs_det_jacobian(coordinate, value)
        extra = self.fn.event_dim - self.transform.codomain.event_dim
        return self.fn.log_prob(value) + _sum_event(log_det, extra)


def _without_masks(fn: Any) -> Any:
    """The distribution of what is drawn, with the density of masked entries, too."""
    if not is_masked(fn):
        return fn
    if isinstance(fn, dist.torch_distribution.MaskedDistribution):
        return _without_masks(fn.base_dist)
    if isinstance(fn, torch.distributions.Independent):
        base = _without_masks(fn.base_dist)
        return dist.Independent(base, fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.torch_distribution.ExpandedDistribution):
        return _without_masks(fn.base_dist).expand(fn.batch_shape)
    raise NoCoordinateError(
        f"{type(fn).__name__} transforms a distribution that masks itself: mask the result, as in "
        f"{type(fn).__name__}(...).mask(...)"
    )


class ValueCoordinate(Coordinate):
    """The value itself, as it is."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.event_shape = fn.event_shape

    def draw(self) -> Tensor:
        with torch.no_grad():
            return self.fn.sample()

    def value(self, coordinate: Tensor) -> Tensor:
        return coordinate

    def at(self, value: Tensor) -> Tensor:
        return value

    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        return self.fn.log_prob(value)


def _forbids_rsample(fn: Any) -> bool:
    """Whether has_rsample_(False) was said of this very distribution, as of a rough model's."""
    while fn is not None:
        if vars(fn).get("has_rsample") is False:
            return True
        fn = getattr(fn, "base_dist", None)
    return False


def coordinate_of(fn: Any, coordinates: Coordinates = "noise") -> Coordinate:
    """
    The coordinate of a guide site's draws.

    :param fn: the site's distribution.
    :param coordinates: ``"noise"``; ``"latent"``, unconstrained values throughout; or
        ``"value"``, the values themselves.
    """
    if coordinates == "value" or fn.support.is_discrete:
        return ValueCoordinate(fn)
    if coordinates == "noise":
        found = _noise(fn)
        if found is not None:
            return NoiseCoordinate(fn, found)
    return UnconstrainedCoordinate(fn)


class Noise(NamedTuple):
    """
    How a distribution's draws are made.

    :ivar standard: a scalar distribution on the real line, without parameters to learn.
    :ivar event_shape: how many standard variables one batch element takes.
    :ivar transform: T, from the noise to the value.
    :ivar log_scale: returns log of T's derivative per standard variable, broadcastable to batch
        and event, where T acts on each by itself and its derivative does not depend on the noise.
    :ivar inverse: T's inverse, from the value to the noise, where there is one.
    """

    standard: Any
    event_shape: torch.Size
    transform: Callable[[Tensor], Tensor]
    log_scale: Callable[[], Tensor] | None = None
    inverse: Callable[[Tensor], Tensor] | None = None


class StandardNormal:
    """N(0, 1) in as few operations as it takes."""

    def __init__(self, like: Tensor) -> None:
        self._like = like.detach()

    def sample(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, dtype=self._like.dtype, device=self._like.device)

    def log_prob(self, value: Tensor) -> Tensor:
        return -0.5 * (value * value + _LOG_TWO_PI)


_LOG_TWO_PI = math.log(2 * math.pi)
_REGISTRY: dict[type, Callable[[Any], Any]] = {}


def register_noise(*classes: type) -> Callable[[Any], Any]:
    """
    Register how distributions of exactly these classes are made from noise.

    The decorated function maps a distribution to a :class:`Noise` (or a tuple of its fields), or
    to None where it has no explicit noise.

    Example::

        >>> @register_noise(dist.Exponential)
        ... def _exponential(fn):
        ...     standard = dist.Normal(torch.zeros(()), torch.ones(()))
        ...     return standard, fn.event_shape, lambda eps: (
        ...         -torch.special.log_ndtr(eps) / fn.rate
        ...     )
        >>> coordinate_of(dist.Exponential(torch.ones(3))).draw().shape
        torch.Size([3])
    """

    def decorator(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        for cls in classes:
            _REGISTRY[cls] = function
        return function

    return decorator


def _noise(fn: Any) -> Noise | None:
    # Exact classes only: a subclass may draw in another way than its parent.
    function = _REGISTRY.get(type(fn))
    found = None if function is None else function(fn)
    return None if found is None else Noise(*found)


def _standard(cls: type, like: Tensor, *args: Tensor) -> Any:
    like = like.detach()
    zero, one = like.new_zeros(()), like.new_ones(())
    return cls(*args, zero, one, validate_args=False)


def _pair(*names: str) -> list[type]:
    found = [getattr(module, n, None) for module in (dist, torch.distributions) for n in names]
    return [cls for cls in dict.fromkeys(found) if cls is not None]


@register_noise(*_pair("Normal", "Laplace", "Cauchy", "Logistic"))
def _location_scale(fn: Any) -> Noise:
    plain = _pair(type(fn).__name__)[0]
    standard = StandardNormal(fn.loc) if plain is dist.Normal else _standard(plain, fn.loc)
    return Noise(
        standard,
        fn.event_shape,
        lambda eps: fn.loc + fn.scale * eps,
        lambda: fn.scale.log(),
        lambda value: (value - fn.loc) / fn.scale,
    )


@register_noise(*_pair("StudentT"))
def _student_t(fn: Any) -> Noise | None:
    # Strides of zero: one number, broadcast to the shape of loc.
    if fn.df.requires_grad or any(fn.df.stride(d) for d in range(fn.df.dim()) if fn.df.size(d) > 1):
        return None  # the noise's density would depend on parameters, or on the datum
    standard = _standard(dist.StudentT, fn.loc, fn.df[(0,) * fn.df.dim()])
    return Noise(
        standard,
        fn.event_shape,
        lambda eps: fn.loc + fn.scale * eps,
        lambda: fn.scale.log(),
        lambda value: (value - fn.loc) / fn.scale,
    )


@register_noise(*_pair("Uniform"))
def _uniform(fn: Any) -> Noise:
    standard = StandardNormal(fn.low)
    low, high = fn.low.detach(), fn.high.detach()
    inner = torch.nextafter(low, high), torch.nextafter(high, low)

    def transform(eps: Tensor) -> Tensor:
        # Rounding puts far noise on the interval's ends, where densities are infinite.
        value = fn.low + (fn.high - fn.low) * torch.special.ndtr(eps)
        return value.clamp(*inner)

    def inverse(value: Tensor) -> Tensor:
        return torch.special.ndtri((value - fn.low) / (fn.high - fn.low))

    return Noise(standard, fn.event_shape, transform, inverse=inverse)


@register_noise(*_pair("MultivariateNormal"))
def _multivariate_normal(fn: Any) -> Noise:
    return Noise(
        StandardNormal(fn.loc),
        fn.event_shape,
        lambda eps: fn.loc + (fn._unbroadcasted_scale_tril @ eps.unsqueeze(-1)).squeeze(-1),
        inverse=lambda value: torch.linalg.solve_triangular(
            fn._unbroadcasted_scale_tril, (value - fn.loc).unsqueeze(-1), upper=False
        ).squeeze(-1),
    )


@register_noise(*_pair("LowRankMultivariateNormal"))
def _low_rank_normal(fn: Any) -> Noise:
    factor, diagonal = fn._unbroadcasted_cov_factor, fn._unbroadcasted_cov_diag
    rank = factor.shape[-1]

    def transform(eps: Tensor) -> Tensor:
        low = (factor @ eps[..., :rank].unsqueeze(-1)).squeeze(-1)
        return fn.loc + low + diagonal.sqrt() * eps[..., rank:]

    return Noise(StandardNormal(fn.loc), torch.Size([rank + fn.event_shape[0]]), transform)


@register_noise(*_pair("Independent"), torch.distributions.Independent)
def _independent(fn: Any) -> Noise | None:
    found = _noise(fn.base_dist)
    if found is None:
        return None
    count = fn.reinterpreted_batch_ndims
    extra = fn.base_dist.batch_shape[len(fn.base_dist.batch_shape) - count :]
    return found._replace(event_shape=extra + found.event_shape)


@register_noise(
    dist.torch_distribution.ExpandedDistribution, dist.torch_distribution.MaskedDistribution
)
def _wrapped(fn: Any) -> Noise | None:
    return _noise(fn.base_dist)


def _flow_classes() -> list[type]:
    # LogNormal, Gumbel and the like are transformed distributions by inheritance.
    root = torch.distributions.TransformedDistribution
    found = [
        cls
        for module in (dist, torch.distributions)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, root) and cls.rsample is root.rsample
    ]
    return list(dict.fromkeys([root, *found]))


@register_noise(*_flow_classes())
def _transformed(fn: Any) -> Noise | None:
    found = _noise(fn.base_dist)
    if found is None:
        return None
    standard, event_shape, base, _, base_inverse = found
    count = len(fn.base_dist.batch_shape) - len(fn.batch_shape)
    if count > 0:
        # Transforms that mix batch elements of the base make them one event.
        event_shape = fn.base_dist.batch_shape[-count:] + event_shape

    def transform(eps: Tensor) -> Tensor:
        value = base(eps)
        for part in fn.transforms:
            value = part(value)
        return value

    def inverse(value: Tensor) -> Tensor:
        assert base_inverse is not None
        for part in reversed(fn.transforms):
            if not part.bijective:
                # As an absolute value, whose noise may have had either sign.
                raise NoCoordinateError(f"{type(part).__name__} is not one to one")
            try:
                value = part.inv(value)
            except (KeyError, NotImplementedError) as error:
                raise NoCoordinateError(f"{type(part).__name__} has no inverse") from error
        return base_inverse(value)

    return Noise(
        standard, event_shape, transform, inverse=None if base_inverse is None else inverse
    )


def _sum_event(value: Any, count: int) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.as_tensor(value)
    return value.sum(tuple(range(-count, 0))) if count else value
