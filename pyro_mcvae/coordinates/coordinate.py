"""The coordinate of one site: from unconstrained noise to the values of its distribution."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    ComposeTransform,
    ExpTransform,
    SigmoidTransform,
    StickBreakingTransform,
    biject_to,
    constraints,
)
from torch.nn.functional import logsigmoid

from pyro_mcvae.checks.faults import is_circular
from pyro_mcvae.coordinates.noise import Noise, StandardNormal, noise_of, sum_event
from pyro_mcvae.ops.compat import InverseTransform, standard_gamma
from pyro_mcvae.programs.distributions import is_elementary, is_pushed_forward, parts_of
from pyro_mcvae.programs.log_values import Logs, at_logs, log_det, logs_of, pulled, pushed, value_of
from pyro_mcvae.programs.methods import has_methods_of
from pyro_mcvae.programs.sites import (
    bare,
    elementwise,
    is_masked,
    is_straight_through,
    known_support,
    layers,
    with_mask,
    without_autocast,
)
from pyro_mcvae.programs.terms import is_rejection_sampled
from pyro_mcvae.programs.types import (
    Constraint,
    Distribution,
    Message,
    NoCoordinateError,
    Transform,
)

# Bijections from the real numbers to the support of a distribution.


def bijection_of(fn: Distribution) -> Transform:
    """
    Return a bijection from the real numbers to the values of a distribution.

    PyTorch uses the last transform's codomain as the support for every input. For
    ``TransformedDistribution(Beta(2.0, 2.0), AffineTransform(0.0, 10.0))`` this is all real
    numbers. The same holds for ``biject_to(constraints.positive)``, which ends in a shift by zero.
    So if the input does not cover a transform's domain, the bijection of the input is composed with
    the transform.

    Example::

        >>> scaled = dist.TransformedDistribution(
        ...     dist.Beta(2.0, 2.0), [dist.transforms.AffineTransform(0.0, 10.0)]
        ... )
        >>> scaled.support, bijection_of(scaled)(torch.tensor(0.0))
        (Real(), tensor(5.))
    """
    image, pushed = _uncovered(bare(fn))
    return ComposeTransform([biject_to(image), *pushed]) if pushed else biject_to(_support(fn))


def _uncovered(fn: Distribution) -> tuple[Constraint, list[Transform]]:
    """Return the constraint before the first transform whose domain is not covered, and the
    transforms from there on."""
    if not is_pushed_forward(fn):
        return _support(fn), []
    image, pushed = _uncovered(bare(fn.base_dist))
    for transform in _flat(fn.transforms):
        if pushed or not _same(image, transform.domain):
            pushed.append(transform)
        else:
            image = transform.codomain
    return image, pushed


def _flat(transforms: list[Transform]) -> list[Transform]:
    parts = ((t.parts if isinstance(t, ComposeTransform) else [t]) for t in transforms)
    return [part for inner in parts for part in inner]


def _same(image: Constraint, domain: Constraint) -> bool:
    """Return whether an image covers a transform's domain."""
    image, domain = elementwise(image), elementwise(domain)
    if type(image) is not type(domain):
        return False
    ends = [(vars(image)[name], end) for name, end in vars(domain).items()]
    return all(a is b or (not isinstance(a, Tensor | list) and a == b) for a, b in ends)


def _support(fn: Distribution) -> Constraint:
    """Return the support; for a mixture, that of its components."""
    support = fn.support
    # Newer versions of torch have a constraint without bijection for mixtures.
    mixture = getattr(constraints, "MixtureSameFamilyConstraint", ())
    return support.base_constraint if isinstance(support, mixture) else support


_SIMPLE = ExpTransform, SigmoidTransform, StickBreakingTransform


def simplified(transform: Transform) -> Transform:
    """Return ``exp`` instead of ``exp`` and a shift by zero, and without wrappers of event dims."""
    parts = [p for p in parts_of(transform) if not _is_identity(p)]
    single = len(parts) == 1 and type(parts[0]) in _SIMPLE
    inverted = type(transform) is InverseTransform
    return parts[0] if single and not inverted else transform


