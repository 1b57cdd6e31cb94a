"""How tensors are put together in tuples, lists and dicts."""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils._pytree import TreeSpec


@dataclass(frozen=True)
class Tree:
    """A part of a key: a ``TreeSpec`` has no hash in torch 2.5."""

    spec: TreeSpec

    def __hash__(self) -> int:
        return hash(self.spec.num_leaves)
