"""What a recorded graph computes of constants alone is computed once, when it is made."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.graph import Graph
from torch.fx.node import map_arg

from pyro_mcvae.compiled.operations import settled

__all__ = ["fold"]


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
        if all(n in values for n in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
    return values


def _erase(graph: Graph, nodes: list[Node]) -> None:
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)