def _is_identity(transform: Any) -> bool:
    shift = type(transform) is AffineTransform
    return shift and not isinstance(transform.loc, Tensor) and transform == AffineTransform(0, 1)


# Draws by their logarithms, which have a larger range than the values.

_TRANSFORMED = torch.distributions.TransformedDistribution


def logarithmic_draw(fn: Distribution) -> Tensor:
    """
    Return a reparameterized draw, with its logarithms if it may lie near a boundary.

    In single precision one draw of ``Gamma(0.05, 1)`` in 80 is below the least number. One draw of
    ``Beta(0.05, 0.05)`` in 5 is rounded to 1. PyTorch clamps them, which changes their density.
    Logarithms of Gamma draws in double precision have moderate size. Draws of Beta, Dirichlet and
    their transforms are computed from them.
    """
    drawn = _draw(fn)
    return fn() if drawn is None else drawn  # Zuko's distributions are drawn by a call


def _draw(fn: Any) -> Tensor | None:
    if not has_methods_of(fn, type(fn)):
        return None
    if has_methods_of(fn, torch.distributions.Independent):
        return _draw(fn.base_dist)
    rsample = getattr(type(fn), "rsample", None)
    logs = _DRAWS.get(rsample)
    if logs is not None and "rsample" not in vars(fn):
        return value_of(logs(fn))
    if rsample is not _TRANSFORMED.rsample or not all(map(is_elementary, fn.transforms)):
        return None
    value = _draw(fn.base_dist)
    value = fn.base_dist.rsample() if value is None else value
    for transform in fn.transforms:
        value = pushed(transform, value)
    return value


def _log_gamma(concentration: Tensor) -> Tensor:
    """Return the logarithm of a draw of Gamma(concentration, 1)."""
    # Down to a concentration of 0.04, less than one draw in 1e12 underflows in double precision.
    return standard_gamma(concentration.double()).log().to(concentration.dtype)


def _log_beta(fn: Any) -> Logs:
    logit = _log_gamma(fn.concentration1) - _log_gamma(fn.concentration0)
    return Logs(logsigmoid(logit), logsigmoid(-logit))


# By the method that they replace.
_DRAWS: dict[Any, Callable[[Any], Logs]] = {
    torch.distributions.Gamma.rsample: lambda fn: Logs(
        _log_gamma(fn.concentration) - fn.rate.log()
    ),
    torch.distributions.Beta.rsample: _log_beta,
    torch.distributions.Dirichlet.rsample: lambda fn: Logs(
        _log_gamma(fn.concentration).log_softmax(-1), simplex=True
    ),
}


# Coordinates of a guide's draws, for chains, searches and sums.

Coordinates = Literal["noise", "latent", "fixed"]


class Coordinate(ABC):
    """
    A parameterization of one guide site's draw.

    :ivar event_shape: the shape of the coordinate of one batch element.
    :ivar reparameterized: whether draws have gradients to the guide's parameters.
    :ivar normal: whether its density is standard normal.
    :ivar moves: whether chains move it.
    :ivar follows: whether its density may depend on other coordinates. Then it is part of their
        joint density, even if a mask removes it from the weight, because it was drawn.
    """

    event_shape: torch.Size
    reparameterized: bool = True
    normal: bool = False
    moves: bool = True
    follows: bool = False

    @property
    def kind(self) -> tuple[type, bool, bool]:
        """Return the properties, except shape, that a site's coordinate has in all runs."""
        return type(self), self.reparameterized, self.normal

    @abstractmethod
    def draw(self) -> Tensor:
        """Draw a coordinate such that ``value(draw())`` has the site's distribution."""

    @abstractmethod
    def value(self, coordinate: Tensor) -> Tensor:
        """Return the site's value at a coordinate."""

    @abstractmethod
    def at(self, value: Tensor) -> Tensor:
        """
        Return the coordinate of a value, the inverse of :meth:`value`.

        :raises NoCoordinateError: if it is unknown.
        """

    @abstractmethod
    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        """Return the density of the coordinate under the guide, batch-shaped."""

    def log_prob(self, coordinate: Tensor) -> Tensor | None:
        r"""
        Return :math:`\log q(T(\epsilon)) = \log \text{base}(\epsilon) - \log |\det T'|`, or None.

        If the determinant does not depend on the noise, this density is cheaper than the
        distribution's ``log_prob``, and does not need the value. It is None otherwise, and for
        distributions with a mask.
        """
        return None


