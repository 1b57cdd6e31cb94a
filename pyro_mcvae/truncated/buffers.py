"""The states of a truncated posterior: packed, one tensor for each data plate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pyro_mcvae.ops import ranks
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.ops.options import FixedOptions
from pyro_mcvae.ops.shards import Shard
from pyro_mcvae.truncated.evolution import distinct_states
from pyro_mcvae.truncated.joint import JointRuns
from pyro_mcvae.truncated.layout import DataIndex, StateLayout
from pyro_mcvae.truncated.search import Populations
from pyro_mcvae.truncated.shards import (
    Shards,
    as_names,
    check_owned,
    check_same,
    key_of,
    parse_key,
    shard_of,
)
from pyro_mcvae.truncated.states import StateSpace

__all__ = ["StateBuffers"]

# The data of a chunk of the first states, so that unpacked ones never fill the memory.
_CHUNK = 1 << 24


class StateBuffers(FixedOptions, nn.Module):
    """
    Keeps S distinct states for each datum, ``[N, S, bytes]``; made when a block is first seen.

    All states are buffers. Those of one process only are none: DistributedDataParallel, which gives
    every process the buffers of the first, must not see them.

    :param int num_states: S.
    :param shard: the names of the data plates that are dealt out over the processes.
    :raises ValueError: if ``num_states`` is not an int of at least 1, or ``shard`` has no names.
    """

    def __init__(self, num_states: int, shard: str | Iterable[str] | None = None) -> None:
        super().__init__()
        num_states = check_count("num_states", num_states)
        self.num_states = num_states
        self.shard = as_names(shard)
        self._agreed: set[str] = set()
        self._shards: Shards = {}

    @property
    def has_states(self) -> bool:
        """Whether there are states: since the first call, or since they were loaded."""
        return bool(self._shapes())

    def _agree(self, runs: JointRuns) -> None:
        """Take the first states of rank 0: each rank of a distributed run has drawn others."""
        for _, layout in runs.layouts.searched:
            name = self._buffer(layout)
            if name not in self._agreed and name not in self._shards:
                self._agreed.add(name)
                ranks.from_first_rank(self._states(layout))

    def _minibatch(self, layout: StateLayout, data_index: DataIndex) -> Tensor:
        """The packed states of a minibatch, ``[E, S, bytes]``."""
        kept = self._states(layout)
        return kept.index_select(0, self._place(layout, data_index).to(kept.device))

    def _store(self, runs: JointRuns, populations: Populations, shared: bool) -> None:
        """
        Keep the states of a minibatch.

        :param bool shared: where every rank has all states, keep also those of the other ranks'
            minibatches, and let them have these.
        """
        for b, layout in runs.layouts.searched:
            population, data_index = populations[b], runs.data_index[b]
            if population is not None and data_index is not None:
                kept = self._states(layout)
                index = self._place(layout, data_index).to(kept.device)
                # Where the model gave NaN nothing was learned about the states.
                usable = ~population.log_joint.isnan().any(1).to(kept.device)
                before = kept.index_select(0, index)
                packed = torch.where(usable[:, None, None], population.packed.to(kept), before)
                if shared and self._buffer(layout) not in self._shards:
                    index, packed = map(ranks.concat_over_ranks, (index, packed))
                index, packed = _settle(index, packed)
                with torch.no_grad():
                    kept.index_copy_(0, index, packed)

    def _buffer(self, layout: StateLayout) -> str:
        return f"states_{layout.name}"

    def _states(self, layout: StateLayout) -> Tensor:
        name = self._buffer(layout)
        return self._shards[name][1] if name in self._shards else self.get_buffer(name)

    def _place(self, layout: StateLayout, data_index: DataIndex) -> Tensor:
        """Where the data of a minibatch are among those that are kept here."""
        name = self._buffer(layout)
        if name not in self._shards:
            return data_index.index
        shard = self._shards[name][0]
        check_owned(layout.plates[shard.axis].name, shard, data_index.index)
        return shard.place(data_index.index)

    # Not as tensors of the inference mode, in which no later step could write.
    @torch.inference_mode(False)
    def _prepare(self, layout: StateLayout, bank: Tensor | None) -> None:
        """Make the first states of a block, or check those that were loaded."""
        name, space = self._buffer(layout), layout.space
        if self.num_states > space.cardinality:
            raise ValueError(
                f"num_states={self.num_states}, but {', '.join(map(repr, layout.sites))} of plate "
                f"'{layout.plates[-1].name}' have {space.cardinality} states in all: pass "
                f"num_states={space.cardinality}, which is exact inference"
            )
        shard, kept = shard_of(layout, self.shard), self._shards.get(name)
        if kept is not None:
            self._check(layout, kept[0].whole(kept[1]))
            check_same(layout.plates[kept[0].axis].name, kept[0], shard)
        elif name in self._buffers:
            found = self.get_buffer(name)
            self._check(layout, tuple(found.shape))
            if shard is not None:
                self._shards[name] = shard, shard.take(found).clone()
                del self._buffers[name]
        else:
            assert bank is not None
            num_data = layout.num_data if shard is None else shard.num_rows
            made = _first_states(space, bank, num_data, self.num_states)
            if shard is None:
                self.register_buffer(name, made)
            else:
                self._shards[name] = shard, made
        if bank is not None and bank.device != self._states(layout).device:
            # Loaded before there were states of its own, which would have been where draws are.
            if shard is None:
                self._buffers[name] = self.get_buffer(name).to(bank.device)
            else:
                self._shards[name] = shard, self._shards[name][1].to(bank.device)

    def _shapes(self) -> dict[str, tuple[Shard | None, torch.Size]]:
        """What is kept, to see whether it has changed its form."""
        buffers = {name: kept for name, kept in self._buffers.items() if kept is not None}
        return {name: (None, kept.shape) for name, kept in buffers.items()} | {
            name: (shard, kept.shape) for name, (shard, kept) in self._shards.items()
        }

    def _check(self, layout: StateLayout, found: tuple[int, ...]) -> None:
        wanted = (layout.num_data, self.num_states, layout.space.num_bytes)
        if found[1:] == wanted[1:] and found != wanted:
            raise ValueError(
                f"plate '{layout.plates[-1].name}' has {wanted[0]} data, and states are kept "
                f"for {found[0]}. For minibatches pass their indices, pyro.plate("
                f"'{layout.plates[-1].name}', {found[0]}, subsample=index); for other data "
                f"(held out, say) make their guide by guide.for_data(...)"
            )
        if found != wanted:
            raise ValueError(
                f"the states of plate {layout.name!r} have shape {found} (data, states, "
                f"bytes), and the model needs {wanted}: they were made for other data or "
                f"another num_states; make a new TruncatedPosterior"
            )

    def forget(self) -> None:
        """Drop all states, as if the guide had never been called; the next call makes others."""
        for name in [n for n in self._buffers if n.startswith("states_")]:
            del self._buffers[name]
        self._agreed, self._shards = set(), {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StateBuffers:
        super()._apply(fn, recurse)
        self._shards = {name: (shard, fn(kept)) for name, (shard, kept) in self._shards.items()}
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, (shard, kept) in self._shards.items():
            destination[prefix + key_of(name, shard)] = kept

    @torch.inference_mode(False)
    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *found: list[str]
    ) -> None:
        # States are made at the first call, which a loaded guide may not have had.
        rest = {}
        for key, value in state_dict.items():
            name = key[len(prefix) :]
            if not key.startswith(prefix + "states_"):
                rest[key] = value
            elif (parsed := parse_key(name)) is not None:
                error = self._load_shard(*parsed, value)
                found[-1].extend([error] if error else [])
            elif "." in name or not self._load_whole(name, value):
                rest[key] = value
        super()._load_from_state_dict(rest, prefix, metadata, strict, *found)

    def _load_whole(self, name: str, value: Tensor) -> bool:
        """Load the states of all data; False where they go to a buffer."""
        if name in self._shards:
            shard, kept = self._shards[name]
            if shard.whole(kept) == tuple(value.shape):
                kept.copy_(shard.take(value))
                return True
            del self._shards[name]
        if ranks.num_ranks() > 1 and name in {f"states_{n.replace('.', '_')}" for n in self.shard}:
            # At once, before DistributedDataParallel makes a note of a buffer of all states.
            shard = Shard((len(value),), 0, ranks.rank(), ranks.num_ranks())
            self._shards[name] = shard, shard.take(value).clone()
            self._buffers.pop(name, None)
            return True
        if name not in self._buffers or self.get_buffer(name).shape != value.shape:
            self.register_buffer(name, torch.empty_like(value))
        return False

    def _load_shard(self, name: str, shard: Shard, value: Tensor) -> str:
        """Load states that a rank has saved by itself; what is wrong with them."""
        if (shard.rank, shard.num_ranks) != (ranks.rank(), ranks.num_ranks()):
            return (
                f"'{name}' are the states of rank {shard.rank} of {shard.num_ranks}, and this is "
                f"rank {ranks.rank()} of {ranks.num_ranks()}: each rank loads what it saved, or "
                f"any number of ranks what save_checkpoint wrote"
            )
        self._buffers.pop(name, None)
        before = self._shards.get(name)
        if before is not None and before[0] == shard and before[1].shape == value.shape:
            before[1].copy_(value)
        else:
            self._shards[name] = shard, value.detach().clone()
        return ""


def _first_states(space: StateSpace, bank: Tensor, num_data: int, count: int) -> Tensor:
    """Distinct states for each datum, drawn from the model's, packed."""
    step = max(1, _CHUNK // max(1, 2 * count * len(space)))
    parts = [torch.empty(0, count, space.num_bytes, dtype=torch.uint8, device=bank.device)]
    for begin in range(0, num_data, step):
        pick = torch.randint(len(bank), (min(step, num_data - begin), count), device=bank.device)
        parts.append(space.pack(distinct_states(space, bank[pick], count)))
    return torch.cat(parts)


def _settle(index: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """A datum that stands twice in a minibatch gets the states of its first place."""
    ordered, order = index.sort(stable=True)
    position = torch.arange(len(index), device=index.device)
    again = torch.nn.functional.pad(ordered[1:] == ordered[:-1], (1, 0))
    first = position.masked_fill(again, 0).cummax(0).values
    return ordered, packed.index_select(0, order[first])
