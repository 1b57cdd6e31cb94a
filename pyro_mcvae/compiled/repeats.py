"""
The parts of a recorded graph that repeat: the transitions of a chain, and their backward passes.

A chain is recorded unrolled. A stretch of operations that follows itself again and again is cut
into equal parts, which are compiled once, so that compiling costs little more for many transitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument, Target, map_arg
from torch.fx.passes.shape_prop import TensorMetadata, _extract_tensor_metadata
from torch.fx.passes.split_module import split_module

from pyro_mcvae.compiled.operations import is_pure
from pyro_mcvae.compiled.parts import return_alike, structure

__all__ = ["compile_parts", "cuts"]

_aten = torch.ops.aten
Run = Callable[..., list[Tensor]]
# Shorter repetitions are not worth a call of their own.
_SHORTEST = 30
# Graphs of fewer operations compile in time as they are, and run faster: the calls of parts take
# time, too, which shows less where tensors are large.
_LARGE = {"small tensors": 2500, "large tensors": 1500}
_LARGE_TENSOR = 10_000
# Beyond so many operations a compiler takes minutes, of equal parts those of one.
_MOST = 5000
# What depends on no draw and is as small as this is computed first: a schedule's values, say, of
# which each transition takes another.
_SMALL = 1024
# Views that are the same in equal parts; of a schedule each transition selects another entry.
_LAYOUTS = {
    *(getattr(_aten, n).default for n in ("t", "view", "expand", "permute", "unsqueeze")),
    *(_aten.transpose.int, _aten.squeeze.dim, _aten.squeeze.default),
}


def compile_parts(
    graph: GraphModule, example: list[Tensor], compiler: Callable[[GraphModule, list[Tensor]], Run]
) -> Run:
    """
    Compile a graph part by part, and equal parts once.

    :param compiler: makes a function of a part.
    :raises RuntimeError: if there is too much to compile.
    """
    split = _split_at_repeats(graph) if _is_long(graph) else None
    if split is None:
        _check_size(len(graph.graph.nodes))
        return compiler(graph, example)
    return_alike(split)
    parts = {n: (p, structure(p)) for n, p in split.named_children() if isinstance(p, GraphModule)}
    _check_size(sum({key: len(part.graph.nodes) for part, key in parts.values()}.values()))
    examples = _Examples(split)
    examples.run(*example)
    made: dict[Hashable, Run] = {}
    for name, (part, key) in parts.items():
        if key not in made:
            made[key] = compiler(part, examples.found[name])
        setattr(split, name, _Compiled(made[key]))
    return split


def _check_size(count: int) -> None:
    if count > _MOST:
        raise RuntimeError(f"to compile its {count} different operations would take minutes")


def _is_long(graph: GraphModule) -> bool:
    metas = [n.meta.get("tensor_meta") for n in graph.graph.nodes if n.op == "call_function"]
    total = sum(m.shape.numel() for m in metas if hasattr(m, "shape"))
    kind = "large tensors" if total > _LARGE_TENSOR * len(metas) else "small tensors"
    return len(metas) > _LARGE[kind]


def _split_at_repeats(graph: GraphModule) -> GraphModule | None:
    """A graph that calls its parts; None where nothing repeats."""
    _place_by_masks(graph)
    _compute_small_things_first(graph)
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    found = cuts([_label(n) for n in nodes])
    if not found:
        return None
    part, parts = 0, {}
    for i, node in enumerate(nodes):
        part += i in found
        parts[node] = part
    _repeat_views(graph, parts)
    return split_module(graph, graph, lambda n: parts.get(n, 0))


def _repeat_views(graph: GraphModule, parts: dict[Node, int]) -> None:
    """
    Let each part make the views that it needs: what it would hand on shares no memory then, and
    the compiled part needs nobody around it to put views together.
    """
    for node in reversed(list(graph.graph.nodes)):
        if node.target not in _LAYOUTS or node not in parts:
            continue
        copies: dict[int, Node] = {}
        for user in sorted(node.users):  # in the order of the graph
            part = parts.get(user, parts[node])
            if part != parts[node]:
                if part not in copies:
                    with graph.graph.inserting_before(user):
                        copies[part] = graph.graph.node_copy(node, lambda n: n)
                    parts[copies[part]] = part
                user.replace_input_with(node, copies[part])
        if not node.users:
            graph.graph.erase_node(node)


def cuts(labels: list[Hashable]) -> set[int]:
    """
    Where parts begin, of which several in a row are alike.

    Example::

        >>> from pyro_mcvae.compiled.repeats import cuts
        >>> body = list(range(40))
        >>> sorted(cuts(["first", *body, *body, *body, "last"]))
        [1, 41, 81, 121]
    """
    known: dict[Hashable, int] = {}
    codes = torch.tensor([known.setdefault(label, len(known)) for label in labels])
    found: set[int] = set()
    waiting = [(0, len(labels))]
    while waiting:
        begin, end = waiting.pop()
        best = _longest_repetition(codes[begin:end])
        if best is None:
            continue
        start, period, count = best
        found |= {begin + start + i * period for i in range(count + 1)}
        waiting += [(begin, begin + start), (begin + start + count * period, end)]
    return found - {0, len(labels)}


def _longest_repetition(codes: Tensor) -> tuple[int, int, int] | None:
    """Start, period and count of the repetition that saves most."""
    best, saved = None, 0
    for period in range(_SHORTEST, len(codes) // 2 + 1):
        same = codes[period:] == codes[:-period]
        breaks = torch.cat([torch.tensor([-1]), (~same).nonzero()[:, 0], torch.tensor([len(same)])])
        lengths = breaks.diff() - 1
        longest = int(lengths.argmax())
        count = int(lengths[longest]) // period + 1
        if (count - 1) * period > saved:
            saved = (count - 1) * period
            best = int(breaks[longest]) + 1, period, count
    return best


def _label(node: Node) -> Hashable:
    """What a node does, whichever nodes it does it to."""
    rest = map_arg((node.args, node.kwargs), lambda n: None)
    return (str(node.target), str(rest), str(node.meta.get("tensor_meta")))


def _place_by_masks(graph: GraphModule) -> None:
    """
    Write the gradient of entry k of a small tensor, as a transition has of its own step size, as
    ``where(is_k, gradient, 0)``: then the backward passes of all transitions are alike.
    """
    first = next(n for n in graph.graph.nodes if n.op == "call_function")
    masks: dict[Hashable, Node] = {}  # and zeros
    for node in list(graph.graph.nodes):
        if node.target is not _aten.select_backward.default:
            continue
        gradient, sizes, dim, index = node.args
        if math.prod(sizes) > _SMALL:
            continue
        dim, size = dim % len(sizes), sizes[dim]
        device, dtype = node.meta["device"], node.meta["tensor_meta"].dtype
        key, zero = (index % size, size, len(sizes) - dim, device), (dtype, device)
        with graph.graph.inserting_before(first):
            if key not in masks:
                masks[key] = _is_entry(graph, *key)
            if zero not in masks:
                masks[zero] = _called(graph, _aten.full.default, [], 0, dtype=dtype, device=device)
        with graph.graph.inserting_before(node):
            wide = _called(graph, _aten.unsqueeze.default, gradient, dim)
            placed = _called(graph, _aten.where.self, masks[key], wide, masks[zero])
        node.replace_all_uses_with(placed)
        graph.graph.erase_node(node)


def _is_entry(graph: GraphModule, index: int, size: int, depth: int, device: torch.device) -> Node:
    """Which of the places is the entry's, shape ``[size, *1]`` with ``depth`` dims."""
    places = _called(graph, _aten.arange.default, size, device=device)
    found = _called(graph, _aten.eq.Scalar, places, index)
    return _called(graph, _aten.view.default, found, [size, *[1] * (depth - 1)])


