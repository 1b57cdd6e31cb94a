"""
Statistics over the processes of a distributed run.

These functions use the process group of :mod:`torch.distributed`, if it has several ranks;
otherwise they return their argument. They are collective: every rank must call them equally often
and in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from pyro_mcvae.ops.tensors import fail_if_recording


def num_ranks() -> int:
    """Return the number of processes that train together; 1 without a process group."""
    return distributed.get_world_size() if _initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return distributed.get_rank() if _initialized() else 0


def _initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _check_not_recording() -> None:
    # A replay would not wait for the other ranks, but they would wait for it.
    fail_if_recording("the ranks communicate within the step, for example for a common step size")


def sum_over_ranks(value: Tensor) -> Tensor:
    """
    Return the sum of a tensor over the ranks, detached.

    Example::

        >>> sum_over_ranks(torch.tensor(2.0))  # one process
        tensor(2.)
    """
    if num_ranks() == 1:
        return value.detach()
    _check_not_recording()
    total = value.detach().clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total)
    return total


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean of a tensor over the ranks, detached."""
    return sum_over_ranks(value) / num_ranks() if num_ranks() > 1 else value.detach()


def from_first_rank(value: Tensor) -> None:
    """Overwrite a tensor with that of rank 0."""
    if num_ranks() > 1:
        _check_not_recording()
        whole = value.detach().contiguous()
        distributed.broadcast(whole, 0)
        with torch.no_grad():
            value.copy_(whole)


def concat_over_ranks(value: Tensor) -> Tensor:
    """Concatenate the tensors of all ranks, which may differ only in their first size."""
    if num_ranks() == 1:
        return value
    _check_not_recording()
    size = torch.tensor([len(value)], device=value.device)
    sizes = [torch.zeros_like(size) for _ in range(num_ranks())]
    distributed.all_gather(sizes, size)
    counts = [int(s) for s in sizes]
    # Collectives need equal sizes: the padding of a shorter tensor is dropped.
    wide = value.new_zeros(max(counts), *value.shape[1:])
    wide[: len(value)] = value.detach()
    tensors = [torch.empty_like(wide) for _ in counts]
    distributed.all_gather(tensors, wide)
    return torch.cat([f[:n] for f, n in zip(tensors, counts, strict=True)])


def gather(value: Any) -> list[Any]:
    """Return the (picklable) value of each rank, in order."""
    if num_ranks() == 1:
        return [value]
    values: list[Any] = [None] * num_ranks()
    distributed.all_gather_object(values, value)
    return values


def first_alone(action: Callable[[], None]) -> None:
    """
    Run an action on rank 0, while the others wait.

    :raises RuntimeError: on the other ranks, if it fails on rank 0.
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
