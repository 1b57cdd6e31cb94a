"""Discrete states of data: rows of small integers with packed bits and keys, and their sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor
from torch.distributions import constraints

from pyro_mcvae.coordinates.packing import Packing, SiteShape
from pyro_mcvae.ops.slots import one_hot
from pyro_mcvae.programs.sites import bare
from pyro_mcvae.programs.types import PlateKey, Site, SiteError, plate_key

# States of entries: rows of small integers, their packed bits, keys and single-entry moves.

# Counts without an upper bound are searched below this many values.
COUNT_LIMIT = 1 << 16


class StateSpace:
    """
    The states of D discrete entries; entry d has the values ``0 .. sizes[d] - 1``.

    States are *packed* for storage, each entry in the bits that its size needs. They have a *key*:
    equal states have equal keys. Different states have different keys: always if there are fewer
    than 2^62 states, and otherwise for all but one pair in 2^64.

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
        """Return the number of moves of all entries."""
        both = zip(self.sizes, self.ordinal, strict=True)
        return sum(2 if is_count else size - 1 for size, is_count in both)

    def table(self, name: str, device: torch.device) -> Tensor:
        """
        Return a constant tensor on a device.

        Some tables have one element per move. ``"entry"`` is the entry that it changes, and
        ``"offset"`` is by how much. ``"log weight"`` is minus the log of the entry's number of
        moves. ``"move size"`` is the entry's size, and ``"wraps"`` is True for entries without
        order. ``"unit key"`` has, for each entry, the change of the key by a step of one.
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
        # Keys are linear in the bits: one look-up per byte, for any number of bytes.
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


# The discrete sites of one data plate as rows of entries.


class StatesError(SiteError):
    """The program does not fit the states stored for its data."""


def changed_program(fact: str) -> StatesError:
    """Return the error for a program with other sites or plates than at its first call."""
    return StatesError(
        f"{fact}, unlike at the first call: make another TruncatedPosterior for a program with "
        f"another structure"
    )


def other_number_of_data(plate: str, now: int, stored: int) -> StatesError:
    """Return the error for a plate whose number of data is not that of the stored states."""
    return StatesError(
        f"plate '{plate}' has {now} data, but states are stored for {stored}. For minibatches pass "
        f"their indices, pyro.plate('{plate}', {stored}, subsample=index); for other data (held "
        f"out) create a guide by guide.for_data(...)"
    )


@dataclass(frozen=True)
class SiteSpec:
    """
    One discrete site.

    :ivar size: the number of values of an entry.
    :ivar low: the value of entry 0.
    :ivar ordinal: whether the values are counts.
    :ivar one_hot: whether a value is a one-hot vector, one entry.
    :ivar bounded: whether every value below ``size`` is in the support of every datum.
    :ivar shape: the shape of the entries of one batch element.
    :ivar batch_shape: the sizes of all plates, 1 for plates without the site.
    """

    name: str
    size: int
    low: int
    ordinal: bool
    one_hot: bool
    bounded: bool
    shape: tuple[int, ...]
    batch_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def moves(self) -> int:
        return 2 if self.ordinal else self.size - 1

    def value(self, entries: Tensor) -> Tensor:
        """Map entries to the site's values."""
        if self.one_hot:
            return one_hot(entries.long(), self.size).to(self.dtype)
        return entries.to(self.dtype) + self.low if self.low else entries.to(self.dtype)

    def flip_scores(self, entries: Tensor, gradient: Tensor | None) -> Tensor:
        """Return the linearized change of log p under each move: shape ``[*entries, moves]``."""
        if gradient is None:
            dtype = torch.get_default_dtype()
            return torch.zeros(*entries.shape, self.moves, dtype=dtype, device=entries.device)
        if self.one_hot:
            steps = torch.arange(1, self.size, device=entries.device)
            at = (entries.long().unsqueeze(-1) + steps) % self.size
            return gradient.gather(-1, at) - gradient.gather(-1, entries.long().unsqueeze(-1))
        if self.ordinal:
            return torch.stack([gradient, -gradient], dim=-1)
        steps = torch.arange(1, self.size, device=entries.device)
        change = (entries.long().unsqueeze(-1) + steps) % self.size - entries.long().unsqueeze(-1)
        return change.to(gradient) * gradient.unsqueeze(-1)


