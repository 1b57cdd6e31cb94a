"""What a recorded graph computes of constants alone is computed once, when it is made."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.graph import Graph
from torch.fx.node import map_arg

from pyro_mcvae.compiled.operations import settled

__all__ = ["fold"]

_aten = torch.ops.aten
# Their values are those of no input.
_BY_SHAPE = {
    getattr(_aten, name).default
    for name in ("ones_like", "zeros_like", "full_like", "new_zeros", "new_ones", "new_full")
}


@torch.no_grad()
def fold(graph: Graph, constants: list[Tensor], fixed: list[bool]) -> list[Tensor]:
    """
    Compute once what depends on constants that stay as they are.

    :param constants: the tensors that are the graph's first inputs.
    :param fixed: which of them stay.
    :returns: the constants of the graph as it is now.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"][: len(constants)]
    held = dict(zip(inputs, constants, strict=True))
    values = {n: held[n] for n, stays in zip(inputs, fixed, strict=True) if stays}
    values |= _computed(graph, values)
    for node in reversed(list(graph.nodes)):
        if node in values and node not in held:
            if all(user in values for user in node.users) or not isinstance(values[node], Tensor):
                continue
            with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(None):
                constant = graph.placeholder(f"constant_of_{node.name}")
            held[constant] = values[node]
            node.replace_all_uses_with(constant, lambda user: user not in values)
    _erase(graph, [n for n in values if n.op == "call_function"])
    for node in list(held):
        if not node.users:
            graph.erase_node(node)
            del held[node]
    return [held[n] for n in graph.nodes if n in held]


def _computed(graph: Graph, known: dict[Node, Tensor]) -> dict[Node, Tensor]:
    values = dict(known)
    for node in settled(graph):
        stand_ins = dict(_stand_ins(node))
        if all(n in values or n in stand_ins for n in node.all_input_nodes):
            at = {**values, **stand_ins}.__getitem__
            args, kwargs = map_arg((node.args, node.kwargs), at)
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
    return values


def _stand_ins(node: Node) -> Iterator[tuple[Node, Tensor]]:
    """Inputs of which nothing but the shape matters."""
    if node.target in _BY_SHAPE:
        for source in node.all_input_nodes:
            meta, device = source.meta.get("tensor_meta"), source.meta.get("device")
            if meta is not None and isinstance(device, torch.device):
                options = {"dtype": meta.dtype, "device": device}
                yield source, torch.empty_strided(meta.shape, meta.stride, **options)


def _erase(graph: Graph, nodes: list[Node]) -> None:
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)
