"""What a recorded graph computes twice, it computes once; what it returns is its own."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.fx import Node
from torch.fx.graph import Graph
from torch.fx.node import Argument

from pyro_mcvae.compiled.operations import roots, settled, targets

__all__ = ["merge_equal", "own_outputs", "owns_outputs"]


def merge_equal(graph: Graph) -> None:
    """
    Merge operations that are the same function of the same values: a chain asks its model for the
    same constants at each transition.
    """
    known: dict[Hashable, Node] = {}
    for node in settled(graph):
        first = known.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def own_outputs(graph: Graph) -> None:
    """
    Let each output be a tensor of its own, which is dense: gradients are handed to optimizers and
    users, who write to them.
    """
    shares = roots(graph.nodes)
    (output,) = (n for n in graph.nodes if n.op == "output")
    returned, seen = output.args[0], set[Node]()
    assert isinstance(returned, list | tuple)
    owned: list[Argument] = []
    for value in returned:
        assert isinstance(value, Node)
        root = shares.get(value, value)
        if root.op == "placeholder" or root in seen or not _is_dense(value):
            with graph.inserting_before(output):
                value = graph.call_function(_CLONE, (value,), {"memory_format": _CONTIGUOUS})
        seen.add(root)
        owned.append(value)
    output.args = (tuple(owned),)


def owns_outputs(graph: Graph) -> bool:
    """Whether no output shares memory with another or with an input, and no input is updated."""
    shares = roots(graph.nodes)
    (output,) = (n for n in graph.nodes if n.op == "output")
    owners = [shares.get(value, value) for value in output.all_input_nodes]
    returned = output.args[0]
    count = len(returned) if isinstance(returned, list | tuple) else 1
    shared = any(n.op == "placeholder" for n in (*owners, *targets(graph)))
    return len(set(owners)) == count and not shared


_CLONE, _CONTIGUOUS = torch.ops.aten.clone.default, torch.contiguous_format


def _is_dense(node: Node) -> bool:
    """Whether a tensor has a place in memory for each entry, and no other places between them."""
    meta = node.meta.get("tensor_meta")
    if meta is None:
        return True  # a copy of ours
    pairs = zip(meta.stride, meta.shape, strict=True)
    places = sorted((stride, size) for stride, size in pairs if size != 1)
    expected = 1
    for stride, size in places:
        if stride != expected:
            return False
        expected *= size
    return True


def _key(value: Argument) -> Hashable:
    """Equal for equal arguments; 1, 1.0 and True are not, and 0.0 is not -0.0."""
    if isinstance(value, Node):
        return value
    if isinstance(value, list | tuple):
        return (type(value), *map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(v)) for name, v in value.items())
    if isinstance(value, slice):
        return ("slice", _key(value.start), _key(value.stop), _key(value.step))
    return (type(value), repr(value))
