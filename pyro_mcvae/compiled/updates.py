"""What a recorded step updates in place becomes outputs of its graph, which are written later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.graph import Graph

from pyro_mcvae.compiled.operations import roots, targets, written
from pyro_mcvae.compiled.refusal import NotRecordable

__all__ = ["Update", "take_out_updates"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class Update:
    """
    An update of a tensor that a graph holds.

    :ivar constant: which of its constants that is.
    :ivar rows: whether some rows are written, of which an output is the indices and another the
        values; or else all of it, which is one output.
    """

    constant: int
    rows: bool

    @property
    def num_outputs(self) -> int:
        """How many outputs of the graph it has."""
        return 2 if self.rows else 1

    def write(self, held: Tensor, new: list[Tensor]) -> None:
        """Do it."""
        if self.rows:
            held.detach().index_copy_(0, *new)
        else:
            held.detach().copy_(new[0])

    def done(self, held: Tensor, new: list[Tensor]) -> tuple[Tensor, Tensor]:
        """What it writes, and what stands there."""
        return new[-1], held.index_select(0, new[0]) if self.rows else held


def take_out_updates(graph: Graph, constants: list[Node]) -> list[Update]:
    """
    Let a graph return what it would write.

    :param constants: the inputs that are held.
    :raises NotRecordable: if another input is written to.
    """
    (output,) = (n for n in graph.nodes if n.op == "output")
    returned = output.args[0]
    assert isinstance(returned, list | tuple)
    new, found = list(returned), []
    for node in [n for n in targets(graph) if n.op == "placeholder"]:
        if node not in constants:
            raise NotRecordable("a program writes to a tensor that it is called with")
        last = _rows(graph, node)
        new += [_copied(graph, node)] if last is None else last.args[2:4]
        if last is not None:
            graph.erase_node(last)
        found.append(Update(constants.index(node), last is not None))
    output.args = (tuple(new),)
    return found


def _rows(graph: Graph, held: Node) -> Node | None:
    """
    The one write to a tensor, of rows, after which nothing reads it: a copy of the states of all
    data, of which a minibatch changes some, would cost more than the step.
    """
    shares = roots(graph.nodes)
    uses = [n for n in graph.nodes if any(shares.get(i, i) is held for i in n.all_input_nodes)]
    writes = [n for n in uses if any(shares.get(t, t) is held for t in written(n))]
    last = uses[-1]
    if writes != [last] or last.target != _aten.index_copy_.default or last.users:
        return None
    return last if last.args[:2] == (held, 0) else None


def _copied(graph: Graph, held: Node) -> Node:
    """A copy that is written instead."""
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        copy = graph.call_function(_aten.clone.default, (held,))
    held.replace_all_uses_with(copy)
    copy.args = (held,)
    return copy
