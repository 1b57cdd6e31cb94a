"""
Whether a guide's parameters move the ends of a distribution's support.

Score functions and the estimators that leave out the score's mean (``stl``, ``dreg``) rest on
:math:`E_q[\\nabla \\log q] = 0`, which holds where the support is the same for all parameters. Of
``Uniform(low, high)`` with learned ends the score is :math:`1 / (high - low)` everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_mcvae.programs.sites import bare, known_support, layers
from pyro_mcvae.programs.types import Constraint, Distribution, Transform

__all__ = ["is_elementary", "is_pushed_forward", "moves_support", "transforms_of"]

_TRANSFORMED = torch.distributions.TransformedDistribution


def moves_support(fn: Distribution) -> bool:
    """
    Whether the support's ends have a gradient to parameters.

    Of transformed distributions that do not say their own support: whether a bounded base meets a
    transform that may move its ends.
    """
    fn = bare(fn)
    if is_pushed_forward(fn):
        return _moved_by_transforms(fn)
    return any(t.requires_grad for t in _bounds(known_support(fn)))


def is_pushed_forward(fn: Distribution) -> bool:
    """Whether transforms make a distribution of another, and it does not say its own support."""
    return isinstance(fn, _TRANSFORMED) and type(fn).support is _TRANSFORMED.support


def _moved_by_transforms(fn: Distribution) -> bool:
    base = fn.base_dist
    if moves_support(base):
        return True
    bounded = not _is_real(known_support(base))
    for transform in fn.transforms:
        if bounded and _may_learn(transform):
            return True
        if not _is_real(transform.codomain):
            bounded = True
        elif not _is_real(transform.domain):
            bounded = False  # its ends are at infinity now
    return False


def _bounds(constraint: Constraint) -> Iterator[Tensor]:
    """The tensors that a constraint is made of."""
    if isinstance(constraint, Tensor):
        yield constraint
    elif isinstance(constraint, list | tuple):
        for part in constraint:
            yield from _bounds(part)
    elif isinstance(constraint, constraints.Constraint):
        for part in vars(constraint).values():
            yield from _bounds(part)


def _is_real(constraint: Constraint) -> bool:
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    return constraint is constraints.real


def _may_learn(transform: Transform) -> bool:
    """Whether a transform has parameters; of flows it is taken for granted."""
    if not is_elementary(transform):
        return True
    return any(
        (isinstance(value, Tensor) and value.requires_grad)
        for part in _parts(transform)
        for value in vars(part).values()
    )


def _parts(transform: Transform) -> Iterator[Transform]:
    inner = _inner(transform)
    if not inner:
        yield transform
    for part in inner:
        yield from _parts(part)


def _inner(transform: Transform) -> list[Transform]:
    """The transforms that a transform is made of."""
    if type(transform).__name__ == "_InverseTransform":
        return [transform.inv]
    base = getattr(transform, "base_transform", None)
    return list(getattr(transform, "parts", None) or ([] if base is None else [base]))


def is_elementary(transform: Transform) -> bool:
    """Whether a transform is made of torch's closed-form ones."""
    return type(transform).__module__ == "torch.distributions.transforms" and all(
        is_elementary(part) for part in _inner(transform)
    )


def transforms_of(fn: Distribution) -> Iterator[Transform]:
    """All transforms of a distribution, also below wrappers."""
    for layer in layers(fn):
        yield from getattr(layer, "transforms", ())
