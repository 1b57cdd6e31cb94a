"""Map leading dims of tensors by ``vmap`` inside a program, and restore them outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from pyro_mcvae.ops import compat
from pyro_mcvae.ops.compat import is_mapped, unwrapped
from pyro_mcvae.ops.tensors import as_shape


def beneath(value: Tensor) -> Tensor:
    """Return the tensor whose gradient ``torch.func.grad`` takes, as the dispatcher sees it."""
    while compat.is_differentiated(value):
        value = unwrapped(value)
    return value


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` runs this code."""
    return bool(compat.innermost_level())


class _VmapDim(NamedTuple):
    """
    A dim that is mapped by vmap.

    :ivar level: its level, which increases in the order in which dims are opened.
    """

    level: int
    size: int


class VmapDims:
    r"""
    Leading dims that are hidden from code between :meth:`unbatch` and :meth:`rebatch`.

    This is :func:`torch.vmap` for single tensors instead of a function, because a program exchanges
    latents and densities with handlers while it runs. A dim is opened by the first tensor that has
    it. Gradients pass in both directions.

    Example::

        >>> from pyro_mcvae.ops.vmap_dims import VmapDims
        >>> dims = VmapDims()
        >>> z = torch.randn(5, 2, 3)  # five particles of two data
        >>> with dims.opened():
        ...     h = dims.unbatch(z, z.shape[1:], depth=2)
        ...     probs = h.softmax(1)
        ...     rebatched = dims.rebatch(probs, depth=2)
        >>> h.dim(), rebatched.shape
        (2, torch.Size([5, 2, 3]))
    """

    def __init__(self) -> None:
        self._dims: dict[int, _VmapDim] = {}
        self._suspended: list[Any] = []

    @contextmanager
    def opened(self, size: int | None = None) -> Iterator[None]:
        """
        Open the vmap dims inside, and close them at the end; later calls open the same dims.

        :param size: the size of the rightmost dim, to open it at the start, so that all noise has
            it.
        """
        before, outside = compat.innermost_level() or 0, self._suspended
        self._suspended = []
        try:
            for vmap_dim in sorted(self._dims.values()):
                if compat.open_level(vmap_dim.size) != vmap_dim.level:
                    raise RuntimeError("vmap dims are opened again inside another vmap")
            if size is not None:
                self._open(0, size)
            yield
        finally:
            self._suspended = outside
            while (compat.innermost_level() or 0) > before:
                compat.close_level()

    def suspend(self) -> None:
        """Compute outside vmap until :meth:`resume`, on tensors with ordinary dims."""
        if self._dims:
            first = min(vmap_dim.level for vmap_dim in self._dims.values())
            while (compat.innermost_level() or 0) >= first:
                self._suspended.append(compat.suspend_level())

    def resume(self) -> None:
        while self._suspended:
            compat.resume_level(self._suspended.pop())

    def unbatch(self, value: Tensor, shape: tuple[int, ...], depth: int) -> Tensor:
        """
        Return one particle's value.

        :param value: shape ``[*dims, *1, *shape]``; dims of size one are dropped.
        :param shape: the shape of one particle.
        :param depth: the number of dims to the right of the vmap dims.
        """
        lead = value.dim() - depth
        if lead <= 0:
            return value
        places = [lead - 1 - i for i in range(lead) if value.shape[i] != 1]
        value = as_shape(value, (*(n for n in value.shape[:lead] if n != 1), *shape))
        for place, size in zip(places, value.shape, strict=False):
            self._open(place, size)
        for place in sorted(places, key=lambda p: self._dims[p].level):
            value = compat.map_dim(value, places.index(place), self._dims[place].level)
            places.remove(place)
        return value

    def rebatch(self, value: Tensor, depth: int) -> Tensor:
        """
        Return the value of all particles.

        :param depth: the number of dims to the right of the vmap dims, padded with size one.
        :returns: shape ``[*dims, *1, *shape]``, or the value itself if it is not under vmap.
        """
        positions: list[int] = []
        shape, place_of = value.shape, {vmap_dim.level: p for p, vmap_dim in self._dims.items()}
        while is_mapped(value) and compat.level_of(value) in place_of:
            positions.insert(0, place_of[compat.level_of(value)])
            value = unwrapped(value).movedim(compat.mapped_dim_of(value), 0)
        if not positions:
            return value
        order = sorted(positions, reverse=True)
        if order != positions:
            value = value.permute(*map(positions.index, order), *range(len(positions), value.dim()))
        leads = [self._dims[p].size if p in positions else 1 for p in range(max(positions), -1, -1)]
        return value.reshape([*leads, *[1] * (depth - len(shape)), *shape])

    def _open(self, place: int, size: int) -> None:
        vmap_dim = self._dims.get(place)
        if vmap_dim is None:
            self._dims[place] = _VmapDim(compat.open_level(size), size)
        elif vmap_dim.size != size:
            raise RuntimeError(
                f"a leading dim has {vmap_dim.size} entries at one site and {size} at another"
            )
