"""Simplify recorded graphs, and convert them to functions without side effects."""

from __future__ import annotations

import copy
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import Graph
from torch.fx.node import Argument

from pyro_mcvae.compiled.tracer import NotRecordable, TensorLayout, aliased_arguments
from pyro_mcvae.ops.compat import schema_of

_aten = torch.ops.aten


# What an operation does ---------------------------------------------------------------------------

# These update running statistics, which their schema does not declare.
_STATISTICS = {
    getattr(_aten, name).default: (3, 4)
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}


def _is_functional(node: Node) -> bool:
    """Return whether a node has no side effects; it may draw random numbers."""
    return node.op == "call_function" and _has_no_side_effects(node.target)


@cache
def _has_no_side_effects(operation: Any) -> bool:
    schema = schema_of(operation)
    if schema is None:
        return operation is operator.getitem
    return not (schema.is_mutable or operation in _STATISTICS)


def _is_pure(node: Node) -> bool:
    """
    Return whether a node has no side effects and draws nothing, so that it may be moved, merged or
    erased.
    """
    return _is_functional(node) and not is_draw(node)


def is_draw(node: Node) -> bool:
    """Return whether a node draws random numbers."""
    return _draws(node.target)


@cache
def _draws(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def _written(node: Node) -> Iterator[Node]:
    """Yield the nodes that a node writes to."""
    if node.target in _STATISTICS and node.args[5]:
        yield from (a for i in _STATISTICS[node.target] if isinstance(a := node.args[i], Node))
    for alias, value in aliased_arguments(node):
        if alias.is_write:
            values = value if isinstance(value, list | tuple) else [value]
            yield from (v for v in values if isinstance(v, Node))


def viewed_by(node: Node) -> Node | None:
    """Return the node whose memory this node's result may share."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0]
    if not _returns_views(node.target):
        return None
    return next((value for _, value in aliased_arguments(node) if isinstance(value, Node)), None)


@cache
def _returns_views(operation: Any) -> bool:
    schema = schema_of(operation)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _memory_owners(nodes: Iterable[Node]) -> dict[Node, Node]:
    """Map each node that is a view to the node that owns its memory."""
    owners: dict[Node, Node] = {}
    for node in nodes:
        if (source := viewed_by(node)) is not None:
            owners[node] = owners.get(source, source)
    return owners


def _targets(graph: Graph) -> list[Node]:
    """Return the nodes whose memory is written to, in the order of the first writes."""
    owners = _memory_owners(graph.nodes)
    return list(dict.fromkeys(owners.get(t, t) for node in graph.nodes for t in _written(node)))


def functional_nodes(graph: Graph) -> Iterator[Node]:
    """
    Yield the operations that depend on their inputs alone, or draw, in order. They may be erased
    meanwhile.

    A tensor that is written to later is excluded, because reads before and after differ.
    """
    owners, changing = _memory_owners(graph.nodes), set(_targets(graph))
    for node in list(graph.nodes):
        inputs = [node, *node.all_input_nodes]
        if _is_functional(node) and not any(owners.get(n, n) in changing for n in inputs):
            yield node


def _constant_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the operations that depend on their inputs alone, in order."""
    return filter(_is_pure, functional_nodes(graph))


def returned_by(graph: Graph) -> tuple[Node, list[Any]]:
    """Return the output node and its arguments."""
    (output,) = (n for n in graph.nodes if n.op == "output")
    returned = output.args[0]
    return output, list(returned) if isinstance(returned, list | tuple) else [returned]


# From a recording to a function -------------------------------------------------------------------


def as_function(
    graph: Graph, constants: list[Tensor]
) -> tuple[GraphModule, list[Tensor], list[Update]]:
    """
    Simplify a recorded graph, and make its updates in place its last outputs.

    :param constants: the values of its first inputs.
    :returns: the graph ``(*constants, *inputs) -> (*outputs, *updates)``, the constants that it
        needs, and what is updated of them. Its outputs share no memory, with each other or with
        inputs.
    :raises NotRecordable: if an input is written to.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"][: len(constants)]
    _out_of_place(graph)
    _numbers_to_full(inputs, constants)
    _simplify(graph)
    _fold(graph)
    # In some versions PyTorch's pass removes unused draws, which would change all later draws.
    for node in reversed(list(graph.nodes)):
        if not node.users and (_is_pure(node) or node in inputs):
            graph.erase_node(node)
    needed = set(graph.nodes)
    constants = [c for c, node in zip(constants, inputs, strict=True) if node in needed]
    updates = _extract_updates(graph, [node for node in inputs if node in needed])
    _merge_equal(graph)
    _owned_outputs(graph)
    return GraphModule(torch.nn.Module(), graph), constants, updates


# A detached tensor is recorded as an alias since PyTorch 2.14.
_DETACHED = {_aten.detach.default, _aten.alias.default}
_SAME = _DETACHED | {_aten.expand.default, _aten.view.default}
_COPIED_NUMBERS = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default}
_COPIES = {_aten.clone.default, _aten.pow.Tensor_Scalar}
# The value, or the argument with the value, by which these operations fill a tensor.
_FILLED: dict[object, Any] = {
    _aten.zeros.default: 0,
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones.default: 1,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
    _aten.full_like.default: slice(1, 2),
    _aten.new_full.default: slice(2, 3),
}


def _simplify(graph: Graph) -> None:
    """
    Remove operations without an effect, because each costs a call.

    All tensors of ones are treated alike: the gradient of each transition starts with ones, and
    results computed from them are then computed once.
    """
    owners, fixed = _memory_owners(graph.nodes), set(_constant_nodes(graph))
    for node in graph.nodes:
        meta, source = node.meta.get("layout"), node.args[0] if node.args else None
        if node.target in _FILLED and meta is not None:
            value = _FILLED[node.target]
            _fill(node, node.args[value][0] if isinstance(value, slice) else value)
            continue
        if node.target not in _SAME | _COPIES or not isinstance(source, Node):
            continue
        # Without gradients a detached tensor equals its argument.
        alike = node.target in _DETACHED or _layout(node) == _layout(source) is not None
        if node.target in _COPIES:
            # Copies of constants are kept: the original may be written to under another name.
            alike &= node in fixed and owners.get(source, source).op == "call_function"
            alike &= node.target == _aten.clone.default or node.args[1] == 1
        if alike:
            node.replace_all_uses_with(source)


def _out_of_place(graph: Graph) -> None:
    """Replace a write to a tensor that nothing else reads by a new tensor."""
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        name, _, overload = getattr(node.target, "__name__", "").partition(".")
        if not (name.endswith("_") and isinstance(source, Node) and _is_pure(source)):
            continue
        kinds = [getattr(n.meta.get("layout"), "dtype", None) for n in node.all_input_nodes]
        alone = list(source.users) == [node] and viewed_by(source) is None and not is_draw(node)
        new = getattr(getattr(_aten, name[:-1], None), overload, None)
        if alone and new is not None and None not in kinds and len(set(kinds)) == 1:
            node.target = new


def _numbers_to_full(inputs: list[Node], constants: list[Tensor]) -> None:
    """
    Fill tensors that Python created from one number, as the model of a chain does per transition.
    """
    for node, tensor in zip(inputs, constants, strict=True):
        if tensor.dim() == 0 and all(u.target in _COPIED_NUMBERS for u in node.users):
            for user in list(node.users):
                _fill(user, tensor.item())


def _fill(node: Node, value: Any) -> None:
    """Replace a contiguous node by a tensor that is filled with a number."""
    meta = node.meta["layout"]
    if meta.stride == torch.empty(meta.shape, device="meta").stride():
        node.kwargs = {"dtype": meta.dtype, "device": meta.device}
        node.target, node.args = _aten.full.default, ([*meta.shape], value)


_VIEWS = {_aten.expand.default, _aten.view.default, _aten.unsqueeze.default, _aten.t.default}
_SCALED = {_aten.mul.Tensor, _aten.div.Tensor}
_BINARY = _SCALED | {_aten.add.Tensor, _aten.sub.Tensor}
# The results of these for one number are exact on every device.
_KNOWN: dict[tuple[object, float], float] = {
    (_aten.log.default, 1.0): 0.0,
    (_aten.exp.default, 0.0): 1.0,
    (_aten.pow.Tensor_Scalar, 1.0): 1.0,
}


def _fold(graph: Graph) -> None:
    """
    Replace tensors with equal entries by numbers, without changing any value.

    A standard normal prior has a location of zeros and a scale of ones, and gradients start with
    ones: products with 1 and differences from 0 are removed.
    """
    numbers, shares, fixed = (
        dict[Any, float](),
        _memory_owners(graph.nodes),
        set(_constant_nodes(graph)),
    )
    for node in list(graph.nodes):
        meta = node.meta.get("layout")
        if node not in fixed or meta is None or not meta.dtype.is_floating_point:
            continue
        given = [numbers.get(a, a) if isinstance(a, Node) else a for a in node.args]
        args = [a for a in given if not isinstance(a, list)]  # without shapes
        if (known := _number(node, args)) is not None:
            numbers[node] = torch.tensor(known, dtype=meta.dtype).item()
            if node.target not in _VIEWS:
                _fill(node, numbers[node])
        elif node.target in _BINARY and len(args) == 2 and not node.kwargs:
            if node.target in (_aten.mul.Tensor, _aten.add.Tensor) and node.args[0] in numbers:
                node.args, args = node.args[::-1], args[::-1]
            _take_number(node, args[1], shares)


def _take_number(node: Node, number: Any, shares: dict[Node, Node]) -> None:
    """Replace the second tensor of an operation by a number, or remove the operation."""
    x = node.args[0]
    if not (isinstance(number, float | int) and isinstance(x, Node) and _alike(x, node)):
        return
    nothing = "1.0" if node.target in _SCALED else "0.0"
    same = node.target != _aten.add.Tensor and str(float(number)) == nothing  # -0 + 0 is 0
    if same and shares.get(x, x).op == "call_function":
        node.replace_all_uses_with(x)
    elif number == -1 and node.target in _SCALED:
        node.target, node.args = _aten.neg.default, (x,)
    elif node.target != _aten.div.Tensor or abs(math.frexp(number)[0]) == 0.5:
        # Some devices multiply by the reciprocal of a number.
        node.args = (x, number)


def _alike(node: Node, other: Node) -> bool:
    """Return whether two nodes have the same layout, without dims that share memory."""
    return _layout(node) == _layout(other) is not None and 0 not in node.meta["layout"].stride


def _number(node: Node, args: list[Any]) -> float | None:
    """
    Return the number that all entries of a node have, if it is known.

    :param args: its arguments, as numbers where these are known.
    """
    if node.target == _aten.full.default:
        return args[0] if isinstance(args[0], float | int) else None
    if node.kwargs or not args or not all(isinstance(a, float | int) for a in args):
        return None
    if node.target in _VIEWS:
        return float(args[0])
    if node.target == _aten.neg.default:
        return -float(args[0])
    if node.target in _BINARY and len(args) == 2:
        dtype = node.meta["layout"].dtype
        found: Any = node.target(*(torch.tensor(float(a), dtype=dtype) for a in args))
        return float(found.item())
    return _KNOWN.get((node.target, float(args[0])))


def _layout(node: Node) -> TensorLayout | None:
    return node.meta.get("layout")


def _merge_equal(graph: Graph) -> None:
    """
    Merge operations that compute the same function of the same values, such as constants that the
    model creates at each transition of a chain.
    """
    known: dict[Hashable, Node] = {}
    for node in _constant_nodes(graph):
        first = known.setdefault((node.target, key_of(node.args), key_of(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def key_of(value: Argument) -> Hashable:
    """Equal for equal arguments; 1, 1.0 and True are not, and 0.0 is not -0.0."""
    if isinstance(value, Node):
        return value
    if isinstance(value, list | tuple):
        return (type(value), *map(key_of, value))
    if isinstance(value, dict):
        return tuple((name, key_of(v)) for name, v in value.items())
    if isinstance(value, slice):
        return ("slice", key_of(value.start), key_of(value.stop), key_of(value.step))
    return (type(value), repr(value))


def _owned_outputs(graph: Graph) -> None:
    """
    Make each output a separate, dense tensor, because optimizers and users write to gradients.
    """
    owners, seen, owned = _memory_owners(graph.nodes), set[Node](), []
    output, returned = returned_by(graph)
    for value in returned:
        root = owners.get(value, value)
        if root.op == "placeholder" or root in seen or not _is_dense(value):
            options: dict[str, Any] = {"memory_format": torch.contiguous_format}
            with graph.inserting_before(output):
                value = graph.call_function(_aten.clone.default, (value,), options)
        seen.add(root)
        owned.append(value)
    output.args = (tuple(owned),)


def _is_dense(node: Node) -> bool:
    """Return whether a tensor's memory has exactly one place for each entry."""
    meta = node.meta.get("layout")
    if meta is None:
        return True  # a copy made here
    tensor = torch.empty_strided(meta.shape, meta.stride, device="meta")
    return torch.empty_like(tensor).stride() == tensor.stride()


def owns_outputs(graph: Graph) -> bool:
    """
    Return whether no output shares memory with another or with an input, and no input is updated.
    """
    owner_of, (_, returned) = _memory_owners(graph.nodes), returned_by(graph)
    owners = [owner_of.get(value, value) for value in returned]
    shared = any(n.op == "placeholder" for n in (*owners, *_targets(graph)))
    return len(set(owners)) == len(returned) and not shared


# 1. Gradients of parts ----------------------------------------------------------------------------

_SELECTED, _SLICED = _aten.select_backward.default, _aten.slice_backward.default


def join_parts(graph: Graph, least: int) -> None:
    """
    Stack the gradients of the parts of a tensor, such as of ``x[k]`` at each transition k.

    They are recorded as a sum of tensors that are zero elsewhere, each with an index that no other
    transition has. The terms of an entry are added in the same order, those without an index last.

    :param least: the number of parts from which on they are stacked.
    """
    sums: dict[Node, list[Any]] = {}
    for node in graph.nodes:
        if _is_sum(node):
            sums[node] = terms = []
            for term in node.args:
                terms += sums.pop(term) if term in sums and len(term.users) == 1 else [term]
    for root, terms in sums.items():
        # Each layer has parts that do not overlap.
        layers: dict[Hashable, list[dict[tuple[int, int], Node]]] = defaultdict(list)
        for node in [t for t, count in Counter(terms).items() if count == 1 and _is_part(t)]:
            begin, end = _interval(node)
            found = layers[node.target, key_of(node.args[1:3])]
            free = (x for x in found if all(end <= b or e <= begin for b, e in x))
            if (layer := next(free, None)) is None:
                found.append(layer := {})
            layer[begin, end] = node
        long = [x for found in layers.values() for x in found if len(x) >= least]
        joined = {n for layer in long for n in layer.values()}
        if joined:
            with graph.inserting_before(root):
                total, *others = [_stacked(graph, layer) for layer in long]
                for term in (*others, *(t for t in terms if t not in joined)):
                    total = graph.call_function(_aten.add.Tensor, (total, term))
            root.replace_all_uses_with(total)
    for node in reversed(list(graph.nodes)):
        if not node.users and (_is_sum(node) or _is_part(node)):
            graph.erase_node(node)


def _is_sum(node: Node) -> bool:
    """Return whether a node adds two tensors of its own shape and type."""
    if node.target is not _aten.add.Tensor or node.kwargs:
        return False
    metas = [a.meta.get("layout") if isinstance(a, Node) else None for a in (*node.args, node)]
    kinds: set[Any] = {None if m is None else (m.shape, m.dtype) for m in metas}
    return len(kinds) == 1 and None not in kinds


def _is_part(node: Node) -> bool:
    step = node.args[5:] == (1,) if node.target is _SLICED else node.target is _SELECTED
    return step and len(node.users) <= 1


def _interval(part: Node) -> tuple[int, int]:
    """Return the first index of a part and the index after its last one."""
    args: Any = part.args
    _, sizes, dim, *where = args
    if part.target is _SELECTED:
        return where[0] % sizes[dim], where[0] % sizes[dim] + 1
    begin, end, _ = slice(*where).indices(sizes[dim])
    return begin, max(begin, end)


def _stacked(graph: Graph, layer: dict[tuple[int, int], Node]) -> Node:
    """Return the sum of parts that do not overlap."""
    first = next(iter(layer.values()))
    args: Any = first.args
    selected, (sizes, dim), at = first.target is _SELECTED, args[1:3], 0
    pieces: list[Any] = []
    meta = first.meta["layout"]
    kind = {"dtype": meta.dtype, "device": meta.device}
    for begin, end in [*sorted(layer), (sizes[dim], sizes[dim])]:
        if begin > at:
            shape = [*sizes]
            shape[dim] = begin - at
            if selected:
                del shape[dim]
            zeros = graph.call_function(_aten.full.default, (shape, 0.0), kind)
            pieces += [zeros] * (begin - at if selected else 1)
        pieces += [layer[begin, end].args[0]] if (begin, end) in layer else []
        at = end
    target = _aten.stack.default if selected else _aten.cat.default
    return graph.call_function(target, (pieces, dim))


# Updates in place ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """
    An update of a tensor that a graph holds: an output of the graph, which is written later.

    :ivar constant: which of the graph's constants the tensor is.
    :ivar rows: whether some rows are written: one output has their indices and another the
        values; otherwise all of it, which is one output.
    """

    constant: int
    rows: bool

    def write(self, buffer: Tensor, new: list[Tensor]) -> None:
        """Write the outputs to the tensor."""
        if self.rows:
            buffer.detach().index_copy_(0, *new)
        else:
            buffer.detach().copy_(new[0])

    def done(self, buffer: Tensor, new: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the values to write, and the present values of the tensor."""
        return new[-1], buffer.index_select(0, new[0]) if self.rows else buffer


def _extract_updates(graph: Graph, constants: list[Node]) -> list[Update]:
    """
    Turn writes to constant inputs into outputs of a graph.

    :raises NotRecordable: if another input is written to.
    """
    updates = []
    output, new = returned_by(graph)
    for node in [n for n in _targets(graph) if n.op == "placeholder"]:
        if node not in constants:
            raise NotRecordable("a program writes to a tensor that it is called with")
        last = _rows(graph, node)
        if last is not None:
            new += last.args[2:4]
            graph.erase_node(last)
        else:  # a copy is written instead, which nothing reads before
            users = [n for n in graph.nodes if node in n.all_input_nodes]
            seen = [n for n in users if viewed_by(n) is node or node in _written(n)]
            with graph.inserting_before(seen[0]):
                copy = graph.call_function(_aten.clone.default, (node,))
            for user in users[users.index(seen[0]) :]:
                user.replace_input_with(node, copy)
            new.append(copy)
        updates.append(Update(constants.index(node), last is not None))
    output.args = (tuple(new),)
    return updates


def _rows(graph: Graph, buffer: Node) -> Node | None:
    """
    Return the single write of rows to a buffer that is not read afterwards. If a minibatch changes
    a few rows, copying the states of all data would cost more than the step.
    """
    owners = _memory_owners(graph.nodes)
    uses = [n for n in graph.nodes if any(owners.get(i, i) is buffer for i in n.all_input_nodes)]
    writes = [n for n in uses if any(owners.get(t, t) is buffer for t in _written(n))]
    last = uses[-1]
    if writes != [last] or last.target != _aten.index_copy_.default or last.users:
        return None
    return last if last.args[:2] == (buffer, 0) else None


# Fixed constants ----------------------------------------------------------------------------------


def fresh(graph: Graph, count: int) -> set[int]:
    """
    Return which of the first inputs are tensors that Python created from numbers in the graph.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"][:count]
    return {i for i, n in enumerate(inputs) if all(u.target in _COPIED_NUMBERS for u in n.users)}


def split_off(graph: Graph, stays: list[bool]) -> tuple[GraphModule, GraphModule]:
    """
    Split off the operations that depend only on constants, to compute them once.

    :param stays: which of the graph's first inputs these are.
    :returns: the graphs ``(*constants) -> (*prepared)`` and ``(*prepared, *inputs) -> (*outputs)``.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"][: len(stays)]
    known = {n for n, stay in zip(inputs, stays, strict=True) if stay}
    for node in _constant_nodes(graph):
        if all(n in known for n in node.all_input_nodes):
            known.add(node)
    first, copies = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node in known or node in inputs:
            copies[node] = first.node_copy(node, copies.__getitem__)
    passed = [n for n in copies if any(user not in known for user in n.users)]
    first.output(tuple(copies[n] for n in passed))
    begin = next(iter(graph.nodes))
    for node in passed:
        with graph.inserting_before(begin):
            prepared = graph.placeholder(f"prepared_{node.name}")
        node.replace_all_uses_with(prepared, lambda user: user not in known)
    for node in reversed(copies):
        graph.erase_node(node)
    return tuple(GraphModule(torch.nn.Module(), part) for part in (first, graph))  # type: ignore[return-value]


# Calls with less overhead -------------------------------------------------------------------------

# A call through torch.ops looks up its schema, which takes 1 to 2 of about 5 microseconds.
_OVERLOADS = {
    "Tensor": "add sub mul div pow eq ne lt le gt ge",
    "Scalar": "eq ne lt le gt ge",
    "Tensor_Scalar": "pow",
    "dim_IntList": "sum",
    "dim": "squeeze all any",
    "int": "select transpose unbind",
    "self": "where",
    "default": "abs addmm all cat clone exp expm1 isfinite log log1p mm neg randn randn_like "
    "reciprocal rsqrt sigmoid sqrt stack sum t tanh unsqueeze",
}
_QUICK: dict[object, Callable[..., object]] = {
    getattr(getattr(_aten, name), overload): getattr(torch, name)
    for overload, names in _OVERLOADS.items()
    for name in names.split()
    if hasattr(getattr(_aten, name), overload)
}
_QUICK |= {_aten.expand.default: Tensor.expand, _aten.view.default: Tensor.view}


def quick(graph: GraphModule) -> GraphModule:
    """Return a graph that calls the same kernels in the fastest way."""
    module = GraphModule(torch.nn.Module(), copy.deepcopy(graph.graph))
    _join_selects(module.graph)
    for node in module.graph.nodes:
        node.target = _QUICK.get(node.target, node.target)
    module.recompile()
    return module


def _join_selects(graph: Graph) -> None:
    """Replace several selections from a tensor by one call, which makes views of all entries."""
    selects: dict[tuple[Node, int], list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=_aten.select.int):
        source, dim, _ = node.args
        selects[source, dim].append(node)
    for (source, dim), nodes in selects.items():
        if len(nodes) < 3:
            continue
        with graph.inserting_before(nodes[0]):
            entries = graph.call_function(_aten.unbind.int, (source, dim))
        for node in nodes:
            with graph.inserting_before(node):
                entry = graph.call_function(operator.getitem, (entries, node.args[2]))
            node.replace_all_uses_with(entry)
            graph.erase_node(node)
