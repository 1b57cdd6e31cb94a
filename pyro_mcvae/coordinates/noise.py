r"""
Map standard noise, of fixed density, to draws of distributions.

The maps are registered by class, and users add others by :func:`register_noise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import getattr_static
from typing import Any, NamedTuple

import torch
from pyro import distributions as dist
from pyro.contrib.zuko import ZukoToPyro
from pyro.ops.tensor_utils import safe_normalize
from torch import Tensor

from pyro_mcvae.ops.compat import low_rank_of, scale_tril_of
from pyro_mcvae.programs.log_values import pushed
from pyro_mcvae.programs.methods import has_methods_of
from pyro_mcvae.programs.types import Distribution, NoCoordinateError


class Noise(NamedTuple):
    r"""
    The map from noise to a distribution's draws: :math:`z = T(\epsilon)`.

    :ivar standard: a scalar distribution on the real line, without parameters to learn.
    :ivar event_shape: the shape of the standard variables of one batch element.
    :ivar transform: T, from the noise to the value.
    :ivar log_scale: returns the log derivative of T per standard variable, broadcastable to batch
        and event. None unless T acts elementwise and its derivative does not depend on the noise.
    :ivar inverse: T's inverse, from the value to the noise, if it exists.

    Example, the noise of a log-normal distribution, for :func:`register_noise`::

        >>> import torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import Noise
        >>> standard = dist.Normal(torch.zeros(()), torch.ones(()))
        >>> noise = Noise(standard, torch.Size(), torch.exp, inverse=torch.log)
        >>> noise.transform(torch.tensor(0.0)), noise.inverse(torch.tensor(1.0))
        (tensor(1.), tensor(0.))
    """

    standard: Distribution | StandardNormal
    event_shape: torch.Size
    transform: Callable[[Tensor], Tensor]
    log_scale: Callable[[], Tensor] | None = None
    inverse: Callable[[Tensor], Tensor] | None = None


class StandardNormal:
    """N(0, 1), with as few operations as possible."""

    def __init__(self, like: Tensor) -> None:
        self._like = like.detach()

    def sample(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, dtype=self._like.dtype, device=self._like.device)

    def log_prob(self, value: Tensor) -> Tensor:
        return -0.5 * (value * value + _LOG_TWO_PI)


_LOG_TWO_PI = math.log(2 * math.pi)
NoiseMaker = Callable[[Any], Any]  # takes a distribution of its class
_REGISTRY: dict[type, NoiseMaker] = {}


def register_noise(*classes: type) -> Callable[[NoiseMaker], NoiseMaker]:
    """
    Register the map from noise to draws for classes of distributions.

    Chains then move the noise. The draws of all other classes, custom ones too, move as
    unconstrained values.

    :param classes: the classes, with those of their subclasses that override no method of theirs,
        nor ``has_rsample``.
    :returns: a decorator for a function that maps a distribution to a :class:`Noise`, or a tuple of
        its fields. The function returns None if there is no explicit noise.

    Example::

        >>> import torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import Noise, register_noise
        >>> from pyro_mcvae.coordinates.noise import noise_of
        >>> @register_noise(dist.Exponential)
        ... def _exponential(fn):
        ...     standard = dist.Normal(torch.zeros(()), torch.ones(()))
        ...     return Noise(
        ...         standard, fn.event_shape, lambda eps: -torch.special.log_ndtr(eps) / fn.rate
        ...     )
        >>> noise_of(dist.Exponential(torch.tensor([1.0, 2.0]))).transform(torch.zeros(2))
        tensor([0.6931, 0.3466])
    """

    def decorator(function: NoiseMaker) -> NoiseMaker:
        for cls in classes:
            _REGISTRY[cls] = function
        return function

    return decorator


def noise_of(fn: Distribution) -> Noise | None:
    """Return the noise of a distribution's draws, or None if it is not explicit."""
    parent = next((c for c in type(fn).__mro__ if c in _REGISTRY), None)
    if parent is None or not _draws_like(fn, parent):
        return None
    noise = _REGISTRY[parent](fn)
    return None if noise is None else Noise(*noise)