class NoiseCoordinate(Coordinate):
    r"""
    Noise of independent standard variables: :math:`z = T(\epsilon)`, with the guide's map T.

    :param fn: the site's distribution, for its batch shape.
    :param Noise noise: the map from noise to draws.
    """

    def __init__(self, fn: Distribution, noise: Noise) -> None:
        self.batch_shape = fn.batch_shape
        # False if has_rsample_(False) was called on this distribution.
        self.reparameterized = all(vars(f).get("has_rsample") is not False for f in layers(fn))
        self.noise = noise
        self.normal = isinstance(noise.standard, StandardNormal)
        self.event_shape = noise.event_shape
        self._masked = is_masked(fn)
        # The noise and its density in the last call of log_prob, reused by log_base.
        self._latest: tuple[Tensor, Tensor] | None = None

    def draw(self) -> Tensor:
        with torch.no_grad():
            return self.noise.standard.sample(self.batch_shape + self.event_shape)

    def value(self, coordinate: Tensor) -> Tensor:
        with without_autocast():
            return self.noise.transform(coordinate)

    def at(self, value: Tensor) -> Tensor:
        if self.noise.inverse is None:
            raise NoCoordinateError("the noise of a given value is unknown")
        return self.noise.inverse(value)

    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        if self._latest is not None and self._latest[0] is coordinate:
            return self._latest[1]
        return sum_event(self.noise.standard.log_prob(coordinate), len(self.event_shape))

    def log_prob(self, coordinate: Tensor) -> Tensor | None:
        if self.noise.log_scale is None or self._masked:
            return None
        self._latest = None
        self._latest = coordinate, self.log_base(coordinate, coordinate)
        return self._latest[1] - self._log_det

    @cached_property
    def _log_det(self) -> Tensor:
        assert self.noise.log_scale is not None
        log_scale = self.noise.log_scale().expand(self.batch_shape + self.event_shape)
        return sum_event(log_scale, len(self.event_shape))


class UnconstrainedCoordinate(Coordinate):
    """The value itself, mapped to the real line if its support is constrained."""

    follows = True

    def __init__(self, fn: Distribution) -> None:
        fn = self.fn = _without_masks(fn)
        self.reparameterized = fn.has_rsample and not is_rejection_sampled(fn)
        self.transform = simplified(bijection_of(fn))
        shape = self.transform.inverse_shape(fn.batch_shape + fn.event_shape)
        # In torch 2.5 the sum of an expanded distribution's shapes is a tuple.
        self.event_shape = torch.Size(shape[len(fn.batch_shape) :])

    def draw(self) -> Tensor:
        value = logarithmic_draw(self.fn) if self.reparameterized else self.fn.sample()
        # An alias: a flow caches the density of the tensor that it drew, without a gradient.
        alias = value.view_as(value) if logs_of(value) is None else value
        return pulled(self.transform, alias)

    def value(self, coordinate: Tensor) -> Tensor:
        return pushed(self.transform, coordinate)

    def at(self, value: Tensor) -> Tensor:
        return pulled(self.transform, value)

    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        extra = self.fn.event_dim - self.transform.codomain.event_dim
        density = at_logs(self.fn, value).log_prob(value)
        return density + sum_event(log_det(self.transform, coordinate, value), extra)


class CircularCoordinate(UnconstrainedCoordinate):
    """
    An angle, unwrapped to the real line.

    A von Mises density is periodic on the line, but a model may not be. Therefore model and guide
    get the angle in [-pi, pi) for every coordinate. All densities are then periodic, and a chain on
    the line is a chain on the circle.
    """

    def value(self, coordinate: Tensor) -> Tensor:
        return (coordinate + math.pi).remainder(2 * math.pi) - math.pi

    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        return self.fn.log_prob(value)


