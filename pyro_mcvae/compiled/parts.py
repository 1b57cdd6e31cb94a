"""The parts of a split graph: which of them are one function, and what they return."""

from __future__ import annotations

import operator
from collections.abc import Hashable

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

__all__ = ["return_alike", "structure"]


def structure(part: GraphModule) -> tuple[Hashable, ...]:
    """Equal for parts that are the same function of their inputs."""
    numbers = {node: i for i, node in enumerate(part.graph.nodes)}
    lines = []
    for node in part.graph.nodes:
        refers = map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        target = "" if node.op == "placeholder" else str(node.target)
        meta = node.meta.get("tensor_meta")
        about = None if meta is None else (meta.shape, meta.dtype, meta.stride)
        lines.append((node.op, target, str(refers), str(about)))
    return tuple(lines)


def return_alike(split: GraphModule) -> None:
    """
    Let parts that compute the same return the same: whatever one of them hands on, in a tuple.

    Of the last transitions, say, later ones need less.
    """
    alike: dict[Hashable, list[Node]] = {}
    for call in split.graph.nodes:
        if call.op == "call_module":
            alike.setdefault(structure(_part(split, call))[:-1], []).append(call)
    for calls in alike.values():
        places = sorted({i for call in calls for i in _returned(_part(split, call))})
        for call in calls:
            _return(split, call, places)
    split.recompile()


def _return(split: GraphModule, call: Node, places: list[int]) -> None:
    """Let a part return its nodes at these places."""
    part = _part(split, call)
    nodes, before = list(part.graph.nodes), _returned(part)
    alone = isinstance(nodes[-1].args[0], Node)
    nodes[-1].args = (tuple(nodes[i] for i in places),)
    part.recompile()
    if alone:
        with split.graph.inserting_after(call):
            only = split.graph.call_function(operator.getitem, (call, 0))
        call.replace_all_uses_with(only, lambda user: user is not only)
    for user in list(call.users):
        at = user.args[1]
        assert isinstance(at, int)
        user.args = (call, places.index(before[at]))


def _part(split: GraphModule, call: Node) -> GraphModule:
    part = getattr(split, str(call.target))
    assert isinstance(part, GraphModule)
    return part


def _returned(part: GraphModule) -> list[int]:
    places = {node: i for i, node in enumerate(part.graph.nodes)}
    (output,) = (n for n in part.graph.nodes if n.op == "output")
    returned = output.args[0]
    values = returned if isinstance(returned, list | tuple) else [returned]
    return [places[value] for value in values if isinstance(value, Node)]
