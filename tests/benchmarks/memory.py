"""The memory of a training step, counted and not estimated."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "the step that counts"


def peak(make: Callable[[], Callable[[], Any]], device: str, warmup: int = 3) -> float:
    """
    The most megabytes that a step holds, parameters and the optimizer's state included.

    On the CPU every block is counted that PyTorch's allocator hands out and takes back, buffers
    within operators as well; Python's own objects are not.

    :param int warmup: how many steps come before, in which programs are analyzed.
    """
    if device != "cpu":
        before = torch.cuda.memory_allocated()
        step = make()
        for _ in range(warmup):
            step()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as result:
        step = make()
        for _ in range(warmup):
            step()
        with record_function(_MARK):
            step()
    events = result.profiler.kineto_results.events()
    begin = next(e.start_ns() for e in events if e.name() == _MARK)
    blocks = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = sum(n for at, n in blocks if at < begin)
    most = held
    for _, change in sorted((b for b in blocks if b[0] >= begin), key=lambda b: b[0]):
        held += change
        most = max(most, held)
    return float(most / 2**20)
