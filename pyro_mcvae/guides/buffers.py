"""The states of a truncated posterior: packed, in buffers, one for each data plate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyro_mcvae.guides.joint import JointRuns
from pyro_mcvae.guides.layout import Layout
from pyro_mcvae.guides.search import Populations
from pyro_mcvae.ops import ranks
from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.ops.evolution import distinct_states

__all__ = ["StateBuffers"]

# The rows of a chunk of the first states, so that unpacked ones never fill the memory.
_CHUNK = 1 << 24


class StateBuffers(nn.Module):
    """
    Keeps S distinct states for each datum, ``[N, S, bytes]``; made when a block is first seen.

    :param int num_states: S.
    :raises ValueError: if it is not an int of at least 1.
    """

    def __init__(self, num_states: int) -> None:
        super().__init__()
        check_count("num_states", num_states)
        self.num_states = num_states
        self._agreed: set[str] = set()

    def agree(self, runs: JointRuns) -> None:
        """Take the first states of rank 0: each rank of a distributed run has drawn others."""
        for _, layout in runs.layouts.searched:
            name = self._buffer(layout)
            if name not in self._agreed:
                self._agreed.add(name)
                ranks.from_first_rank(self._states(layout))

    def store(self, runs: JointRuns, populations: Populations, shared: bool = False) -> None:
        """
        Keep the states of a minibatch.

        :param bool shared: also those of the other ranks' minibatches, and let them have these.
        """
        for b, layout in runs.layouts.searched:
            population, rows = populations[b], runs.rows[b]
            if population is not None and rows is not None:
                kept = self._states(layout)
                index = rows.index.to(kept.device)
                # Where the model gave NaN nothing was learned about the states.
                usable = ~population.log_joint.isnan().any(1).to(kept.device)
                before = kept.index_select(0, index)
                packed = torch.where(usable[:, None, None], population.packed.to(kept), before)
                if shared:
                    index, packed = map(ranks.concat_over_ranks, (index, packed))
                index, packed = _settle(index, packed)
                with torch.no_grad():
                    kept.index_copy_(0, index, packed)

    def _buffer(self, layout: Layout) -> str:
        return f"states_{layout.name}"

    def _states(self, layout: Layout) -> Tensor:
        return self.get_buffer(self._buffer(layout))

    def _prepare(self, layout: Layout, bank: Tensor | None) -> None:
        """Make the first states of a block, or check those that were loaded."""
        name, space = self._buffer(layout), layout.space
        if self.num_states > space.cardinality:
            raise ValueError(
                f"num_states={self.num_states}, but {', '.join(map(repr, layout.sites))} of plate "
                f"'{layout.plates[-1].name}' have {space.cardinality} states in all: pass "
                f"num_states={space.cardinality}, which is exact inference"
            )
        wanted = (layout.num_data, self.num_states, space.num_bytes)
        if name in self._buffers:
            found = tuple(self.get_buffer(name).shape)
            if found[1:] == wanted[1:] and found != wanted:
                raise ValueError(
                    f"plate '{layout.plates[-1].name}' has {wanted[0]} data, and states are kept "
                    f"for {found[0]}. For minibatches pass their indices, pyro.plate("
                    f"'{layout.plates[-1].name}', {found[0]}, subsample=index); for other data "
                    f"(held out, say) make another TruncatedPosterior"
                )
            if found != wanted:
                raise ValueError(
                    f"the states of plate {layout.name!r} have shape {found} (data, states, "
                    f"bytes), and the model needs {wanted}: they were made for other data or "
                    f"another num_states; make a new TruncatedPosterior"
                )
            return
        assert bank is not None
        step = max(1, _CHUNK // max(1, 2 * self.num_states * len(space)))
        parts = []
        for begin in range(0, layout.num_data, step):
            rows = min(step, layout.num_data - begin)
            pick = torch.randint(len(bank), (rows, self.num_states), device=bank.device)
            drawn = bank[pick]
            parts.append(space.pack(distinct_states(space, drawn, self.num_states)))
        self.register_buffer(name, torch.cat(parts))

    def forget(self) -> None:
        """Drop all states, as if the guide had never been called; the next call makes others."""
        for name in [n for n in self._buffers if n.startswith("states_")]:
            del self._buffers[name]
        self._agreed = set()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # States are made at the first call, which a loaded guide may not have had.
        for key, value in state_dict.items():
            name = key[len(prefix) :]
            if key.startswith(prefix + "states_") and "." not in name:
                if name in self._buffers and self.get_buffer(name).shape == value.shape:
                    continue
                self.register_buffer(name, torch.empty_like(value))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _settle(index: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """A datum that stands twice in a minibatch gets the states of its first row."""
    ordered, order = index.sort(stable=True)
    position = torch.arange(len(index), device=index.device)
    again = torch.nn.functional.pad(ordered[1:] == ordered[:-1], (1, 0))
    first = position.masked_fill(again, 0).cummax(0).values
    return ordered, packed.index_select(0, order[first])
