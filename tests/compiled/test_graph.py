"""Recorded graphs as functions: what is merged, what is returned, where constants stand."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_mcvae import CompiledELBO, TraceSGVB_ELBO
from pyro_mcvae.compiled.graph import as_function
from pyro_mcvae.compiled.recording import record
from pyro_mcvae.compiled.signature import Call
from tests.compiled.programs import uses

x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def count(function: Callable[[Tensor], Tensor], name: str) -> int:
    """How often an operation is computed; the function's values stay."""
    graph, constants, _ = as_function(make_fx(lambda x: [function(x)])(x))
    torch.manual_seed(0)
    expected = function(x)
    torch.manual_seed(0)
    assert torch.equal(graph(*constants, x)[0], expected)
    return sum(name in str(node.target) for node in graph.graph.nodes)


def written(x: Tensor) -> Tensor:
    a, b = torch.zeros(3), torch.zeros(3)
    a.add_(x)
    return a + 2 * b


def read_before_and_after(x: Tensor) -> Tensor:
    a = x * 2.0
    before = a.exp()
    a.mul_(3.0)
    return before + a.exp()


MERGED: dict[str, tuple[Callable[[Tensor], Tensor], str, int]] = {
    "equal": (lambda x: x.exp() + x.exp() * 2, "exp", 1),
    "chains of equal ones": (lambda x: (x + 1).exp() * (x + 1).exp().log(), "exp", 1),
    "other arguments": (lambda x: x.pow(2) + x.pow(3), "pow", 2),
    "kinds of numbers": (lambda x: (x.sign() * 1).exp() + (x.sign() * 1.0).exp(), "mul", 2),
    "draws": (lambda x: torch.randn_like(x) - torch.randn_like(x), "randn", 2),
    "what is written": (written, "zeros", 2),
    "what is written between": (read_before_and_after, "exp", 2),
}


@pytest.mark.parametrize("kind", MERGED)
def test_equal_operations_are_computed_once(kind: str) -> None:
    function, name, expected = MERGED[kind]
    assert count(function, name) == expected


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


def programs_without_arguments() -> tuple[Callable[[], None], AutoNormal]:
    def model() -> None:
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    return model, AutoNormal(model)


def test_an_autoguide_makes_its_plates_at_each_step_and_is_recorded() -> None:
    found = []
    for compiled in (False, True):
        pyro.clear_param_store()
        model, guide = programs_without_arguments()
        plain = TraceSGVB_ELBO()
        loss = CompiledELBO(plain, "eager") if compiled else plain
        torch.manual_seed(0)
        found.append([loss.loss_and_grads(model, guide) for _ in range(7)])
    assert found[0] == found[1]
    assert uses(loss) == 4


def test_constants_stand_before_everything_else() -> None:
    model, guide = programs_without_arguments()
    loss = TraceSGVB_ELBO()
    for _ in range(3):
        loss.loss_and_grads(model, guide)
    recording, _ = record(loss, Call.of("loss_and_grads", model, guide, (), {}))
    nodes = list(recording.graph.graph.nodes)
    recording.graph.graph.lint()
    assert len(nodes) == len(recording.graph.graph.nodes)
    inputs = [node.op == "placeholder" for node in nodes]
    assert inputs == sorted(inputs, reverse=True)
    assert sum(inputs) == len(recording.constants)
