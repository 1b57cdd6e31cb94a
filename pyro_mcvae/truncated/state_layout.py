"""Pack the discrete sites of one data plate into rows of entries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pyro.infer.util import is_validation_enabled
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor
from torch.distributions import constraints

from pyro_mcvae.coordinates.packing import Packing, SiteShape
from pyro_mcvae.ops.slots import one_hot
from pyro_mcvae.programs.sites import bare
from pyro_mcvae.programs.types import PlateKey, Site, SiteError, plate_key
from pyro_mcvae.truncated.states import COUNT_LIMIT, StateSpace


class StatesError(SiteError):
    """The program does not fit the states stored for its data."""


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
        if self.size == 2:
            return ((1 - 2 * entries.to(gradient)) * gradient).unsqueeze(-1)
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
            inner_sizes = [
                s
                for d, s in zip(range(-len(spec.batch_shape), 0), spec.batch_shape, strict=True)
                if d not in dims
            ]
            count = math.prod(inner_sizes) * math.prod(spec.shape)
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


def find_data_index(
    layout: StateLayout, msg: Site, subsamples: Mapping[str, Tensor], device: torch.device
) -> DataIndex:
    """
    Return the data of a minibatch, from the message of a site with states.

    :param subsamples: the indices of subsampled plates.
    :param device: the device for the indices of other plates.
    :raises StatesError: if the plates differ from those of the stored states.
    """
    frames = {plate_key(f): f for f in msg["cond_indep_stack"]}
    index, sizes = None, []
    for key, full in zip(layout.plates, layout.full_sizes, strict=True):
        if key not in frames:
            raise StatesError(
                f"site '{msg['name']}' has left plate '{key.name}', for which its states are "
                f"stored: make another TruncatedPosterior for a program with another structure"
            )
        frame = frames[key]
        _check_size(key.name, full, frame)
        at = subsamples.get(key.name)
        at = torch.arange(frame.size, device=device) if at is None else torch.as_tensor(at)
        _check_range(key.name, full, at)
        sizes.append(frame.size)
        index = at if index is None else index.unsqueeze(-1) * full + at
    assert index is not None
    return DataIndex(tuple(sizes), index.flatten())


def _check_size(name: str, full: int, frame: CondIndepStackFrame) -> None:
    now = frame.full_size or frame.size
    if now != full:
        raise StatesError(
            f"plate '{name}' has {now} data, but states are stored for {full}. For minibatches "
            f"pass their indices, pyro.plate('{name}', {full}, subsample=index); for other data "
            f"(held out) make their guide by guide.for_data(...)"
        )


def _check_range(name: str, full: int, index: Tensor) -> None:
    if is_validation_enabled() and len(index):
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= full:
            raise StatesError(
                f"plate '{name}' has index {low if low < 0 else high}, but states are stored for "
                f"data 0 to {full - 1}: pass indices into the full data"
            )
