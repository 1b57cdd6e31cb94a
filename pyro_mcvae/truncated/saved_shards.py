"""Saving and restoring states that are dealt out over processes, which are no buffers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pyro_mcvae.truncated.buffers import StateBuffers
from pyro_mcvae.truncated.shards import gather_states, key_of

__all__ = ["put_whole_states", "shards_undo"]


def put_whole_states(guide: StateBuffers, state: dict[str, Tensor], prefix: str) -> None:
    """
    Put all states into a module's ``state_dict``, in the place of those of one rank: on rank 0, and
    in its CPU's memory, by the name that their buffer has in a single process, ``[N, S, bytes]``.
    Every rank of a distributed run must call this.

    :raises ValueError: if the ranks keep states of different plates.
    """
    whole = gather_states(guide._shards)
    for name, (shard, _) in guide._shards.items():
        del state[prefix + key_of(name, shard)]
    state.update({prefix + name: kept for name, kept in whole.items()})


def shards_undo(guide: StateBuffers) -> Callable[[], None]:
    """Remember them; what it returns keeps them again, in the tensors in which they were."""
    copied = {name: (*found, found[1].clone()) for name, found in guide._shards.items()}

    def undo() -> None:
        guide._shards = {name: (shard, kept) for name, (shard, kept, _) in copied.items()}
        for _, kept, value in copied.values():
            kept.copy_(value)

    return undo
