"""States that are dealt out over the processes of a distributed run, by the index of the datum."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_mcvae.ops import ranks
from pyro_mcvae.ops.shards import Shard
from pyro_mcvae.truncated.layout import StateLayout
from pyro_mcvae.truncated.searched_sites import StatesError

__all__ = [
    "Shards",
    "as_names",
    "check_names",
    "check_owned",
    "check_same",
    "gather_states",
    "key_of",
    "parse_key",
    "shard_of",
]

# By the buffer that all of them would be: which states this process keeps, and these.
Shards = dict[str, tuple[Shard, Tensor]]


def as_names(shard: str | Iterable[str] | None) -> tuple[str, ...]:
    """
    The plates that are dealt out, by name.

    :raises ValueError: for what is no name.
    """
    names = () if shard is None else (shard,) if isinstance(shard, str) else shard
    if not isinstance(names, Iterable) or not all(isinstance(n, str) and n for n in names):
        raise ValueError(
            f"shard must be the name of a data plate, or several, got {shard!r}: pass "
            f"shard='data' for pyro.plate('data', N, subsample=index)"
        )
    return tuple(names)


def shard_of(layout: StateLayout, names: tuple[str, ...]) -> Shard | None:
    """
    The data of a block whose states this process keeps; None for all of them.

    :raises StatesError: for a block with two of the plates that are dealt out.
    """
    found = [axis for axis, plate in enumerate(layout.plates) if plate.name in names]
    if len(found) > 1:
        both = " and ".join(repr(layout.plates[axis].name) for axis in found)
        raise StatesError(
            f"states of {', '.join(map(repr, layout.sites))} are kept for each pair of plates "
            f"{both}, and shard={names!r} deals out both: name one of them"
        )
    if not found or ranks.num_ranks() == 1:
        return None
    return Shard(layout.full_sizes, found[0], ranks.rank(), ranks.num_ranks())


def check_names(names: tuple[str, ...], layouts: list[StateLayout]) -> None:
    """
    Check that the plates that are dealt out have states.

    :raises StatesError: for a name that no data plate has.
    """
    plates = sorted({plate.name for layout in layouts for plate in layout.plates})
    for name in names:
        if name not in plates:
            raise StatesError(
                f"shard={name!r} is no data plate of the model's discrete sites: those that have "
                f"states are {', '.join(map(repr, plates))}"
            )


def check_same(name: str, kept: Shard, wanted: Shard | None) -> None:
    """
    Compare the data whose states are kept with those that should be.

    :raises StatesError: if the processes are others than before.
    """
    if kept == wanted:
        return
    now = f"rank {ranks.rank()} of {ranks.num_ranks()}"
    raise StatesError(
        f"the states of plate '{name}' are those of rank {kept.rank} of {kept.num_ranks} (sizes "
        f"{kept.sizes}), and this is {now} (sizes {wanted.sizes if wanted else 'not dealt out'}): "
        f"save_checkpoint on all ranks, and load_checkpoint in the other run"
    )


def check_owned(name: str, shard: Shard, index: Tensor) -> None:
    """
    Check that this process keeps the states of a minibatch.

    :raises StatesError: naming an index that is another process's.
    """
    # On a device nobody waits for the answer: there a datum that is not kept has no place at all.
    if index.device.type != "cpu" and not is_validation_enabled():
        return
    others = ~shard.owns(index)
    if bool(others.any()):
        datum = int(shard.datum(index[others])[0])
        raise StatesError(
            f"plate '{name}' was given index {datum}, whose states are kept by rank "
            f"{datum % shard.num_ranks} of {shard.num_ranks}, and this is rank {shard.rank}: with "
            f"shard='{name}' a rank works on the indices {shard.rank}, "
            f"{shard.rank + shard.num_ranks}, {shard.rank + 2 * shard.num_ranks}, ... only. Deal "
            f"minibatches out by RankBatches({shard.size}, batch_size, fixed=True)"
        )


def gather_states(shards: Shards) -> dict[str, Tensor]:
    """
    All states, on rank 0 and on its CPU; empty on the others.

    :raises ValueError: if the ranks keep states of different plates.
    """
    own = {
        name: (shard.sizes, shard.axis, values.shape) for name, (shard, values) in shards.items()
    }
    everyone = ranks.gather(own)
    for other, found in enumerate(everyone):
        if {n: v[:2] for n, v in found.items()} != {n: v[:2] for n, v in everyone[0].items()}:
            raise ValueError(
                f"rank {other} keeps states of {sorted(found)}, and rank 0 of "
                f"{sorted(everyone[0])}: take a step on every rank before saving"
            )
    whole = {}
    for name in sorted(shards):
        shard, values = shards[name]
        parts = ranks.gather_to_first(values, [found[name][2] for found in everyone])
        for source, part in enumerate(parts):
            if name not in whole:
                whole[name] = torch.empty(shard.whole(part), dtype=part.dtype)
            shard.of(source).put(whole[name], part.cpu())
    return whole


def key_of(name: str, shard: Shard) -> str:
    """Under which key a state_dict has the states that one rank keeps."""
    return f"{name}.of_{shard.name}"


def parse_key(key: str) -> tuple[str, Shard] | None:
    """The buffer's name and the shard of such a key; None for a key of whole states."""
    found = re.fullmatch(r"(states_[^.]*)\.of_(rank\d+of\d+_axis\d+of[\dx]+)", key)
    return (found[1], Shard.parse(found[2])) if found else None
