"""What is recorded of a function, and which values it may read."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pyro_mcvae.compiled.tracer import NotRecordable, is_recorded, trace, unrecorded
from pyro_mcvae.ops.tensors import recorded_guards

BUFFER = torch.tensor([0.5, 2.0], dtype=torch.float64)


def many_short_lived(x: Tensor) -> Tensor:
    """Tensors of Python that end at once, so that later ones have their identity."""
    total = x
    for i in range(200):
        total = total + torch.tensor(float(i % 7), dtype=x.dtype) * x
        gc.collect(0)
    return total


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a stored tensor": lambda x: x + BUFFER[0],
    "tensors that end": many_short_lived,
    "several results": lambda x: torch.cat([part.exp() for part in x.split(1)]),
    "a result inside a list": lambda x: torch.stack(torch.meshgrid(x, x, indexing="ij")),
    "a write": lambda x: torch.zeros_like(x).add_(x).mul_(2),
    "a write to a part": lambda x: torch.zeros(3, 3, dtype=x.dtype).index_fill_(0, x.argmax(), 1.0),
    "a gradient": lambda x: torch.autograd.grad(
        (y := x.clone().requires_grad_()).sin().sum(), y, create_graph=False
    )[0],
    "indexed by a mask of the code": lambda x: (x[:, None] * x)[
        torch.arange(3) < torch.arange(3).view(-1, 1)
    ].exp(),
    "indexed by a mask and a slice": lambda x: (x[:, None] * x)[:, torch.arange(3) != 1],
    "a gradient through a mask": lambda x: torch.autograd.grad(
        torch.zeros(3, 3, dtype=x.dtype)
        .index_put((torch.eye(3) > 0,), y := x.clone().requires_grad_())
        .exp()
        .sum(),
        y,
    )[0],
    "mapped": lambda x: torch.func.vmap(torch.func.grad(lambda v: v.sin()))(x),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_graph_computes_its_function(kind: str) -> None:
    function, x = FUNCTIONS[kind], torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    graph, constants = trace(lambda x: [function(x)], [x])
    run = GraphModule(torch.nn.Module(), graph)
    for value in (x, x.flip(0) - 0.4):
        assert torch.equal(run(*constants, value)[0], function(value))
        layout = next(reversed(graph.nodes)).args[0][0].meta["layout"]
        assert layout.shape == function(value).shape


def read_written_view(x: Tensor) -> Tensor:
    number = torch.tensor(1.0, dtype=x.dtype)
    number.view(1)[0] = x[0]
    return x * number.item()


READ: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "a number of the code": (lambda x: x * torch.tensor(2.0).item(), True),
    "computed from numbers of the code": (lambda x: x * float(torch.tensor(2.0).exp() + 1), True),
    "computed from a stored value": (lambda x: x * BUFFER.sum().item(), True),
    "an entry that is stored": (lambda x: x * BUFFER[:1].detach().view(()).item(), True),
    "computed from both": (lambda x: x * (BUFFER.sum() + x.sum()).item(), False),
    "a parameter": (lambda x: x * nn.Parameter(BUFFER).exp().sum().item(), False),
    "computed": (lambda x: x * x.sum().item(), False),
    "drawn": (lambda x: x * torch.rand(()).item(), False),
    "written to": (read_written_view, False),
    "a factory": (lambda x: x * torch.ones(3).sum().item(), True),
    "a shape": (lambda x: x[x > 0], False),
    "a shape, by a stored mask": (lambda x: x[:2][BUFFER > 1], False),
}


@pytest.mark.parametrize("kind", READ)
def test_values_that_differ_in_other_steps_are_not_read(kind: str) -> None:
    function, allowed = READ[kind]
    x = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    if allowed:
        graph, constants = trace(lambda x: [function(x)], [x])
        assert torch.equal(GraphModule(torch.nn.Module(), graph)(*constants, x)[0], function(x))
        return
    with pytest.raises(NotRecordable, match=r"reads a tensor's value|depends on values"):
        trace(lambda x: [function(x)], [x])


@pytest.mark.parametrize(
    "read", [Tensor.item, lambda t: t.view(1)[0].item(), lambda t: float(2 * next(iter(t.view(1))))]
)
def test_a_stored_number_that_is_read_becomes_a_guard(read: Callable[[Tensor], float]) -> None:
    stored, x = torch.tensor(2.0), torch.ones(3)
    with recorded_guards() as guards:
        graph, constants = trace(lambda x: [x * read(stored), *guards], [x])
    run = GraphModule(torch.nn.Module(), graph)
    assert bool(run(*constants, x)[1])
    stored.fill_(3.0)
    assert not bool(run(*constants, x)[1])


def test_what_runs_unrecorded_is_a_constant() -> None:
    seen = []

    def function(x: Tensor) -> list[Tensor]:
        with unrecorded():
            y = x.exp()
        seen.append((is_recorded(x), is_recorded(y), is_recorded(y + 1)))
        return [y * x]

    x = torch.ones(3)
    graph, constants = trace(function, [x])
    assert seen == [(True, False, True)]
    assert len(constants) == 1
    assert torch.equal(constants[0], x.exp())
    assert not is_recorded(x)
    assert sum(node.op == "call_function" for node in graph.nodes) == 2
