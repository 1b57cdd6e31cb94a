"""What a recorded operation does: whether it draws, what it writes, whose memory it shares."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.fx import Node
from torch.fx.graph import Graph
from torch.fx.node import Argument

if TYPE_CHECKING:  # names that other versions of PyTorch may not have
    from torch._C import Argument as SchemaArgument
    from torch._C import FunctionSchema

__all__ = ["is_pure", "roots", "settled", "targets", "written"]

_aten = torch.ops.aten
# Running statistics, which these update without saying so in their schema.
_STATISTICS = {
    getattr(_aten, name).default: (3, 4)
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}


def is_pure(node: Node) -> bool:
    """Whether a node draws nothing and writes nothing, so that it may go, move, or be merged."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op == "call_function"
    schema = _schema(node)
    if schema is None or schema.is_mutable or node.target in _STATISTICS:
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]


def written(node: Node) -> Iterator[Node]:
    """What a node writes to."""
    if node.target in _STATISTICS and node.args[5]:
        yield from (a for i in _STATISTICS[node.target] if isinstance(a := node.args[i], Node))
    for argument, value in _arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, list | tuple) else [value]
            yield from (v for v in values if isinstance(v, Node))


def viewed(node: Node) -> Node | None:
    """The node whose memory this one's result may share."""
    if node.target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, Node) else None
    schema = _schema(node)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        return None
    for argument, value in _arguments(node):
        if argument.alias_info is not None and isinstance(value, Node):
            return value
    return None


def roots(nodes: Iterable[Node]) -> dict[Node, Node]:
    """Whose memory each node that is a view shares."""
    found: dict[Node, Node] = {}
    for node in nodes:
        if (source := viewed(node)) is not None:
            found[node] = found.get(source, source)
    return found


def targets(graph: Graph) -> list[Node]:
    """Whose memory is written to, in the order of the first writes."""
    shares = roots(graph.nodes)
    return list(dict.fromkeys(shares.get(t, t) for node in graph.nodes for t in written(node)))


def settled(graph: Graph) -> Iterator[Node]:
    """
    The operations that are functions of their inputs alone, in order; they may be erased meanwhile.

    What is written to later is a new tensor each time, and reads of it are not equal.
    """
    shares, changing = roots(graph.nodes), set(targets(graph))
    for node in list(graph.nodes):
        inputs = [node, *node.all_input_nodes]
        if is_pure(node) and not any(shares.get(n, n) in changing for n in inputs):
            yield node


def _schema(node: Node) -> FunctionSchema | None:
    return getattr(node.target, "_schema", None)


def _arguments(node: Node) -> Iterator[tuple[SchemaArgument, Argument]]:
    schema = _schema(node)
    if schema is None:
        return
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args):
            yield argument, node.args[i]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]
