"""Between the real numbers and where a distribution's values lie."""

from __future__ import annotations

from torch import Tensor
from torch.distributions import ComposeTransform, biject_to, constraints

from pyro_mcvae.programs.moving_supports import elementwise, is_pushed_forward
from pyro_mcvae.programs.sites import bare
from pyro_mcvae.programs.types import Constraint, Distribution, Transform


def bijection_of(fn: Distribution) -> Transform:
    """
    From the real numbers to the values that a distribution draws.

    PyTorch takes the last transform's codomain for the support, whatever comes in: it has the real
    numbers for ``TransformedDistribution(Beta(2.0, 2.0), AffineTransform(0.0, 10.0))`` and for its
    own ``biject_to(constraints.positive)``, which ends in a shift by zero. So where less comes in
    than a transform could take, the bijection of what comes in goes through it.

    Example::

        >>> scaled = dist.TransformedDistribution(
        ...     dist.Beta(2.0, 2.0), [dist.transforms.AffineTransform(0.0, 10.0)]
        ... )
        >>> scaled.support, bijection_of(scaled)(torch.tensor(0.0))
        (Real(), tensor(5.))
    """
    image, pushed = _reach(bare(fn))
    return ComposeTransform([biject_to(image), *pushed]) if pushed else biject_to(_support(fn))


def _reach(fn: Distribution) -> tuple[Constraint, list[Transform]]:
    """What constrains values up to the transform that takes less than it could, and those on."""
    if not is_pushed_forward(fn):
        return _support(fn), []
    image, pushed = _reach(bare(fn.base_dist))
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
    """Whether all that a transform could take comes in."""
    image, domain = elementwise(image), elementwise(domain)
    if type(image) is not type(domain):
        return False
    ends = [(vars(image)[name], end) for name, end in vars(domain).items()]
    return all(a is b or (not isinstance(a, Tensor | list) and a == b) for a, b in ends)


def _support(fn: Distribution) -> Constraint:
    """The support, of a mixture that of its components."""
    support = fn.support
    # Newer versions of torch check a mixture's values by a constraint that has no bijection.
    mixture = getattr(constraints, "MixtureSameFamilyConstraint", ())
    return support.base_constraint if isinstance(support, mixture) else support
