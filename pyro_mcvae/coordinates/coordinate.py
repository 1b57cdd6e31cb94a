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
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_mcvae.checks.angles import is_circular
from pyro_mcvae.coordinates.bijection import bijection_of
from pyro_mcvae.coordinates.logarithmic_draws import logarithmic_draw
from pyro_mcvae.coordinates.noise import Noise, StandardNormal, noise_of, sum_event
from pyro_mcvae.programs.errors import NoCoordinateError
from pyro_mcvae.programs.known_logs import knowing, known_logs, positive
from pyro_mcvae.programs.masks import with_mask
from pyro_mcvae.programs.moving_supports import elementwise
from pyro_mcvae.programs.precision import without_autocast
from pyro_mcvae.programs.score import is_rejection_sampled
from pyro_mcvae.programs.sites import is_masked, is_straight_through, known_support, layers
from pyro_mcvae.programs.types import Distribution

Coordinates = Literal["noise", "latent", "resting"]


class Coordinate(ABC):
    """
    A parameterization of one guide site's draw.

    :ivar event_shape: the shape of the coordinate of one batch element.
    :ivar reparameterized: whether gradients may pass through draws, to the guide's parameters.
    :ivar normal: whether its density is the standard normal one.
    :ivar moves: whether chains move it.
    :ivar bounded: whether its values lie in a part of the real numbers only.
    :ivar follows: whether its density may depend on other coordinates. Then it belongs to the
        density of all of them, also where a mask takes it out of the weight: it was drawn.
    """

    event_shape: torch.Size
    reparameterized: bool = True
    normal: bool = False
    moves: bool = True
    bounded: bool = False
    follows: bool = False

    @property
    def kind(self) -> tuple[type, bool, bool]:
        """What tells the coordinates of a site in two runs apart, but for their shape."""
        return type(self), self.reparameterized, self.normal

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

    def log_prob(self, coordinate: Tensor) -> Tensor | None:
        r"""
        :math:`\log q(T(\epsilon)) = \log \text{base}(\epsilon) - \log |\det T'|`, the site's
        density, where the determinant does not depend on the noise: cheaper than the distribution's
        own, and without the way through the value. None elsewhere, and where the distribution masks
        itself, of which the noise knows nothing.
        """
        return None


class NoiseCoordinate(Coordinate):
    r"""
    Noise of independent standard variables: :math:`z = T(\epsilon)`, with T the guide's.

    :param fn: the site's distribution, for its batch shape.
    :param Noise noise: how its draws are made.
    """

    def __init__(self, fn: Distribution, noise: Noise) -> None:
        self.batch_shape = fn.batch_shape
        self.reparameterized = not _forbids_rsample(fn)
        self.noise = noise
        self.normal = isinstance(noise.standard, StandardNormal)
        self.event_shape = noise.event_shape
        support = elementwise(known_support(fn))
        self.bounded, self._simplex = (
            support is not constraints.real,
            support is constraints.simplex,
        )
        self._masked = is_masked(fn)
        # The noise and its density at the last call of log_prob, which log_base then shares.
        self._latest: tuple[Tensor, Tensor] | None = None

    def draw(self) -> Tensor:
        with torch.no_grad():
            return self.noise.standard.sample(self.batch_shape + self.event_shape)

    def value(self, coordinate: Tensor) -> Tensor:
        if not self.bounded:
            with without_autocast():
                return self.noise.transform(coordinate)
        with without_autocast(), knowing():
            return positive(self.noise.transform(coordinate), self._simplex)

    def at(self, value: Tensor) -> Tensor:
        if self.noise.inverse is None:
            raise NoCoordinateError("the noise that a given value was made of is not known")
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
    """The value itself, mapped to the real line where its support is constrained."""

    follows = True

    def __init__(self, fn: Distribution) -> None:
        fn = self.fn = _without_masks(fn)
        self.reparameterized = fn.has_rsample and not is_rejection_sampled(fn)
        self.transform = bijection_of(fn)
        support = elementwise(known_support(fn))
        self.bounded, self._simplex = (
            support is not constraints.real,
            support is constraints.simplex,
        )
        shape = self.transform.inverse_shape(fn.batch_shape + fn.event_shape)
        # A tuple where torch 2.5 adds the shapes of an expanded distribution.
        self.event_shape = torch.Size(shape[len(fn.batch_shape) :])

    def draw(self) -> Tensor:
        with knowing():
            value = logarithmic_draw(self.fn) if self.reparameterized else self.fn.sample()
            # An alias: a flow knows the density of the tensor that it drew, without a gradient.
            return self.transform.inv(positive(value.view_as(value), self._simplex))

    def value(self, coordinate: Tensor) -> Tensor:
        with knowing():
            return positive(self.transform(coordinate), self._simplex)

    def at(self, value: Tensor) -> Tensor:
        return self.transform.inv(value)

    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        extra = self.fn.event_dim - self.transform.codomain.event_dim
        with known_logs(value):
            log_det = self.transform.log_abs_det_jacobian(coordinate, value)
            return self.fn.log_prob(value) + sum_event(log_det, extra)