def site_spec(site: Site, nesting: int) -> SiteSpec:
    """
    Describe a site of a run without leading dimensions.

    :raises ValueError: naming a site whose support cannot be searched.
    """
    fn, support = site["fn"], site["fn"].support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    shape = tuple(fn.event_shape)
    low, size, ordinal, one_hot, bounded = 0, 2, False, False, True
    if support is constraints.boolean:
        pass
    elif support is constraints.one_hot:
        shape, size, one_hot = shape[:-1], shape[-1], True
    elif isinstance(support, type(constraints.integer_interval(0, 1))):
        bounds = [torch.as_tensor(b) for b in (support.lower_bound, support.upper_bound)]
        low, high = int(bounds[0].min()), int(bounds[1].max())
        size = high - low + 1
        # Only categorical sites are certain to have the same bounds for all data.
        bounded = isinstance(bare(fn), torch.distributions.Categorical)
        ordinal = not bounded and size > 2
    elif hasattr(support, "lower_bound"):
        low, size, ordinal, bounded = int(support.lower_bound), COUNT_LIMIT, True, False
    else:
        raise ValueError(
            f"site '{site['name']}' ({type(fn).__name__}) has support {support}, in which single "
            f"entries cannot be changed: write it as Bernoulli, Categorical, OneHotCategorical or "
            f"count sites, or draw it in guide="
        )
    batch = tuple(fn.batch_shape)
    batch = (1,) * (nesting - len(batch)) + batch
    dtype = site["value"].dtype
    return SiteSpec(site["name"], size, low, ordinal, one_hot, bounded, shape, batch, dtype)


@dataclass(frozen=True)
class DataIndex:
    """
    The data of one minibatch.

    :ivar sizes: the sizes of the block's plates in the minibatch.
    :ivar index: the indices of its data, in the order of the full plates, shape ``[E]``.
    """

    sizes: tuple[int, ...]
    index: Tensor


