"""What a step was called with, to tell whether the next one is of the same."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.types import Program

__all__ = ["Call", "call_of", "is_same"]


class Call(NamedTuple):
    """What a step was called with; a tensor that was written to has another version."""

    model: Program
    guide: Program
    leaves: list[object]
    versions: list[int | None]


def call_of(programs: Programs) -> Call:
    leaves = tree_leaves((programs.args, programs.kwargs))
    versions = [_version(leaf) for leaf in leaves]
    return Call(programs.model, programs.guide, leaves, versions)


def _version(leaf: object) -> int | None:
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else None


def is_same(now: Call, old: Call) -> bool:
    """Whether two steps have the same programs and arguments."""
    return (
        now.model == old.model
        and now.guide == old.guide
        and now.versions == old.versions
        and len(now.leaves) == len(old.leaves)
        and all(_same_leaf(a, b) for a, b in zip(now.leaves, old.leaves, strict=True))
    )


def _same_leaf(a: object, b: object) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b
