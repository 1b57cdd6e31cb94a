"""A function's operations as a graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["trace"]


def trace(function: Callable[..., list[Tensor]], inputs: list[Tensor]) -> GraphModule:
    """Call a function, and record the operations that it computes."""
    with _one_fake_mode():
        return make_fx(function)(*inputs)


def _one_fake_mode() -> AbstractContextManager[object]:
    # PyTorch describes each result by a fake tensor, and makes a mode for each, with a record of
    # the stack, if it finds none: nearly half of the time of a recording.
    try:
        from torch._guards import TracingContext, tracing
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        return nullcontext()
    return tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))
