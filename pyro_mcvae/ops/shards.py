"""Which rows of a table each process of a distributed run keeps, by the index of the datum."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    r"""
    The rows that one process keeps of a table with a row for every element of some plates.

    The data of one plate are dealt out: of R processes the one of rank r has the indices n with
    :math:`n \bmod R = r`, which are as many on each, but for one.

    :param tuple sizes: the plates' sizes, outermost first; rows are numbered in this order.
    :param int axis: which plate is dealt out.
    :param int rank: which process this is.
    :param int num_ranks: of how many.

    Example, the second of two processes::

        >>> shard = Shard((5,), axis=0, rank=1, num_ranks=2)
        >>> shard.take(torch.arange(5))
        tensor([1, 3])
        >>> shard.place(torch.tensor([3, 1]))
        tensor([1, 0])
    """

    sizes: tuple[int, ...]
    axis: int
    rank: int
    num_ranks: int

    @property
    def size(self) -> int:
        """How many data all processes have."""
        return self.sizes[self.axis]

    @property
    def own(self) -> int:
        """How many of them are this one's."""
        return len(range(self.rank, self.size, self.num_ranks))

    @property
    def num_rows(self) -> int:
        """How many rows it keeps."""
        return math.prod(self.sizes[: self.axis]) * self.own * self._stride

    @property
    def name(self) -> str:
        """All of it, as in the name of a file."""
        sizes = "x".join(map(str, self.sizes))
        return f"rank{self.rank}of{self.num_ranks}_axis{self.axis}of{sizes}"

    @classmethod
    def parse(cls, name: str) -> Shard:
        """The shard of a :attr:`name`."""
        ranks, axes = name.removeprefix("rank").split("_axis")
        rank, num_ranks = ranks.split("of")
        axis, sizes = axes.split("of")
        return cls(tuple(map(int, sizes.split("x"))), int(axis), int(rank), int(num_ranks))

    def of(self, rank: int) -> Shard:
        """What another process keeps."""
        return replace(self, rank=rank)

    def datum(self, row: Tensor) -> Tensor:
        """The index of the datum that rows of the whole table belong to."""
        return torch.div(row, self._stride, rounding_mode="floor") % self.size

    def owns(self, row: Tensor) -> Tensor:
        """Whether this process keeps rows of the whole table."""
        return self.datum(row) % self.num_ranks == self.rank

    def place(self, row: Tensor) -> Tensor:
        """
        Where they are among the rows that it keeps.

        Of a row that it does not keep this is no place at all: an operator that takes rows fails
        there, where another datum's row would be a silent error.
        """
        stride = self._stride
        outer = torch.div(row, stride * self.size, rounding_mode="floor")
        inner = torch.div(self.datum(row), self.num_ranks, rounding_mode="floor")
        place = (outer * self.own + inner) * stride + row % stride
        return torch.where(self.owns(row), place, self.num_rows)

    def take(self, whole: Tensor) -> Tensor:
        """Its rows of the whole table."""
        return self._unflat(whole)[:, self.rank :: self.num_ranks].flatten(0, 2)

    def whole(self, rows: Tensor) -> tuple[int, ...]:
        """The shape of the whole table that these are rows of."""
        return (math.prod(self.sizes), *rows.shape[1:])

    def put(self, whole: Tensor, rows: Tensor) -> None:
        """Write its rows to the whole table."""
        view = self._unflat(whole)[:, self.rank :: self.num_ranks]
        view.copy_(rows.reshape(view.shape))

    @property
    def _stride(self) -> int:
        return math.prod(self.sizes[self.axis + 1 :])

    def _unflat(self, whole: Tensor) -> Tensor:
        shape = (math.prod(self.sizes[: self.axis]), self.size, self._stride)
        return whole.view(*shape, *whole.shape[1:])