def _draws_like(fn: Distribution, parent: type) -> bool:
    """Return whether draws of a distribution are those of a registered class."""
    if not has_methods_of(fn, parent):
        return False
    # Subclasses within PyTorch and Pyro draw in other ways, too.
    draws = "rsample", "log_prob", "__call__", "has_rsample"
    kind = type(fn)
    return all(getattr_static(kind, n, None) is getattr_static(parent, n, None) for n in draws)


def _standard(cls: type, like: Tensor, *args: Tensor) -> Any:
    like = like.detach()
    zero, one = like.new_zeros(()), like.new_ones(())
    return cls(*args, zero, one, validate_args=False)


def _pair(*names: str) -> list[type]:
    classes = [getattr(module, n, None) for module in (dist, torch.distributions) for n in names]
    return [cls for cls in dict.fromkeys(classes) if cls is not None]


def _scaled(fn: Distribution, standard: Distribution | StandardNormal) -> Noise:
    """Return the noise of a location-scale family."""
    return Noise(
        standard,
        fn.event_shape,
        lambda eps: fn.loc + fn.scale * eps,
        lambda: fn.scale.log(),
        lambda value: (value - fn.loc) / fn.scale,
    )


@register_noise(*_pair("Normal"))
def _normal(fn: Distribution) -> Noise:
    return _scaled(fn, StandardNormal(fn.loc))


@register_noise(*_pair("Laplace", "Cauchy", "Logistic"))
def _location_scale(fn: Distribution) -> Noise:
    kind = next(c for c in _pair("Laplace", "Cauchy", "Logistic") if isinstance(fn, c))
    return _scaled(fn, _standard(kind, fn.loc))


@register_noise(*_pair("StudentT"))
def _student_t(fn: Distribution) -> Noise | None:
    # If all strides are zero, df is one number, broadcast to the shape of loc.
    if fn.df.requires_grad or any(fn.df.stride(d) for d in range(fn.df.dim()) if fn.df.size(d) > 1):
        return None  # the noise's density would depend on parameters, or on the datum
    standard = _standard(dist.StudentT, fn.loc, fn.df[(0,) * fn.df.dim()])
    return _scaled(fn, standard)


@register_noise(*_pair("Uniform"))
def _uniform(fn: Distribution) -> Noise:
    standard = StandardNormal(fn.low)
    low, high = fn.low.detach(), fn.high.detach()
    inner = torch.nextafter(low, high), torch.nextafter(high, low)

    def transform(eps: Tensor) -> Tensor:
        # From the nearer end: the distance may be far below the rounding of the other end.
        below, above = fn.low + width() * tail(-eps), fn.high - width() * tail(eps)
        # Rounding would put extreme noise on the interval's ends, where densities are infinite.
        return torch.where(eps < 0, below, above).clamp(*inner)

    def width() -> Tensor:
        return fn.high - fn.low

    def tail(eps: Tensor) -> Tensor:
        # torch.special.ndtr(-eps) is 0 from 5.5 on, in double precision from 8.3 on.
        return 0.5 * torch.special.erfc(eps * math.sqrt(0.5))

    def inverse(value: Tensor) -> Tensor:
        return torch.special.ndtri((value - fn.low) / width())

    return Noise(standard, fn.event_shape, transform, inverse=inverse)


@register_noise(*_pair("MultivariateNormal"))
def _multivariate_normal(fn: Distribution) -> Noise:
    factor = scale_tril_of(fn)
    return Noise(
        StandardNormal(fn.loc),
        fn.event_shape,
        lambda eps: fn.loc + (factor @ eps.unsqueeze(-1)).squeeze(-1),
        inverse=lambda value: torch.linalg.solve_triangular(
            factor, (value - fn.loc).unsqueeze(-1), upper=False
        ).squeeze(-1),
    )


@register_noise(*_pair("LowRankMultivariateNormal"))
def _low_rank_normal(fn: Distribution) -> Noise:
    factor, diagonal = low_rank_of(fn)
    rank = factor.shape[-1]

    def transform(eps: Tensor) -> Tensor:
        low = (factor @ eps[..., :rank].unsqueeze(-1)).squeeze(-1)
        return fn.loc + low + diagonal.sqrt() * eps[..., rank:]

    return Noise(StandardNormal(fn.loc), torch.Size([rank + fn.event_shape[0]]), transform)


