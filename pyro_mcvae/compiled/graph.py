"""A recorded graph as a function of everything that it reads, which changes nothing."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import Graph

from pyro_mcvae.compiled.refusal import NotRecordable

__all__ = ["as_function", "is_pure"]

_aten = torch.ops.aten
# Running statistics, which these update without saying so in their schema.
_STATISTICS = {
    getattr(_aten, name).default: (3, 4)
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}


def as_function(recorded: GraphModule) -> tuple[GraphModule, list[Tensor], list[int]]:
    """
    Lift what a graph holds to its first inputs, and what it updates in place to its last outputs.

    :returns: the graph ``(*constants, *inputs) -> (*outputs, *updated)``, the constants, and which
        of them are updated.
    :raises NotRecordable: if an input is written to.
    """
    graph = recorded.graph
    _remove_detached(graph)
    _remove_dead(graph)
    constants = _lift(recorded)
    updated = _take_out_updates(graph)
    order = [n for n in graph.nodes if n.op == "placeholder"][: len(constants)]
    found = GraphModule(torch.nn.Module(), graph)
    return found, constants, [order.index(node) for node in updated]


def is_pure(node: Node) -> bool:
    """Whether a node draws nothing and writes nothing, so that it may go, move, or be merged."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op == "call_function"
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or node.target in _STATISTICS:
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]


def _remove_dead(graph: Graph) -> None:
    # PyTorch's own pass takes unused draws out, in some versions: the others would be other ones.
    for node in reversed(list(graph.nodes)):
        if not node.users and (is_pure(node) or node.op == "get_attr"):
            graph.erase_node(node)


def _remove_detached(graph: Graph) -> None:
    # Without gradients they are what they detach, and yet cost a call each.
    for node in graph.find_nodes(op="call_function", target=_aten.detach.default):
        node.replace_all_uses_with(node.args[0])


def _lift(recorded: GraphModule) -> list[Tensor]:
    """Turn tensors that the graph holds, one for each object, into its first inputs."""
    graph = recorded.graph
    first, found = next(iter(graph.nodes)), dict[int, Node]()
    constants: list[Tensor] = []
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        held = operator.attrgetter(str(node.target))(recorded)
        if id(held) not in found:
            with graph.inserting_before(first):
                found[id(held)] = graph.placeholder(f"constant_{len(constants)}")
            constants.append(held)
        node.replace_all_uses_with(found[id(held)])
        graph.erase_node(node)
    return constants


def _take_out_updates(graph: Graph) -> list[Node]:
    """Let updates go to copies, which are returned; the constants that they were meant for."""
    roots: dict[Node, Node] = {}
    written: dict[Node, None] = {}
    for node in graph.nodes:
        for target in _written(node):
            written[roots.get(target, target)] = None
        if (source := _viewed(node)) is not None:
            roots[node] = roots.get(source, source)
    held = [n for n in written if n.op == "placeholder"]
    (output,) = (n for n in graph.nodes if n.op == "output")
    copies = []
    for node in held:
        if not node.name.startswith("constant_"):
            raise NotRecordable("a program writes to a tensor that it is called with")
        with graph.inserting_after(_last_input(graph)):
            copy = graph.call_function(_aten.clone.default, (node,))
        node.replace_all_uses_with(copy)
        copy.args = (node,)
        copies.append(copy)
    returned: Any = output.args[0]
    output.args = ((*returned, *copies),)
    return held


def _last_input(graph: Graph) -> Node:
    return [n for n in graph.nodes if n.op == "placeholder"][-1]


def _written(node: Node) -> Iterator[Node]:
    if node.target in _STATISTICS and node.args[5]:
        yield from (a for i in _STATISTICS[node.target] if isinstance(a := node.args[i], Node))
    for argument, value in _arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, list | tuple) else [value]
            yield from (v for v in values if isinstance(v, Node))


def _viewed(node: Node) -> Node | None:
    """The node whose memory this one's result may share."""
    if node.target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, Node) else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        return None
    for argument, value in _arguments(node):
        if argument.alias_info is not None and isinstance(value, Node):
            return value
    return None


def _arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args):
            yield argument, node.args[i]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]
