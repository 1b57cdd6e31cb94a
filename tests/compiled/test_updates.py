"""What a recorded step updates in place: outputs of its graph, written when it is used."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyro_mcvae.compiled.graph import as_function
from pyro_mcvae.compiled.tracer import trace

index = torch.tensor([2, 0])
Write = Callable[[Tensor, Tensor], Tensor]


def rows(held: Tensor, x: Tensor) -> Tensor:
    before = held.index_select(0, index).sum()
    held.index_copy_(0, index, x * 2)
    return before


def rows_that_are_read(held: Tensor, x: Tensor) -> Tensor:
    held.index_copy_(0, index, x * 2)
    return held.sum()


def rows_of_a_view(held: Tensor, x: Tensor) -> Tensor:
    held[1:].index_copy_(0, index, x * 2)
    return x.sum()


def columns(held: Tensor, x: Tensor) -> Tensor:
    held.index_copy_(1, index, x.t())
    return x.sum()


def twice(held: Tensor, x: Tensor) -> Tensor:
    held.index_copy_(0, index, x * 2)
    held.index_copy_(0, index + 1, x * 3)
    return x.sum()


def everything(held: Tensor, x: Tensor) -> Tensor:
    held.mul_(2.0)
    return held.sum()


WRITES: dict[str, tuple[Write, bool]] = {
    "rows": (rows, True),
    "rows that are read": (rows_that_are_read, False),
    "rows of a view": (rows_of_a_view, False),
    "columns": (columns, False),
    "twice": (twice, False),
    "everything": (everything, False),
}


@pytest.mark.parametrize("kind", WRITES)
def test_updates_are_outputs_of_the_graph(kind: str) -> None:
    write, by_rows = WRITES[kind]
    held = torch.arange(16.0).reshape(4, 4)
    x = torch.arange(8.0).reshape(2, 4)
    graph, constants, (update,) = as_function(*trace(lambda x: [write(held, x)], [x]))
    assert update.rows is by_rows
    assert constants[update.constant] is held
    x = x + 0.5
    before, expected = held.clone(), held.clone()
    result = write(expected, x)
    outcome, *new = graph(*constants, x)
    assert torch.equal(outcome, result)
    assert torch.equal(held, before)  # until it is used
    update.write(held, new)
    assert torch.equal(held, expected)
    written, there = update.done(held, new)
    assert torch.equal(written, there)
