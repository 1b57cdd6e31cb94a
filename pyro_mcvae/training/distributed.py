"""Minibatches of a distributed run, in which no datum comes twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.ops import distributed as ranks
from pyro_mcvae.ops.checks import check_count

_STATE = "shuffle", "seed", "epoch", "position"


class RankBatches:
    r"""
    The indices of this process's minibatches: iterating goes through one epoch.

    All ranks follow one permutation of the data, which each of them computes; at every step each
    takes its own part of the next ``batch_size * num_ranks`` indices, equally many. No datum comes
    twice in an epoch, on whatever rank. What is left in the end is shared out equally, so that less
    than ``num_ranks`` data are left out, others in each epoch. (A plate with ``subsample_size``
    draws on each rank by itself, the same indices on all of them after ``pyro.set_rng_seed``.)

    Pass the indices to the plate, ``pyro.plate("data", N, subsample=index)``: the mean over ranks
    of each rank's gradient, which DistributedDataParallel computes, is then the gradient of the
    minibatches' union, with its scale :math:`N / \sum_r B_r`.

    ``state_dict`` holds the place in the epoch, for any number of ranks: iterating goes on there.
    An epoch that was left by ``break`` is taken up as well.

    :param int num_data: the number of data, N.
    :param int batch_size: the most data of one rank in one step.
    :param bool shuffle: False goes through the data in their order.
    :param int seed: of the permutations; the same on all ranks.
    :param rank: which process this is; by default what :mod:`torch.distributed` says.
    :param num_ranks: of how many; by default what :mod:`torch.distributed` says.
    :ivar epoch: the number of epochs that are done.
    :ivar position: how many indices of this one all ranks have had.
    :raises ValueError: for sizes that are no ints of at least 1, and for less data than ranks.

    Example, the second of three processes::

        >>> batches = RankBatches(10, batch_size=2, shuffle=False, rank=1, num_ranks=3)
        >>> [index.tolist() for index in batches]
        [[2, 3], [7]]
    """

    def __init__(
        self,
        num_data: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        num_data = check_count("num_data", num_data)
        batch_size = check_count("batch_size", batch_size)
        self.num_ranks = ranks.num_ranks() if num_ranks is None else num_ranks
        self.rank = ranks.rank() if rank is None else rank
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank must lie in 0..{self.num_ranks - 1}, got {self.rank}")
        if num_data < self.num_ranks:
            raise ValueError(
                f"num_data={num_data} leaves some of the {self.num_ranks} ranks without data: use "
                f"fewer processes"
            )
        self.num_data, self.batch_size = num_data, batch_size
        self.shuffle, self.seed = shuffle, seed
        #: Which epoch this is, and how many of its data all ranks have had.
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        """Steps in a whole epoch."""
        whole, rest = divmod(self.num_data, self.batch_size * self.num_ranks)
        return whole + (rest >= self.num_ranks)

    def __iter__(self) -> Iterator[Tensor]:
        order = self._order()
        while size := min(self.batch_size, (len(order) - self.position) // self.num_ranks):
            begin = self.position + self.rank * size
            # Before the step: what is saved after it begins with the next one.
            self.position += size * self.num_ranks
            yield order[begin : begin + size]
        self.epoch, self.position = self.epoch + 1, 0

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.num_data)
        generator = torch.Generator().manual_seed(self.seed)
        # A seed of its own for each epoch, which neighbouring seeds do not share.
        drawn = torch.randint(2**62, (self.epoch + 1,), generator=generator)
        generator.manual_seed(int(drawn[-1]))
        return torch.randperm(self.num_data, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, place, and what the order is made of."""
        return {name: getattr(self, name) for name in ("num_data", *_STATE)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Go on where another left off.

        :raises ValueError: for another number of data.
        """
        if state["num_data"] != self.num_data:
            raise ValueError(
                f"the batches were of {state['num_data']} data, and are now of {self.num_data}"
            )
        for name in _STATE:
            setattr(self, name, state[name])