class CircularCoordinate(UnconstrainedCoordinate):
    """
    An angle, wound off to the real line.

    The density of a von Mises distribution is one on the circle, and repeats itself on the line, on
    which a model need not. So the program sees the angle in [-pi, pi), wherever the coordinate is:
    then everything repeats itself, and a chain on the line is one on the circle.
    """

    def value(self, coordinate: Tensor) -> Tensor:
        return (coordinate + math.pi).remainder(2 * math.pi) - math.pi

    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        return self.fn.log_prob(value)


def _drawn(fn: Distribution) -> Any:
    """The distribution without its masks, but for those inside of a transform."""
    return with_mask(fn, None) if is_masked(fn) else fn


def _without_masks(fn: Distribution) -> Any:
    """The distribution of what is drawn, with the density of masked entries, too."""
    bare = _drawn(fn)
    if is_masked(bare):
        name = type(bare).__name__
        raise NoCoordinateError(
            f"{name} transforms a distribution that masks itself: mask the result, as in "
            f"{name}(...).mask(...)"
        )
    return bare


class ValueCoordinate(Coordinate):
    """The value itself, as it is."""

    def __init__(self, fn: Distribution) -> None:
        self.fn = fn
        self.event_shape = fn.event_shape

    def draw(self) -> Tensor:
        with torch.no_grad():
            value: Tensor = self.fn()
        return value.view_as(value)  # an alias, as of an unconstrained coordinate

    def value(self, coordinate: Tensor) -> Tensor:
        return coordinate

    def at(self, value: Tensor) -> Tensor:
        return value

    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        return self.fn.log_prob(value)


class DiscreteCoordinate(ValueCoordinate):
    """A discrete value, which no chain moves."""

    moves = False
    follows = True

    def __init__(self, fn: Distribution) -> None:
        super().__init__(fn)
        self._drawn = _drawn(fn)

    def log_base(self, coordinate: Tensor, value: Tensor) -> Tensor:
        return self._drawn.log_prob(value)


def _forbids_rsample(fn: Distribution) -> bool:
    """Whether has_rsample_(False) was said of this very distribution, as of a rough model's."""
    return any(vars(layer).get("has_rsample") is False for layer in layers(fn))


def coordinate_of(fn: Distribution, coordinates: Coordinates = "noise") -> Coordinate:
    """
    The coordinate of a guide site's draws.

    :param fn: the site's distribution.
    :param coordinates: ``"noise"``; ``"latent"``, unconstrained values throughout; or, for draws
        that nothing moves, ``"resting"``: noise, and the values where it is not known.
    :raises NotImplementedError: where there is none.
    """
    if known_support(fn).is_discrete:
        return DiscreteCoordinate(fn)
    noise = noise_of(fn) if coordinates in ("noise", "resting") else None
    return _without_noise(fn, coordinates) if noise is None else NoiseCoordinate(fn, noise)


def _without_noise(fn: Distribution, coordinates: Coordinates) -> Coordinate:
    if is_straight_through(fn):
        # Their density is that of values that were never rounded: moving those leaves the
        # program, whose model sees 0 and 1 only.
        raise NotImplementedError("it rounds its draws")
    if coordinates == "resting":
        return ValueCoordinate(fn)
    return CircularCoordinate(fn) if is_circular(fn) else UnconstrainedCoordinate(fn)
