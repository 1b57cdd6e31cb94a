"""
Compile repeated parts of a recorded graph once: the transition of a chain, the body of a loop.

A recorded chain of K transitions has K copies of the same operations, and K more in its gradient.
Compiled as a whole, its time to compile grows with K. Here a body is compiled once, and a driver,
which is a graph itself, calls it for each copy.

1. :func:`_find_cuts` finds periods in the order of recording, and cuts where copies begin and end.
2. Each :class:`_Part` between two cuts becomes a function of the values that it reads. Parts with
   the same function are compiled once.

Only the second step affects the results: a wrong period costs compile time, and changes no
number.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.graph import Graph
from torch.fx.node import map_arg

from pyro_mcvae.compiled.graph import (
    functional_nodes,
    is_draw,
    join_parts,
    key_of,
    returned_by,
    viewed_by,
)
from pyro_mcvae.compiled.tracer import TensorLayout
from pyro_mcvae.ops.tensors import Generators

_aten = torch.ops.aten

Run = Callable[..., Any]

# Three copies make a body. It has at least 16 operations; shorter ones are joined, up to some 100,
# since a call costs as much as a few operations. One of more than 1,000 takes long to compile: the
# loops within it are found instead.
_COPIES, _SHORTEST, _JOINED, _LONGEST = 3, 16, 100, 1000
# Operations with more inputs, such as the concatenation of the values of all steps, are called by
# the driver: their compile time would grow with the number of inputs.
_MANY = 16


def outline(graph: GraphModule, example: list[Tensor]) -> Outline | None:
    """Find the repeated parts of a graph, given example inputs; return None without repeats."""
    copy = Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    join_parts(copy, _COPIES)
    generators = Generators()
    _TensorLayouts(torch.nn.Module(), graph=copy).run(*example)
    generators.put_back()
    _free_draws(copy)
    items = _Items(copy)
    cuts = _find_cuts(items)
    return Outline(copy, items, cuts) if cuts else None


class _TensorLayouts(Interpreter):
    """Computes a graph, and notes the layout of each tensor in it."""

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            n.meta["layout"] = TensorLayout.of(value)
        return value


def _free_draws(graph: Graph) -> None:
    """Let draws take their shape as numbers instead of a tensor."""
    for node in graph.nodes:
        if node.target in _DRAWN_LIKE and node.kwargs.keys() <= {"pin_memory"}:
            shape, stride, dtype, device = node.meta["layout"]
            if stride == torch.empty(shape, device="meta").stride():
                node.target, node.args = _DRAWN_LIKE[node.target], ([*shape],)
                node.kwargs = {"dtype": dtype, "device": device}


_DRAWN_LIKE = {
    _aten.randn_like.default: _aten.randn.default,
    _aten.rand_like.default: _aten.rand.default,
}


# 1. Copies ----------------------------------------------------------------------------------------


class _Items:
    """
    The operations of a graph in the order of recording; views belong to the operations that use
    them.

    :ivar nodes: the nodes of each item, including those that unpack its results.
    :ivar draws: random numbers without inputs, which come first; empty if some draws have inputs.
    :ivar views: nodes that are repeated where they are read.
    :ivar compiled: whether an item is compiled, or called by the driver.
    :ivar tokens: equal for items that may be copies of each other.
    :ivar sources: of each item, the items that it reads; -1 for inputs.
    """

    def __init__(self, graph: Graph) -> None:
        functional, place = set(functional_nodes(graph)), dict[Node, int]()
        known: dict[Hashable, int] = {}
        draws = dict.fromkeys(filter(is_draw, graph.nodes))
        self.draws = {} if any(n.all_input_nodes for n in draws) else draws
        self.nodes: list[list[Node]] = []
        self.views: dict[Node, Node] = {}
        self.compiled: list[bool] = []
        self.tokens: list[int | None] = []
        self.sources: list[list[int]] = []
        for node in graph.nodes:
            source = viewed_by(node)
            if node.op != "call_function" or node in self.draws:
                continue
            if node.target is operator.getitem and source in place:
                place[node] = place[source]
                self.nodes[place[source]].append(node)
            elif node in functional and source is not None:
                self.views[node] = source
            else:
                place[node] = len(self.nodes)
                self.nodes.append([node])
                inputs: list[Node] = []
                map_arg((node.args, node.kwargs), inputs.append)
                self.sources.append([place.get(self.owner(n), -1) for n in inputs])
                self.compiled.append(node in functional and len(inputs) <= _MANY)
                self.tokens.append(known.setdefault(_token(node), len(known)))

    def owner(self, node: Node) -> Node:
        """Return the node whose memory a view shows."""
        while node in self.views:
            node = self.views[node]
        return node


def _token(node: Node) -> Hashable:
    about = map_arg((node.args, node.kwargs), lambda n: ("tensor", n.meta.get("layout")))
    return node.target, key_of(about), key_of(node.meta.get("layout"))


def _find_cuts(items: _Items) -> set[int]:
    """Return the indices of items at which copies of bodies begin or have ended."""
    tokens, cuts = list(items.tokens), set[int]()
    while True:
        last, distances = dict[int, int](), Counter[int]()
        for i, token in enumerate(tokens):
            if token is not None:
                distances[i - last.get(token, i)] += 1
                last[token] = i
        del distances[0]
        common = distances.most_common(12)
        periods = [p for p, n in common if p <= _LONGEST and n >= _SHORTEST]
        found = [list[tuple[int, int]](), *(_copies(tokens, items.sources, p) for p in periods)]
        # Choose the period that leaves the fewest operations to compile.
        best = max(found, key=lambda c: sum(e - b for b, e in c) - sum({e - b for b, e in c}))
        if not best:
            return cuts
        for begin, end in best:
            cuts |= {begin, end}
            tokens[begin:end] = [None] * (end - begin)


def _copies(
    tokens: list[int | None], sources: list[list[int]], period: int
) -> list[tuple[int, int]]:
    """Return the copies of bodies that repeat with a period."""

    def is_copied(i: int) -> bool:
        """Return whether the item a period later copies this one and what it reads."""
        j = i + period
        if tokens[i] is None or tokens[i] != tokens[j]:
            return False
        pairs = zip(sources[i], sources[j], strict=True)
        before = max(begin - 1, i - period)  # inputs from outside the body
        return all(b == a + period or (a <= before and b <= before + period) for a, b in pairs)

    copies, begin = [], 0
    for i in range(len(tokens) - period + 1):
        if i + period < len(tokens) and is_copied(i):
            continue
        count = (i - begin) // period + 1
        lengths = [n for n in range(1, count // _COPIES + 1) if n * period >= _SHORTEST]
        lengths = [n for n in lengths if n * period <= _JOINED] or lengths[:1]
        if lengths:  # the longest one without a remainder is best
            joined = max(lengths, key=lambda n: (-(count % n), n))
            starts = range(begin, begin + count // joined * joined * period, joined * period)
            copies += [(start, start + joined * period) for start in starts]
        begin = i + 1
    return copies


# 2. Parts and their driver ------------------------------------------------------------------------


class _Part:
    """
    Operations as a function of the values that they read.

    :ivar inputs: the values that they read, in order, once per read.
    :ivar values: the computed values, in order, with their views.
    :ivar key: equal for parts that compute the same function of their inputs.
    """

    def __init__(self, nodes: list[Node], items: _Items) -> None:
        self.inputs, self.values, key = list[Node](), dict[Node, int](), list[Hashable]()
        inside = set(nodes)

        def about(node: Node) -> Any:
            if items.owner(node) not in inside:
                self.inputs.append(node)
                return "input", key_of(node.meta.get("layout"))
            if node not in self.values:  # a view
                add(node)
            return "value", self.values[node]

        def add(node: Node) -> None:
            key.append((node.target, key_of(map_arg((node.args, node.kwargs), about))))
            self.values[node] = len(self.values)

        for node in nodes:
            add(node)
        self.key = tuple(key)


class _Body:
    """
    A function of several parts.

    :ivar inputs: the values that it reads, for each part.
    :ivar outputs: which of a part's values it returns.
    """

    def __init__(self, parts: list[_Part], needed: set[Node], items: _Items) -> None:
        self.parts = parts
        self.outputs = sorted({i for p in parts for n, i in p.values.items() if n in needed})
        graph, copies = Graph(), dict[Node, Node]()
        places: dict[tuple[Node, ...], Node] = {}
        slots = []
        for nodes in zip(*(part.inputs for part in parts), strict=True):
            shown = [nodes]  # and of what they are the same views in all parts
            while all(n in items.views for n in nodes) and len(set(map(_token, nodes))) == 1:
                shown.append(nodes := tuple(items.views[n] for n in nodes))
            while "layout" not in shown[-1][0].meta:  # several tensors
                shown.pop()
            *views, nodes = shown
            if nodes not in places:
                places[nodes] = graph.placeholder(f"input_{len(places)}")
            slots.append((places[nodes], [v[0] for v in views]))
        self.inputs = list(zip(*places, strict=True)) or [()] * len(parts)
        read = iter(slots)

        def argument(node: Node) -> Node:
            if node in copies:
                return copies[node]
            copies[node], views = next(read)
            for view in reversed(views):
                copies[node] = graph.node_copy(view, lambda _: copies[node])
            return copies.pop(node)

        for node in parts[0].values:
            copies[node] = graph.node_copy(node, argument)
        values = list(copies.values())
        graph.output(tuple(values[i] for i in self.outputs))
        self.graph = GraphModule(torch.nn.Module(), graph)
        layouts = [n.meta["layout"] for n in self.inputs[0]]
        self.example = [torch.empty_strided(*x[:2], dtype=x[2], device=x[3]) for x in layouts]


class Outline:
    """
    The parts of a graph, and the bodies that are to be compiled for them.

    :ivar size: the number of operations to compile.
    """

    def __init__(self, graph: Graph, items: _Items, cuts: set[int]) -> None:
        self._graph, self._draws = graph, items.draws
        self._steps = list(_steps(items, cuts))
        _, self._results = returned_by(graph)
        groups: dict[Hashable, list[_Part]] = defaultdict(list)
        self._needed = {items.owner(n) for n in self._results}
        for step in self._steps:
            if isinstance(step, _Part):
                groups[step.key].append(step)
            read = step[0].all_input_nodes if isinstance(step, list) else step.inputs
            self._needed |= {items.owner(n) for n in read}
        self._bodies = [_Body(g, self._needed, items) for g in groups.values()]
        self.size = sum(len(parts[0].values) for parts in groups.values())

    def driver(
        self, compile: Callable[[GraphModule, list[Tensor]], Callable[[], Run]]
    ) -> GraphModule:
        """
        Return a graph of the same values that calls each part.

        :param compile: compiles the graph of a body for inputs like an example's, and returns what
            makes a function for each of its calls.
        """
        driver, values = Graph(), dict[Node, Node]()
        calls: dict[_Part, tuple[Run, tuple[Node, ...], list[int]]] = {}
        for body in self._bodies:
            make = compile(body.graph, body.example)
            for part, inputs in zip(body.parts, body.inputs, strict=True):
                calls[part] = make(), inputs, body.outputs

        def value(node: Node) -> Node:
            if node not in values:  # a view, or an operation that is not compiled
                values[node] = driver.node_copy(node, value)
            return values[node]

        for node in (*self._graph.find_nodes(op="placeholder"), *self._draws):
            value(node)
        for step in self._steps:
            if isinstance(step, list):
                values |= {node: value(node) for node in step}
                continue
            run, inputs, outputs = calls[step]
            found, nodes = driver.call_function(run, tuple(map(value, inputs))), list(step.values)
            for at, i in enumerate(outputs):
                if nodes[i] in self._needed:
                    values[nodes[i]] = driver.call_function(operator.getitem, (found, at))
        driver.output(tuple(map(value, self._results)))
        return GraphModule(torch.nn.Module(), driver)


def _steps(items: _Items, cuts: set[int]) -> Iterator[_Part | list[Node]]:
    """Yield the parts of a graph, and the operations between them that the driver calls."""
    part: list[Node] = []
    for i, nodes in enumerate(items.nodes):
        if part and (i in cuts or not items.compiled[i]):
            yield _Part(part, items)
            part = []
        if items.compiled[i]:
            part += nodes
        else:
            yield nodes
    if part:
        yield _Part(part, items)