def _called(graph: GraphModule, target: Callable[..., Tensor], *args: Any, **options: Any) -> Node:
    """A new operation, which shows its shape as others do."""
    node = graph.graph.call_function(target, args, options)
    inputs = map_arg(args, lambda n: _like(n.meta["tensor_meta"]))
    node.meta["tensor_meta"] = _extract_tensor_metadata(target(*inputs, **options))
    return node


def _like(meta: TensorMetadata) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _compute_small_things_first(graph: GraphModule) -> None:
    first = next(n for n in graph.graph.nodes if n.op == "call_function")
    early = {n for n in graph.graph.nodes if n.op == "placeholder"}
    for node in list(graph.graph.nodes):
        meta = node.meta.get("tensor_meta")
        small = meta is not None and meta.shape.numel() <= _SMALL
        if small and is_pure(node) and all(n in early for n in node.all_input_nodes):
            early.add(node)
            if node is first:
                first = node.next
            else:
                first.prepend(node)
    graph.recompile()


class _Examples(torch.fx.Interpreter):
    """Runs a split graph, and remembers what its parts are called with."""

    def __init__(self, split: GraphModule) -> None:
        super().__init__(split)
        self.found: dict[str, list[Tensor]] = {}

    def call_module(
        self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]
    ) -> object:
        self.found[str(target)] = [a for a in args if isinstance(a, Tensor)]
        return super().call_module(target, args, kwargs)


class _Compiled(torch.nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = (run,)

    def forward(self, *inputs: Tensor) -> object:
        return self._run[0](*inputs)
