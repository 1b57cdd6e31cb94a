"""
Statistics over the processes of a distributed run.

A process group of :mod:`torch.distributed` with several ranks is taken account of where there is
one; otherwise these functions return what they are given. They are collective: every rank must
call them equally often and in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from pyro_mcvae.ops.tensors import refuse


def num_ranks() -> int:
    """How many processes train together; 1 without a process group."""
    return distributed.get_world_size() if _initialized() else 1


def rank() -> int:
    """Which of them this is; 0 without a process group."""
    return distributed.get_rank() if _initialized() else 0


def _initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _meet() -> None:
    # A replay would not wait for the other ranks, and they would wait for it.
    refuse("the ranks talk within the step: a step size that adapts, say, is that of all ranks")


def sum_over_ranks(value: Tensor) -> Tensor:
    """
    The sum of a tensor over the ranks, detached.

    Example::

        >>> sum_over_ranks(torch.tensor(2.0))  # one process
        tensor(2.)
    """
    if num_ranks() == 1:
        return value.detach()
    _meet()
    total = value.detach().clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total)
    return total


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of a tensor over the ranks, detached."""
    return sum_over_ranks(value) / num_ranks() if num_ranks() > 1 else value.detach()


def from_first_rank(value: Tensor) -> None:
    """Overwrite a tensor by that of rank 0."""
    if num_ranks() > 1:
        _meet()
        whole = value.detach().contiguous()
        distributed.broadcast(whole, 0)
        with torch.no_grad():
            value.copy_(whole)


def concat_over_ranks(value: Tensor) -> Tensor:
    """The tensors of all ranks one after the other; they may differ in their first size only."""
    if num_ranks() == 1:
        return value
    _meet()
    size = torch.tensor([len(value)], device=value.device)
    sizes = [torch.zeros_like(size) for _ in range(num_ranks())]
    distributed.all_gather(sizes, size)
    counts = [int(s) for s in sizes]
    # Collectives want one size: the rest of a shorter tensor is never read.
    wide = value.new_zeros(max(counts), *value.shape[1:])
    wide[: len(value)] = value.detach()
    found = [torch.empty_like(wide) for _ in counts]
    distributed.all_gather(found, wide)
    return torch.cat([f[:n] for f, n in zip(found, counts, strict=True)])


def gather(value: Any) -> list[Any]:
    """Any picklable value of each rank, in their order."""
    if num_ranks() == 1:
        return [value]
    found: list[Any] = [None] * num_ranks()
    distributed.all_gather_object(found, value)
    return found


def first_alone(action: Callable[[], None]) -> None:
    """
    Do something on rank 0, while the others wait.

    :raises RuntimeError: on the other ranks, if it failed there.
    """
    failure: list[str | None] = [None]
    try:
        if rank() == 0:
            action()
    except BaseException as error:
        failure = [f"{type(error).__name__}: {error}"]
        raise
    finally:
        if num_ranks() > 1:
            distributed.broadcast_object_list(failure, 0)
    if failure[0] is not None:
        raise RuntimeError(f"rank 0 failed: {failure[0]}")
