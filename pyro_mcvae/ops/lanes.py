"""The dims of tensors under ``vmap``: removed where a program begins, restored where it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_mcvae.ops.tensors import as_shape

_functorch = torch._C._functorch


def is_mapped(value: Tensor) -> bool:
    """Whether a tensor stands under ``vmap``, where nobody may ask for its value."""
    return bool(_functorch.is_batchedtensor(value))


class _Lane(NamedTuple):
    """
    A dim that is mapped.

    :ivar level: functorch's number of it, which grows with the order in which dims are opened.
    """

    level: int
    size: int


class Lanes:
    r"""
    Leading dims that code between :meth:`lower` and :meth:`lift` does not see.

    What :func:`torch.vmap` does around a function, at single tensors: a program that asks handlers
    for its latents, and tells them its densities, takes and returns in its midst. A dim is opened
    by the first tensor that has it. Gradients flow through both ways.

    Example::

        >>> from pyro_mcvae.ops.lanes import Lanes
        >>> lanes = Lanes()
        >>> z = torch.randn(5, 2, 3)  # five particles of two data
        >>> with lanes.opened():
        ...     h = lanes.lower(z, z.shape[1:], depth=2)
        ...     probs = h.softmax(1)
        ...     found = lanes.lift(probs, depth=2)
        >>> h.dim(), found.shape
        (2, torch.Size([5, 2, 3]))
    """

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}
        self._suspended: list[Any] = []

    @contextmanager
    def opened(self, size: int | None = None) -> Iterator[None]:
        """
        Lanes are opened in here, and closed at the end; again, with those of the first time.

        :param size: of the rightmost one, to open it at once, so that noise of all kinds is in it.
        """
        before, outside = _functorch.maybe_current_level() or 0, self._suspended
        self._suspended = []
        try:
            for lane in sorted(self._lanes.values()):
                if _functorch._vmap_increment_nesting(lane.size, "different") != lane.level:
                    raise RuntimeError("lanes are opened again inside of another vmap")
            if size is not None:
                self._open(0, size)
            yield
        finally:
            self._suspended = outside
            while (_functorch.maybe_current_level() or 0) > before:
                _functorch._vmap_decrement_nesting()

    def suspend(self) -> None:
        """Compute outside the lanes until :meth:`resume`: on tensors that have them as dims."""
        if self._lanes:
            first = min(lane.level for lane in self._lanes.values())
            while (_functorch.maybe_current_level() or 0) >= first:
                self._suspended.append(_functorch.pop_dynamic_layer_stack())

    def resume(self) -> None:
        while self._suspended:
            _functorch.push_dynamic_layer_stack(self._suspended.pop())

    def lower(self, value: Tensor, shape: tuple[int, ...], depth: int) -> Tensor:
        """
        One particle's value.

        :param value: shape ``[*lanes, *1, *shape]``; lanes of size one are left out.
        :param shape: of one particle.
        :param depth: how many dims stand to the right of the lanes.
        """
        lead = value.dim() - depth
        if lead <= 0:
            return value
        places = [lead - 1 - i for i in range(lead) if value.shape[i] != 1]
        value = as_shape(value, (*(n for n in value.shape[:lead] if n != 1), *shape))
        for place, size in zip(places, value.shape, strict=False):
            self._open(place, size)
        for place in sorted(places, key=lambda p: self._lanes[p].level):
            value = _functorch._add_batch_dim(value, places.index(place), self._lanes[place].level)
            places.remove(place)
        return value

    def lift(self, value: Tensor, depth: int) -> Tensor:
        """
        The value of all particles.

        :param depth: how many dims stand to the right of the lanes; others are of size one.
        :returns: shape ``[*lanes, *1, *shape]``, or the value itself where it is in no lane.
        """
        found: list[int] = []
        shape, place_of = value.shape, {lane.level: p for p, lane in self._lanes.items()}
        while _functorch.is_batchedtensor(value) and _functorch.maybe_get_level(value) in place_of:
            found.insert(0, place_of[_functorch.maybe_get_level(value)])
            dim = _functorch.maybe_get_bdim(value)
            value = _functorch.get_unwrapped(value).movedim(dim, 0)
        if not found:
            return value
        order = sorted(found, reverse=True)
        if order != found:
            value = value.permute(*map(found.index, order), *range(len(found), value.dim()))
        leads = [self._lanes[p].size if p in found else 1 for p in range(max(found), -1, -1)]
        return value.reshape([*leads, *[1] * (depth - len(shape)), *shape])

    def holds(self, value: Tensor) -> bool:
        """Whether a tensor is in one of the lanes."""
        return bool(_functorch.is_batchedtensor(value))

    def _open(self, place: int, size: int) -> None:
        lane = self._lanes.get(place)
        if lane is None:
            level = _functorch._vmap_increment_nesting(size, "different")
            self._lanes[place] = _Lane(level, size)
        elif lane.size != size:
            raise RuntimeError(
                f"a leading dim has {lane.size} entries at one site and {size} at another"
            )