def _drawn(fn: Distribution) -> Any:
    """Return the distribution without its masks, except those inside a transform."""
    return with_mask(fn, None) if is_masked(fn) else fn


def _without_masks(fn: Distribution) -> Any:
    """Return the distribution without masks, so that masked entries have a density, too."""
    bare = _drawn(fn)
    if is_masked(bare):
        name = type(bare).__name__
        raise NoCoordinateError(
            f"{name} transforms a distribution that masks itself: mask the result, as in "
            f"{name}(...).mask(...)"
        )
    return bare


class ValueCoordinate(Coordinate):
    """The value itself."""

    def __init__(self, fn: Distribution) -> None:
        self.fn = fn
        self.event_shape = fn.event_shape

    def draw(self) -> Tensor:
        with torch.no_grad():
            value: Tensor = self.fn()
        return value.view_as(value)  # an alias, as in UnconstrainedCoordinate.draw

    def value(self, coordinate: Tensor) -> Tensor:
        return coordinate

    def at(self, value: Tensor) -> Tensor:
        return value

    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        return self.fn.log_prob(value)


class DiscreteCoordinate(ValueCoordinate):
    """A discrete value, which chains do not move."""

    moves = False
    follows = True

    def __init__(self, fn: Distribution) -> None:
        super().__init__(fn)
        self._drawn = _drawn(fn)

    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        return self._drawn.log_prob(value)


def coordinate_of(fn: Distribution, coordinates: Coordinates = "noise") -> Coordinate:
    """
    Return the coordinate of a guide site's draws.

    :param fn: the site's distribution.
    :param coordinates: ``"noise"``; ``"latent"`` for unconstrained values; or, for draws that are
        not moved, ``"fixed"``: noise if it is explicit, and otherwise the values themselves.
    :raises NotImplementedError: if the site has no such coordinate.
    """
    if known_support(fn).is_discrete:
        return DiscreteCoordinate(fn)
    noise = noise_of(fn) if coordinates in ("noise", "fixed") else None
    return _without_noise(fn, coordinates) if noise is None else NoiseCoordinate(fn, noise)


def _without_noise(fn: Distribution, coordinates: Coordinates) -> Coordinate:
    if is_straight_through(fn):
        # Their density is that of the unrounded values, but the model receives only 0 and 1.
        raise NotImplementedError("it rounds its draws")
    if coordinates == "fixed":
        return ValueCoordinate(fn)
    return CircularCoordinate(fn) if is_circular(fn) else UnconstrainedCoordinate(fn)


# The initial values of local guide sites: draws, or specified values.


class Beginning:
    """
    The initial values of a guide's sites in each leading row of a step: draws of the guide.

    :ivar count: the number of rows; None for the number of particles.
    :ivar fixed_sites: the discrete sites that are fixed at their initial values.
    """

    count: int | None = None
    fixed_sites: frozenset[str] = frozenset()

    def begin(self, msg: Message, rows: range, coordinate: Coordinate) -> Tensor:
        """Return the coordinate of a site in some rows of the first run."""
        return coordinate.draw()

    def fixed_coordinate(self, msg: Message, rows: range) -> Tensor | None:
        """Return the coordinate of a fixed site in a further run; None for another site."""
        return None


class LatentValues(Beginning):
    """
    Specified initial values, the same in all rows, and draws of other sites.

    :param values: the values by site, in the shape of a run without particles.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values

    def begin(self, msg: Message, rows: range, coordinate: Coordinate) -> Tensor:
        """
        Return the coordinate of a given value, or a draw.

        :raises NoCoordinateError: naming a site whose value has no known coordinate.
        """
        value = self._values.get(msg["name"])
        return coordinate.draw() if value is None else _fixed_at(msg, coordinate, value)


def _fixed_at(msg: Message, coordinate: Coordinate, value: Tensor) -> Tensor:
    try:
        at = coordinate.at(value.expand(msg["fn"].shape()))
    except NoCoordinateError as error:
        raise NoCoordinateError(
            f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) cannot start at a given "
            f"value in these coordinates ({error}): use coordinates='latent'"
        ) from error
    return at.detach().expand(tuple(msg["fn"].batch_shape) + coordinate.event_shape).clone()
