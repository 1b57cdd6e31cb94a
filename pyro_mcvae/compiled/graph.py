"""A recorded graph as a function of everything that it reads, which changes nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import Graph

from pyro_mcvae.compiled.merging import merge_equal, own_outputs
from pyro_mcvae.compiled.operations import is_pure, roots, settled
from pyro_mcvae.compiled.updates import Update, take_out_updates

__all__ = ["as_function"]

_aten = torch.ops.aten


def as_function(recorded: GraphModule) -> tuple[GraphModule, list[Tensor], list[Update]]:
    """
    Lift what a graph holds to its first inputs, and what it updates in place to its last outputs.

    :returns: the graph ``(*constants, *inputs) -> (*outputs, *updates)``, the constants, and what
        is updated of them. Its outputs share no memory, with each other or with inputs.
    :raises NotRecordable: if an input is written to.
    """
    graph = recorded.graph
    _remove_what_changes_nothing(graph)
    _read_shapes(graph)
    _remove_dead(graph)
    constants = _lift(recorded)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    updates = take_out_updates(graph, inputs[: len(constants)])
    merge_equal(graph)
    own_outputs(graph)
    return GraphModule(torch.nn.Module(), graph), constants, updates


def _remove_dead(graph: Graph) -> None:
    # PyTorch's own pass takes unused draws out, in some versions: the others would be other ones.
    for node in reversed(list(graph.nodes)):
        if not node.users and (is_pure(node) or node.op == "get_attr"):
            graph.erase_node(node)


def _remove_what_changes_nothing(graph: Graph) -> None:
    # Each costs a call. Without gradients a detached tensor is what it detaches.
    shares, fixed = roots(graph.nodes), set(settled(graph))
    for node in graph.nodes:
        source = node.args[0] if node.target in _SAME else None
        if not isinstance(source, Node):
            continue
        # Of what is held a copy may be meant: it may be written to under another name.
        own = node in fixed and shares.get(source, source).op == "call_function"
        alike = node.target == _aten.detach.default or _layout(node) == _layout(source) is not None
        if alike and _SAME[node.target](node, own):
            node.replace_all_uses_with(source)


# When the result of an operation on a tensor of the same layout is that tensor.
_SAME: dict[object, Callable[[Node, bool], bool]] = {
    _aten.detach.default: lambda node, own: True,
    _aten.expand.default: lambda node, own: True,
    _aten.view.default: lambda node, own: True,
    _aten.clone.default: lambda node, own: own,
    _aten.pow.Tensor_Scalar: lambda node, own: own and node.args[1] in (1,),
}


def _read_shapes(graph: Graph) -> None:
    # Ones like this tensor are ones like any other: a gradient begins with them at each transition,
    # and what is computed of them is then computed once.
    for node in graph.nodes:
        value = _FILLED.get(node.target, lambda node: None)(node)
        meta, device = node.meta.get("tensor_meta"), node.meta.get("device")
        if value is None or meta is None or device is None:
            continue
        if meta.stride == torch.empty(meta.shape, device="meta").stride():
            node.target, node.args = _aten.full.default, ([*meta.shape], value)
            node.kwargs = {"dtype": meta.dtype, "device": device}


# By which value they are filled, whatever the tensor whose shape or dtype they take.
_FILLED: dict[object, Callable[[Node], object]] = {
    _aten.zeros_like.default: lambda node: 0,
    _aten.ones_like.default: lambda node: 1,
    _aten.full_like.default: lambda node: node.args[1],
    _aten.new_zeros.default: lambda node: 0,
    _aten.new_ones.default: lambda node: 1,
    _aten.new_full.default: lambda node: node.args[2],
}


def _layout(node: Node) -> tuple[object, ...] | None:
    meta = node.meta.get("tensor_meta")
    return None if meta is None else (meta.shape, meta.stride, meta.dtype)


def _lift(recorded: GraphModule) -> list[Tensor]:
    """Turn tensors that the graph holds, one for each object, into its first inputs."""
    graph = recorded.graph
    found: dict[int, Node] = {}
    constants: list[Tensor] = []
    last: Node | None = None
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        held = operator.attrgetter(str(node.target))(recorded)
        if id(held) not in found:
            # Before nothing is at the beginning: a first node that is lifted itself is erased.
            with graph.inserting_after(last) if last else graph.inserting_before(None):
                last = found[id(held)] = graph.placeholder(f"constant_{len(constants)}")
            constants.append(held)
        node.replace_all_uses_with(found[id(held)])
        graph.erase_node(node)
    return constants
