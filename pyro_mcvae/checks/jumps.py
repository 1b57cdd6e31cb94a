"""Operators whose value jumps, or whose derivative jumps, by their ATen name."""

from __future__ import annotations

from typing import Literal

Kind = Literal["jump", "kink"]

# The value is piecewise constant in floating-point inputs: the gradient omits its jumps.
_JUMPS = frozenset(
    [
        "round",
        "floor",
        "ceil",
        "trunc",
        "fix",
        "sign",
        "sgn",
        "heaviside",
        "bucketize",
        "searchsorted",
        "argmax",
        "argmin",
        "argsort",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "isclose",
        "signbit",
        "frac",
        "remainder",
        "fmod",
        "floor_divide",
    ]
)
# The value is continuous, and its derivative jumps.
_KINKS = frozenset(
    [
        "abs",
        "relu",
        "relu6",
        "leaky_relu",
        "prelu",
        "rrelu_with_noise",
        "hardtanh",
        "hardsigmoid",
        "hardswish",
        "clamp",
        "clamp_min",
        "clamp_max",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "max",
        "min",
        "amax",
        "amin",
        "sort",
        "topk",
        "median",
        "kthvalue",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "max_pool2d_with_indices",
        "cummax",
        "cummin",
        "softshrink",
    ]
)
# Without a derivative at the threshold: the value jumps there.
_BROKEN = frozenset({"hardshrink", "threshold"})


def kind_of(operator: str) -> Kind | None:
    """
    Return whether an operator's value jumps, has a kink, or neither (None).

    :param str operator: the ATen name, with or without overload: ``"aten::round.decimals"``
        or ``"relu_"``.

    Example::

        >>> from pyro_mcvae.checks.jumps import kind_of
        >>> kind_of("aten::round.decimals"), kind_of("relu_"), kind_of("aten::exp")
        ('jump', 'kink', None)
    """
    name = operator.rpartition("::")[2].partition(".")[0].rstrip("_")
    if name in _JUMPS or name in _BROKEN:
        return "jump"
    return "kink" if name in _KINKS else None


def jump_warning(site: str, operator: str, line: str) -> str:
    """Return the warning about a jump through which a latent passes to a density."""
    return (
        f"the density of site '{site}' jumps where {operator} of a latent does ({line}): gradients "
        f"through reparameterized draws omit the jump. Use a guide distribution without rsample "
        f"(fn.has_rsample_(False)), which has a score function, or a smooth step such as a sigmoid"
    )
