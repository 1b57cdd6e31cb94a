"""The transforms that make a distribution of another, and what they are made of."""

from __future__ import annotations

from collections.abc import Iterator

from pyro_mcvae.programs.sites import layers
from pyro_mcvae.programs.types import Distribution, Transform


def transforms_of(fn: Distribution) -> Iterator[Transform]:
    """All transforms of a distribution, also below wrappers."""
    for layer in layers(fn):
        yield from getattr(layer, "transforms", ())


def parts_of(transform: Transform) -> Iterator[Transform]:
    """The transforms that a transform is made of, down to those that are made of no other."""
    inner = _inner(transform)
    if not inner:
        yield transform
    for part in inner:
        yield from parts_of(part)


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
