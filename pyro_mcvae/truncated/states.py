"""Discrete states as rows of small integers, with packed bits, keys, and single-entry moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

# Counts without an upper bound are searched below this many values.
COUNT_LIMIT = 1 << 16


class StateSpace:
    """
    The states of D discrete entries; entry d has the values ``0 .. sizes[d] - 1``.

    States are *packed* for storage, each entry in the bits that its size needs. They have a *key*:
    equal states have equal keys. Different states have different keys, always if there are fewer
    than 2^62 states, otherwise except for one pair in 2^64.

    A *move* changes one entry. An entry without order has a move to each of its other values; an
    ordinal entry moves up and down by one.

    :param sizes: the number of values of each entry.
    :param ordinal: which entries are counts; by default none.

    Example::

        >>> space = StateSpace([2, 2, 3])
        >>> space.cardinality, space.num_bytes, space.num_moves
        (12, 1, 4)
        >>> states = torch.tensor([[0, 1, 2], [1, 1, 0]])
        >>> bool((space.unpack(space.pack(states)) == states).all())
        True
    """

    def __init__(self, sizes: Sequence[int], ordinal: Sequence[bool] | None = None) -> None:
        self.sizes = tuple(sizes)
        self.ordinal = tuple(ordinal) if ordinal is not None else (False,) * len(self.sizes)
        self.binary = all(size == 2 for size in self.sizes)
        self.widths = [max(1, (size - 1).bit_length()) for size in self.sizes]
        self.num_bytes = (sum(self.widths) + 7) // 8
        self.cardinality = math.prod(self.sizes)
        #: Whether a state's bits are its key: bit d is entry d.
        self.is_word = self.binary and len(self.sizes) <= 64
        #: The dtype of unpacked states.
        self.dtype = torch.uint8 if max(self.sizes, default=2) <= 256 else torch.int32
        self._tables: dict[torch.device, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_moves(self) -> int:
        return sum(self.moves_of(d) for d in range(len(self)))

    def moves_of(self, entry: int) -> int:
        """Return the number of moves of one entry."""
        return 2 if self.ordinal[entry] else self.sizes[entry] - 1

    def table(self, name: str, device: torch.device) -> Tensor:
        """
        Return a constant tensor on a device.

        ``"entry"``, ``"offset"`` and ``"log weight"`` have one element per move: the entry that it
        changes, by how much, and minus the log of the entry's number of moves. ``"move size"`` is
        the entry's size, and ``"wraps"`` is True for entries without order.
        """
        if device not in self._tables:
            self._tables[device] = {k: t.to(device) for k, t in self._make_tables().items()}
        return self._tables[device][name]

    def _make_tables(self) -> dict[str, Tensor]:
        entry, offset, log_weight = [], [], []
        for d, size in enumerate(self.sizes):
            steps = [1, -1] if self.ordinal[d] else list(range(1, size))
            entry += [d] * len(steps)
            offset += steps
            log_weight += [-math.log(len(steps))] * len(steps)
        bits = [(d, j) for d, width in enumerate(self.widths) for j in range(width)]
        radix = [1 << d for d in range(len(self))] if self.is_word else _radices(self.sizes)
        # Keys are linear in the bits: one look-up per byte, whatever the number of bytes.
        of_bit = torch.tensor([_wrap(radix[d] << j) for d, j in bits], dtype=torch.long)
        of_bit = torch.nn.functional.pad(of_bit, (0, 8 * self.num_bytes - len(bits)))
        byte = (torch.arange(256).unsqueeze(-1) >> torch.arange(8)) & 1
        key = (byte * of_bit.reshape(-1, 1, 8)).sum(-1).flatten()
        return {
            "entry": torch.tensor(entry, dtype=torch.long),
            "offset": torch.tensor(offset, dtype=torch.long),
            "log weight": torch.tensor(log_weight),
            "move size": torch.tensor([self.sizes[d] for d in entry], dtype=torch.long),
            "wraps": torch.tensor([not self.ordinal[d] for d in entry], dtype=torch.bool),
            "bit entry": torch.tensor([d for d, _ in bits], dtype=torch.long),
            "bit shift": torch.tensor([j for _, j in bits], dtype=torch.long),
            "key": key,
            "unit key": torch.tensor([_wrap(r) for r in radix], dtype=torch.long),
            "byte": torch.arange(self.num_bytes) * 256,
            "bits of byte": byte.to(torch.uint8).contiguous().view(torch.long).squeeze(-1),
        }

    def pack(self, states: Tensor) -> Tensor:
        """
        Pack states into bytes.

        :param ~torch.Tensor states: integers, shape ``[..., D]``.
        :returns: bytes, shape ``[..., num_bytes]``.
        """
        bits = states
        if not self.binary:
            at = states.index_select(-1, self.table("bit entry", states.device)).int()
            bits = (at >> self.table("bit shift", states.device).int()) & 1
        bits = torch.nn.functional.pad(bits, (0, 8 * self.num_bytes - bits.shape[-1]))
        # Eight bytes of 0 and 1 are a word, and one product moves all of them to its last byte.
        words = bits.to(torch.uint8).contiguous().view(torch.long) * _GATHER
        return (words >> 56).to(torch.uint8)

    def unpack(self, packed: Tensor) -> Tensor:
        """Invert :meth:`pack`; the states have :attr:`dtype`."""
        words = self.table("bits of byte", packed.device).index_select(0, packed.flatten().int())
        bits = words.view(torch.uint8).reshape(*packed.shape[:-1], 8 * self.num_bytes)
        if self.binary:
            return bits[..., : len(self)]
        shift = self.table("bit shift", packed.device).int()
        shifted = bits[..., : len(shift)].int() << shift
        states = shifted.new_zeros(*shifted.shape[:-1], len(self))
        states.index_add_(-1, self.table("bit entry", packed.device), shifted)
        return states.to(self.dtype)

    def keys(self, packed: Tensor) -> Tensor:
        """Return the keys of packed states, int64, shape ``[...]``."""
        if self.is_word:
            packed = torch.nn.functional.pad(packed, (0, 8 - self.num_bytes)).contiguous()
            return packed.view(torch.long).squeeze(-1)
        table = self.table("key", packed.device)
        return table[packed.long() + self.table("byte", packed.device)].sum(-1)

    def unit_keys(self, device: torch.device) -> Tensor:
        """Return the change of the key by a step of one in each entry, int64, shape ``[D]``."""
        return self.table("unit key", device)

    def moved(self, current: Tensor, moves: Tensor | None = None) -> Tensor:
        """
        Return the value of the entry after each move.

        :param ~torch.Tensor current: the entries' present values, int64, shape ``[..., M]``.
        :param ~torch.Tensor moves: the indices of the moves, of that shape; all by default.
        :returns: shape ``[..., M]``; outside the entry's range for impossible moves of counts.
        """
        if self.binary:
            return 1 - current
        tables = [self.table(n, current.device) for n in ("offset", "move size", "wraps")]
        offset, size, wraps = tables if moves is None else [t[moves] for t in tables]
        value = current + offset
        return torch.where(wraps & (value >= size), value - size, value)


# Moves byte i of a word to bit 56 + i, without carries between bytes.
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))


def _wrap(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


@lru_cache(maxsize=64)
def _radices(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(sizes) <= 1 << 62:
        return tuple(math.prod(sizes[:d]) for d in range(len(sizes)))
    # A separate generator: keys must not depend on, or change, the user's random state.
    generator = torch.Generator().manual_seed(len(sizes))
    drawn = torch.randint(-(1 << 62), 1 << 62, (len(sizes),), generator=generator)
    return tuple(2 * value + 1 for value in drawn.tolist())


def duplicates(keys: Tensor) -> Tensor:
    """
    Return the mask of states that repeat an earlier one of their row.

    :param ~torch.Tensor keys: shape ``[E, S]``.
    :returns: booleans of that shape.

    Example::

        >>> duplicates(torch.tensor([[3, 5, 3, 3]]))
        tensor([[False, False,  True,  True]])
    """
    ordered, order = keys.sort(dim=1, stable=True)
    again = ordered[:, 1:] == ordered[:, :-1]
    again = torch.nn.functional.pad(again, (1, 0))
    return torch.zeros_like(again).scatter(1, order, again)


def keep_best(log_joint: Tensor, repeated: Tensor, count: int) -> Tensor:
    """
    Return the indices of the ``count`` best states of each row, without repeated ones.

    :param ~torch.Tensor log_joint: shape ``[E, C]``; minus infinity is allowed.
    :param ~torch.Tensor repeated: from :func:`duplicates`; at least ``count`` are not repeated.
    :returns: shape ``[E, count]``.
    """
    # Impossible states may stay if there are no better ones; repetitions may not.
    rank = log_joint.clamp_min(torch.finfo(log_joint.dtype).min)
    rank = rank.masked_fill(repeated, -torch.inf)
    return rank.topk(count, dim=1, sorted=False).indices


def distinct_states(space: StateSpace, states: Tensor, count: int) -> Tensor:
    """
    Return distinct states: the given ones, with repetitions replaced.

    :param ~torch.Tensor states: any states, shape ``[N, S, D]``.
    :param int count: the number of distinct states, at most ``space.cardinality``.
    :returns: shape ``[N, count, D]``, distinct in each row.

    Example::

        >>> distinct_states(StateSpace([2, 2]), torch.zeros(1, 1, 2, dtype=torch.uint8), 4).shape
        torch.Size([1, 4, 2])
    """
    device = states.device
    # For large counts use only ``count`` values, dense near zero and sparse farther away.
    both = zip(space.sizes, space.ordinal, strict=True)
    sizes = tuple(min(n, count) if many else n for n, many in both)
    cycle = torch.arange(count, device=device) % states.shape[1]
    extra = states.index_select(1, cycle).clone()
    # Take leading entries until they have enough values. Counting through these from a random start
    # makes distinct states, even if all states are needed.
    last, total = 0, 1
    while last < len(space) and total < (4 if sizes[:last] == space.sizes[:last] else 1) * count:
        total, last = total * sizes[last], last + 1
    start = torch.randint(total, (states.shape[0], 1), device=device)
    code = (start + torch.arange(count, device=device)) % total
    for d in range(last):
        at = code % sizes[d]
        extra[..., d] = _spaced_values(space.sizes[d], sizes[d], device)[at].to(extra.dtype)
        code = code // sizes[d]
    candidates = torch.cat([states, extra], dim=1)
    repeated = duplicates(space.keys(space.pack(candidates)))
    first = repeated.to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
    return candidates.gather(1, first.unsqueeze(-1).expand(-1, -1, len(space)))


def _spaced_values(size: int, count: int, device: torch.device) -> Tensor:
    """Return ``count`` values below ``size``, from zero to the last one."""
    every = torch.arange(count, device=device)
    if count == size:
        return every
    far = torch.logspace(0, math.log10(size), count, dtype=torch.double, device=device) - 1
    return torch.maximum(every, far.round().long().clamp_max(size - 1))


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return ``rows[e, index[e, i]]``, ``[E, I, width]``; several times as fast as ``gather``."""
    start = torch.arange(len(rows), device=rows.device).unsqueeze(-1) * rows.shape[1]
    flat = rows.flatten(0, 1).index_select(0, (index + start).flatten())
    return flat.reshape(*index.shape, rows.shape[-1])
