"""
Whether a guide's parameters move the ends of a distribution's support.

Score functions and the estimators that leave out the score's mean (``stl``, ``dreg``) rest on
:math:`E_q[\\nabla \\log q] = 0`, which holds where the support is the same for all parameters. Of
``Uniform(low, high)`` with learned ends the score is :math:`1 / (high - low)` everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_mcvae.ops.lanes import is_mapped
from pyro_mcvae.ops.recording import holds
from pyro_mcvae.programs.sites import bare, known_support
from pyro_mcvae.programs.transforms import is_elementary, parts_of
from pyro_mcvae.programs.types import Constraint, Distribution, Transform

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
    image: Constraint | None = known_support(base)
    for transform in fn.transforms:
        fills = image is not None and _fills(image, transform.domain)
        # The ends of what a transform takes go to infinity, and those of a part of it do not.
        opens = fills and _is_real(transform.codomain) and not _is_real(transform.domain)
        if bounded and _may_learn(transform) and not (opens and is_elementary(transform)):
            return True
        bounded = not opens and (bounded or not _is_real(transform.codomain))
        image = transform.codomain if fills else None
    return False


def _fills(image: Constraint, domain: Constraint) -> bool:
    """Whether all that a transform could take comes in."""
    image, domain = elementwise(image), elementwise(domain)
    ends = [(vars(image).get(name), end) for name, end in vars(domain).items()]
    return type(image) is type(domain) and all(_agree(*pair) for pair in ends)


def _agree(end: Any, other: Any) -> bool:
    if end is other or isinstance(other, Tensor | list):
        return end is other
    if not isinstance(end, Tensor):
        return bool(end == other)
    return not is_mapped(end) and holds((end == other).all())


def elementwise(constraint: Constraint) -> Constraint:
    """The constraint of each element of what a vector's is about."""
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    return constraint


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
    return elementwise(constraint) is constraints.real


def _may_learn(transform: Transform) -> bool:
    """Whether a transform has parameters; of flows it is taken for granted."""
    if not is_elementary(transform):
        return True
    return any(_learns(value) for part in parts_of(transform) for value in vars(part).values())


def _learns(value: object) -> bool:
    if isinstance(value, torch.distributions.Distribution):  # whose quantiles a transform has
        return any(map(_learns, vars(value).values()))
    return isinstance(value, Tensor) and value.requires_grad
