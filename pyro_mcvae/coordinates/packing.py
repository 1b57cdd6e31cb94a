"""Packs the coordinates of several sites into one vector per datum, and unpacks them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_mcvae.ops.shapes import as_shape


@dataclass(frozen=True, slots=True)
class SiteShape:
    """
    The shape of one site's coordinate, which is ``[leading, *batch_shape, *event_shape]``.

    :ivar block: the index of the block that the site belongs to.
    :ivar batch_shape: the sizes of all plate dims, 1 where the site lies in no plate.
    """

    block: int
    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...]
    dtype: torch.dtype


class _Place(NamedTuple):
    """
    Where a site stands in the vectors of its block.

    :ivar inner: the shape of what one vector holds of it, events last.
    :ivar order: its leading and plate dims, the block's first; ``back``, as they were; None where
        nothing changes.
    """

    begin: int
    end: int
    inner: tuple[int, ...]
    order: list[int] | None
    back: list[int] | None


def _permuted(value: Tensor, order: list[int] | None) -> Tensor:
    """The first dims in another order; None where they stay as they are."""
    return value if order is None else value.permute(*order, *range(len(order), value.dim()))


def _unless_same(order: list[int]) -> list[int] | None:
    return None if order == list(range(len(order))) else order


def _leading(value: Tensor, site: SiteShape) -> int:
    batch = value.shape[: value.dim() - len(site.event_shape)]
    # Not -1, which could be anything where an event is empty, as that of dist.Unit.
    return math.prod(batch) // math.prod(site.batch_shape)


class Packing:
    """
    A bijection between coordinates by site and ``[leading, *plates, D]``.

    With several blocks the elements of their plates are laid side by side, ``[leading, elements,
    D]``, and shorter vectors are padded with zeros.

    :param sites: the shape of each site's coordinate.
    :param dims: for each block the (negative) batch dims of its plates.
    :param plates: for each block the sizes of its plates, for blocks without a site.

    Example::

        >>> sites = {
        ...     "a": SiteShape(0, (1, 5), (), torch.float32),
        ...     "b": SiteShape(0, (8, 5), (2,), torch.float32),
        ... }
        >>> packing = Packing(sites, [(-1,)])
        >>> values = {"a": torch.randn(3, 1, 5), "b": torch.randn(3, 8, 5, 2)}
        >>> packing.pack(values).shape
        torch.Size([3, 5, 17])
        >>> bool((packing.unpack(packing.pack(values))["b"] == values["b"]).all())
        True
    """

    def __init__(
        self,
        sites: Mapping[str, SiteShape],
        dims: list[tuple[int, ...]],
        plates: list[tuple[int, ...]] | None = None,
    ) -> None:
        self.sites = dict(sites)
        self._places: dict[str, _Place] = {}
        self._widths = [0] * len(dims)
        self._shapes: list[tuple[int, ...]] = [()] * len(dims) if plates is None else [*plates]
        for name, site in self.sites.items():
            nesting = len(site.batch_shape)
            own = [1 + nesting + d for d in dims[site.block]]
            rest = [a for a in range(1, nesting + 1) if a not in own]
            sizes = tuple(site.batch_shape[a - 1] for a in rest)
            begin = self._widths[site.block]
            end = begin + math.prod(sizes) * math.prod(site.event_shape)
            order = [0, *own, *rest]
            orders = order, [order.index(a) for a in range(len(order))]
            inner = sizes + site.event_shape
            self._places[name] = _Place(begin, end, inner, *map(_unless_same, orders))
            self._widths[site.block] = end
            self._shapes[site.block] = tuple(site.batch_shape[a - 1] for a in own)

    @property
    def padded(self) -> bool:
        """Whether some vectors are shorter than others, and are filled up."""
        return len(set(self._widths)) > 1

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Coordinates by site to ``[leading, *plates, D]``."""
        parts: list[list[Tensor]] = [[] for _ in self._widths]
        for name, site in self.sites.items():
            place, value = self._places[name], values[name]
            inner = site.batch_shape + site.event_shape
            if value.dim() != 1 + len(inner) or value.shape[1:] != inner:
                value = value.reshape(_leading(value, site), *inner)
            value = _permuted(value, place.order)
            shape = (value.shape[0], *self._shapes[site.block], place.end - place.begin)
            parts[site.block].append(as_shape(value, shape))
        parts = parts if all(parts) else self._filled(parts)
        blocks = [p[0] if len(p) == 1 else torch.cat(p, dim=-1) for p in parts]
        return blocks[0] if len(blocks) == 1 else self._side_by_side(blocks)

    def _filled(self, parts: list[list[Tensor]]) -> list[list[Tensor]]:
        """With vectors of no entries for blocks without a site."""
        like = next(p[0] for p in parts if p)
        empty = [[like.new_zeros((len(like), *shape, 0))] for shape in self._shapes]
        return [p or e for p, e in zip(parts, empty, strict=True)]

    def _side_by_side(self, blocks: list[Tensor]) -> Tensor:
        depth = max(self._widths)
        sizes = [math.prod(s) for s in self._shapes]
        flat_blocks = [
            b.reshape(b.shape[0], n, b.shape[-1]) for b, n in zip(blocks, sizes, strict=True)
        ]
        padded = [torch.nn.functional.pad(b, (0, depth - b.shape[-1])) for b in flat_blocks]
        return torch.cat(padded, dim=1)

    def pack_runs(self, values: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The coordinates of several runs, one after the other in the leading dim."""
        packed = [self.pack(part) for part in values]
        return packed[0] if len(packed) == 1 else torch.cat(packed)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """``[leading, *plates, D]`` to coordinates by site, in each site's dtype."""
        blocks = [packed] if len(self._widths) == 1 else self._split(packed)
        values = {}
        for name, site in self.sites.items():
            place, part = self._places[name], blocks[site.block]
            if place.end - place.begin < part.shape[-1]:
                part = part[..., place.begin : place.end]
            part = as_shape(part, (*part.shape[:-1], *place.inner))
            values[name] = _permuted(part, place.back).to(site.dtype)
        return values

    def _split(self, packed: Tensor) -> list[Tensor]:
        parts = packed.split([math.prod(s) for s in self._shapes], dim=1)
        return [
            p[..., :width].reshape(p.shape[0], *shape, width)
            for p, shape, width in zip(parts, self._shapes, self._widths, strict=True)
        ]