class StateLayout:
    """
    The entries of one block: its sites concatenated, one row per element of its plates.

    :param plates: the block's plates, leftmost dim first.
    :param full_sizes: the number of data of each plate.
    :param sites: the discrete sites.
    """

    def __init__(
        self, plates: tuple[PlateKey, ...], full_sizes: tuple[int, ...], sites: list[SiteSpec]
    ) -> None:
        self.plates, self.full_sizes = plates, full_sizes
        self.sites = {spec.name: spec for spec in sites}
        self.num_data = math.prod(full_sizes)
        dims = [p.dim for p in plates if p.dim is not None]
        self._dims = tuple(dims)
        self._packings: dict[tuple[int, ...], tuple[Packing, Packing]] = {}
        sizes: list[int] = []
        ordinal: list[bool] = []
        for spec in sites:
            inner = [n for d, n in enumerate(reversed(spec.batch_shape), 1) if -d not in dims]
            count = math.prod(inner) * math.prod(spec.shape)
            sizes += [spec.size] * count
            ordinal += [spec.ordinal] * count
        self.space = StateSpace(sizes, ordinal)

    @property
    def name(self) -> str:
        """Return the plates' names, in a form valid for a module's buffer."""
        return "_".join(p.name for p in self.plates).replace(".", "_")

    def _packing(self, sizes: tuple[int, ...]) -> tuple[Packing, Packing]:
        if sizes not in self._packings:
            if len(self._packings) > 64:
                self._packings.clear()
            size_of = dict(zip(self._dims, sizes, strict=True))
            shapes, moves = {}, {}
            for spec in self.sites.values():
                depth = len(spec.batch_shape)
                batch = tuple(size_of.get(i - depth, n) for i, n in enumerate(spec.batch_shape))
                shapes[spec.name] = SiteShape(0, batch, spec.shape, self.space.dtype)
                event = (*spec.shape, spec.moves)
                moves[spec.name] = SiteShape(0, batch, event, torch.get_default_dtype())
            self._packings[sizes] = Packing(shapes, [self._dims]), Packing(moves, [self._dims])
        return self._packings[sizes]

    def entries(self, states: Tensor, data_index: DataIndex) -> dict[str, Tensor]:
        """Unpack states ``[E, C, D]`` to each site's entries ``[C, *batch, *shape]``."""
        # Copied as bytes, because copies of later forms are slower.
        packed = states.transpose(0, 1).contiguous()
        packed = packed.reshape(packed.shape[0], *data_index.sizes, packed.shape[-1])
        return self._packing(data_index.sizes)[0].unpack(packed)

    def values(self, states: Tensor, data_index: DataIndex) -> dict[str, Tensor]:
        """Unpack states ``[E, C, D]`` to each site's values ``[C, *batch, *event]``."""
        entries = self.entries(states, data_index)
        return {name: self.sites[name].value(part) for name, part in entries.items()}

    def states(self, values: Mapping[str, Tensor], data_index: DataIndex) -> Tensor:
        """Pack sites' values ``[C, *batch, *event]`` into states ``[E, C, D]``."""
        entries = {}
        for name, spec in self.sites.items():
            value = values[name]
            at = value.argmax(-1) if spec.one_hot else value - spec.low
            entries[name] = at.clamp(0, spec.size - 1).to(self.space.dtype)
        packed = self._packing(data_index.sizes)[0].pack(entries)
        return packed.flatten(1, -2).transpose(0, 1)

    def flip_scores(
        self, states: Tensor, gradients: Mapping[str, Tensor | None], data_index: DataIndex
    ) -> Tensor:
        """Return the flip score of every move from the gradients by site: ``[E, C, M]``."""
        entries = self.entries(states, data_index)
        parts = {}
        for name, at in entries.items():
            spec, gradient = self.sites[name], gradients.get(name)
            if gradient is not None:
                event = (spec.size,) if spec.one_hot else ()
                gradient = gradient.reshape(*at.shape, *event)
            parts[name] = spec.flip_scores(at, gradient)
        packed = self._packing(data_index.sizes)[1].pack(parts)
        return packed.flatten(1, -2).transpose(0, 1)

    def find_data(
        self, msg: Site, subsamples: Mapping[str, Tensor], device: torch.device
    ) -> DataIndex:
        """
        Return the data of a minibatch, from the message of a site with states.

        :param subsamples: the indices of subsampled plates.
        :param device: the device for the indices of other plates.
        :raises StatesError: if the plates differ from those of the stored states.
        """
        frames = {plate_key(f): f for f in msg["cond_indep_stack"]}
        index, sizes = None, []
        for key, full in zip(self.plates, self.full_sizes, strict=True):
            if (frame := frames.get(key)) is None:
                raise changed_program(f"site '{msg['name']}' is outside plate '{key.name}'")
            now = frame.full_size or frame.size
            if now != full:
                raise other_number_of_data(key.name, now, full)
            at = subsamples.get(key.name)
            at = torch.arange(frame.size, device=device) if at is None else torch.as_tensor(at)
            if is_validation_enabled() and len(at):
                low, high = int(at.min()), int(at.max())
                if low < 0 or high >= full:
                    raise StatesError(
                        f"plate '{key.name}' has index {low if low < 0 else high}, but states are "
                        f"stored for data 0 to {full - 1}: pass indices into the full data"
                    )
            sizes.append(frame.size)
            index = at if index is None else index.unsqueeze(-1) * full + at
        assert index is not None
        return DataIndex(tuple(sizes), index.flatten())