@register_noise(dist.ProjectedNormal)
def _projected_normal(fn: Distribution) -> Noise:
    # One variable for each entry of the value, which has one degree of freedom less.
    return Noise(
        StandardNormal(fn.concentration),
        fn.event_shape,
        lambda eps: safe_normalize(fn.concentration + eps),
    )


@register_noise(*_pair("Independent"), torch.distributions.Independent)
def _independent(fn: Distribution) -> Noise | None:
    noise = noise_of(fn.base_dist)
    if noise is None:
        return None
    count = fn.reinterpreted_batch_ndims
    extra = fn.base_dist.batch_shape[len(fn.base_dist.batch_shape) - count :]
    return noise._replace(event_shape=extra + noise.event_shape)


@register_noise(
    dist.torch_distribution.ExpandedDistribution, dist.torch_distribution.MaskedDistribution
)
def _wrapped(fn: Distribution) -> Noise | None:
    return noise_of(fn.base_dist)


def _flow_classes() -> list[type]:
    # LogNormal, Gumbel and others inherit from TransformedDistribution.
    root = torch.distributions.TransformedDistribution
    classes = [
        cls
        for module in (dist, torch.distributions)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, root) and cls.rsample is root.rsample
    ]
    return list(dict.fromkeys([root, *classes]))


@register_noise(*_flow_classes())
def _transformed(fn: Distribution) -> Noise | None:
    noise = noise_of(fn.base_dist)
    if noise is None:
        return None
    standard, event_shape, base, _, base_inverse = noise
    count = len(fn.base_dist.batch_shape) - len(fn.batch_shape)
    if count > 0:
        # Transforms that mix batch elements of the base make them one event.
        event_shape = fn.base_dist.batch_shape[-count:] + event_shape

    def transform(eps: Tensor) -> Tensor:
        value = base(eps)
        for part in fn.transforms:
            value = pushed(part, value)
        return value

    def inverse(value: Tensor) -> Tensor:
        assert base_inverse is not None
        for part in reversed(fn.transforms):
            if not part.bijective:
                # For example AbsTransform, whose noise may have either sign.
                raise NoCoordinateError(f"{type(part).__name__} is not one to one")
            try:
                value = part.inv(value)
            except (KeyError, NotImplementedError) as error:
                raise NoCoordinateError(f"{type(part).__name__} has no inverse") from error
        return base_inverse(value)

    return Noise(
        standard, event_shape, transform, inverse=None if base_inverse is None else inverse
    )


@register_noise(*_pair("Kumaraswamy"))
def _kumaraswamy(fn: Distribution) -> Noise:
    a, b, info = fn.concentration1, fn.concentration0, torch.finfo(fn.concentration1.dtype)

    def transform(eps: Tensor) -> Tensor:
        # (1 - ndtr(eps) ** (1 / b)) ** (1 / a), where ndtr(eps) may be rounded to 1.
        log = _log1mexp(torch.special.log_ndtr(eps) / b) / a
        return log.exp().clamp(info.tiny, 1 - info.eps / 2)

    def inverse(value: Tensor) -> Tensor:
        return torch.special.ndtri((1 - value**a) ** b)

    return Noise(StandardNormal(a), fn.event_shape, transform, inverse=inverse)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)), for x below 0."""
    far = x < -0.7  # each branch at a value where its derivative is finite
    log1p = torch.log1p(-torch.where(far, x, -1.0).exp())
    return torch.where(far, log1p, (-torch.where(far, -1.0, x).expm1()).log())


@register_noise(ZukoToPyro)
def _zuko(fn: Distribution) -> Noise | None:
    flow = fn.dist
    if type(flow).__name__ != "NormalizingFlow":  # by name, because Zuko is not a dependency
        return noise_of(flow)
    noise = noise_of(flow.base)
    if noise is None:
        return None
    base, inverse = noise.transform, noise.inverse
    # Its transform goes from the value to the base.
    return noise._replace(
        transform=lambda eps: flow.transform.inv(base(eps)),
        log_scale=None,
        inverse=None if inverse is None else lambda value: inverse(flow.transform(value)),
    )


def sum_event(value: Any, count: int) -> Tensor:
    """Sum the last ``count`` dims."""
    if not isinstance(value, Tensor):
        return torch.as_tensor(value)
    return value.sum(tuple(range(-count, 0))) if count else value
