"""Minibatches of a distributed run, without repeated data."""

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
    Yields the indices of this process's minibatches; one iteration is one epoch.

    All ranks compute the same permutation of the data. In every step they divide the next
    ``batch_size * num_ranks`` indices equally, so no datum is used twice in an epoch. The last
    indices are divided equally, too: less than ``num_ranks`` data are skipped, different ones in
    each epoch. (A plate with ``subsample_size`` draws separately on each rank, but the same indices
    on all ranks after ``pyro.set_rng_seed``.)

    Pass the indices to the plate, ``pyro.plate("data", N, subsample=index)``. The mean of the
    ranks' gradients, which DistributedDataParallel computes, is then the gradient of the union of
    the minibatches, with its scale :math:`N / \sum_r B_r`.

    ``state_dict`` has the position in the epoch, for any number of ranks, and iteration continues
    there. An epoch that was interrupted by ``break`` is also continued.

    :param int num_data: the number of data, N.
    :param int batch_size: the maximal number of data of one rank in one step.
    :param bool shuffle: False to use the data in order.
    :param int seed: the seed of the permutations, the same on all ranks.
    :param rank: the rank of this process; by default from :mod:`torch.distributed`.
    :param num_ranks: the number of ranks; by default from :mod:`torch.distributed`.
    :ivar epoch: the number of completed epochs.
    :ivar position: the number of used indices in this epoch, over all ranks.
    :raises ValueError: for sizes that are not ints of at least 1, and for fewer data than ranks.

    Example, the second of three processes::

        >>> from pyro_mcvae import RankBatches
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
            raise ValueError(f"rank must be in 0..{self.num_ranks - 1}, got {self.rank}")
        if num_data < self.num_ranks:
            raise ValueError(
                f"num_data={num_data} leaves some of the {self.num_ranks} ranks without data: use "
                f"fewer processes"
            )
        self.num_data, self.batch_size = num_data, batch_size
        self.shuffle, self.seed = shuffle, seed
        #: The current epoch, and the number of its used indices over all ranks.
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        whole, remaining = divmod(self.num_data, self.batch_size * self.num_ranks)
        return whole + (remaining >= self.num_ranks)

    def __iter__(self) -> Iterator[Tensor]:
        order = self._order()
        while size := min(self.batch_size, (len(order) - self.position) // self.num_ranks):
            begin = self.position + self.rank * size
            # Update before the step, so that a state saved after the step continues with the next
            # one.
            self.position += size * self.num_ranks
            yield order[begin : begin + size]
        self.epoch, self.position = self.epoch + 1, 0

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.num_data)
        generator = torch.Generator().manual_seed(self.seed)
        # A separate seed for each epoch, different also for adjacent values of ``seed``.
        drawn = torch.randint(2**62, (self.epoch + 1,), generator=generator)
        generator.manual_seed(int(drawn[-1]))
        return torch.randperm(self.num_data, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the position, and the settings of the order."""
        return {name: getattr(self, name) for name in ("num_data", *_STATE)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Continue from a saved position.

        :raises ValueError: for another number of data.
        """
        if state["num_data"] != self.num_data:
            raise ValueError(
                f"the batches were of {state['num_data']} data, but now num_data={self.num_data}"
            )
        for name in _STATE:
            setattr(self, name, state[name])
