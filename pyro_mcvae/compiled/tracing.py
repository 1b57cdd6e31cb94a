"""A function's operations as a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor

from pyro_mcvae.compiled.host_reads import HostReads

__all__ = ["trace"]


def trace(function: Callable[..., list[Tensor]], inputs: list[Tensor]) -> GraphModule:
    """
    Call a function, and record the operations that it computes.

    :returns: their graph, whose nodes have ``tensor_meta`` and a ``device``.
    """

    def watched(*inputs: Tensor) -> list[Tensor]:
        with HostReads():
            return function(*inputs)

    with _described_by_devices():
        graph = proxy_tensor.make_fx(watched)(*inputs)
    for node in graph.graph.nodes:
        node.meta["device"] = node.meta.pop("val", None)
    return graph


@contextmanager
def _described_by_devices() -> Iterator[None]:
    # PyTorch describes each result by a fake tensor, too: half of the time of a recording.
    describe = getattr(proxy_tensor, "extract_val", None)
    if describe is None:
        yield
        return
    proxy_tensor.extract_val = lambda value, *_, **__: getattr(value, "device", None)
    try:
        yield
    finally:
        proxy_tensor.extract_val = describe
