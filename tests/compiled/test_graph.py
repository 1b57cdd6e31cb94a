"""Recorded graphs as functions: what is merged, what is returned, where constants stand."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_mcvae import CompiledELBO, TraceSGVB_ELBO
from pyro_mcvae.compiled.graph import as_function, owns_outputs
from pyro_mcvae.compiled.tracer import trace
from tests.compiled.programs import uses

x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def written(x: Tensor) -> Tensor:
    a, b = torch.zeros(3), torch.zeros(3)
    a.add_(x)
    return a + 2 * b


def read_before_and_after(x: Tensor) -> Tensor:
    a = x * 2.0
    before = a.exp()
    a.mul_(3.0)
    return before + a.exp()


def copy_that_is_written(x: Tensor) -> Tensor:
    a = x * 2.0
    b = a.clone()
    b.add_(1)
    return a * b


def copy_before_it_is_written(x: Tensor) -> Tensor:
    a = x * 2.0
    b = a.clone()
    a.add_(1)
    return a * b


# What is computed twice and may be computed once, and what must not be.
SIMPLIFIED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "chains of equal ones": (lambda x: (x + 1).exp() * (x + 1).exp().log(), True),
    "other arguments": (lambda x: x.pow(2) + x.pow(3), False),
    "kinds of numbers": (lambda x: (x.sign() * 1).exp() + (x.sign() * 1.0).exp(), False),
    "a copy": (lambda x: (x + 1).clone().exp(), True),
    "a copy that is written": (copy_that_is_written, False),
    "a copy of what is written then": (copy_before_it_is_written, False),
    "a copy in another layout": (
        lambda x: (x + x[:, None]).t().clone(memory_format=torch.contiguous_format),
        False,
    ),
    "a first power": (lambda x: (x + 1).pow(1.0).exp(), True),
    "of whole numbers": (lambda x: (x > 0).long().pow(1.0).exp(), False),
    "of what is one everywhere": (
        lambda x: torch.ones_like(x).exp() * x + torch.ones_like(x + 1).exp() + x.new_ones(3).exp(),
        True,
    ),
    "a standard normal density": (
        lambda x: dist.Normal(x.new_zeros(3), x.new_ones(3), validate_args=False).log_prob(x + 1),
        True,
    ),
    "numbers everywhere": (
        lambda x: ((x + 1) * x.new_full((3,), -0.5) / x.new_full((3,), 4.0) - x.new_zeros(3)).exp(),
        True,
    ),
    "numbers of another layout": (lambda x: (x + 1) * x.new_ones(3, 3), False),
    "numbers that are written": (lambda x: (x + 1) * x.new_ones(3).add_(x), False),
    "a division by a number that has no exact inverse": (
        lambda x: (x + 1) / x.new_full((3,), 3.0),
        False,
    ),
    "of ones of other types": (
        lambda x: (torch.ones_like(x).exp() + torch.ones_like(x.float()).exp()) * x,
        False,
    ),
    "draws": (lambda x: torch.randn_like(x) - torch.randn_like(x), False),
    "what is written": (written, False),
    "what is written between": (read_before_and_after, False),
}


@pytest.mark.parametrize("kind", SIMPLIFIED)
def test_a_graph_has_the_values_of_its_function_with_fewer_operations(kind: str) -> None:
    function, fewer = SIMPLIFIED[kind]
    recorded, constants = trace(lambda x: [function(x)], [x])
    before = sum(node.op == "call_function" for node in recorded.nodes)
    graph, constants, _ = as_function(recorded, constants)
    after = sum(node.op == "call_function" for node in graph.graph.nodes)
    for value in (x, x - 0.7):
        torch.manual_seed(0)
        expected = function(value)
        torch.manual_seed(0)
        assert torch.equal(graph(*constants, value)[0], expected)
    assert after < before or not fewer


OWNED: dict[str, tuple[Callable[[Tensor], list[Tensor]], bool]] = {
    "tensors of their own": (lambda x: [x.exp(), x + 1], True),
    "a view of one that is not returned": (lambda x: [x.exp().view(1, 3), x + 1], True),
    "an input": (lambda x: [x.exp(), x], False),
    "a view of an input": (lambda x: [x.exp(), x[1:]], False),
    "views of one": (lambda x: list((x + 1).split(1)), False),
    "one twice": (lambda x: [y := x + 1, y], False),
    "an input that is updated": (lambda x: [x.add_(1).exp()], False),
}


@pytest.mark.parametrize("kind", OWNED)
def test_who_owns_what_a_graph_returns(kind: str) -> None:
    function, expected = OWNED[kind]
    assert owns_outputs(trace(function, [x.clone()])[0]) is expected


def test_gradients_share_no_memory_with_each_other_or_with_data() -> None:
    def model() -> None:
        a, b = pyro.param("a", torch.zeros(3)), pyro.param("b", torch.zeros(3))
        c = pyro.param("c", torch.zeros(()))
        pyro.factor("f", (x * (a + b + c)).sum())

    def guide() -> None:
        pass

    loss = CompiledELBO(TraceSGVB_ELBO(), "eager")
    for _ in range(6):
        for value in pyro.get_param_store()._params.values():
            value.grad = None
        loss.loss_and_grads(model, guide)
    assert uses(loss) == 3
    values = [pyro.get_param_store()._params[name] for name in ("a", "b", "c")]
    before, grads = x.clone(), [value.grad for value in values]
    for grad, expected in zip(grads, (-x, -x, -x.sum()), strict=True):
        assert grad is not None
        torch.testing.assert_close(grad, expected)
        grad.mul_(2.0)
    torch.testing.assert_close(grads[1], -2 * before)
    assert torch.equal(x, before)
