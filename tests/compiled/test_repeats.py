"""What repeats in a recorded graph is compiled once, and computes what the recording does."""

from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor, nn
from torch.fx import GraphModule

from pyro_mcvae import (
    HMC,
    ULA,
    CompiledELBO,
    TraceAIS_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from pyro_mcvae.compiled.backends import quick, same_bits
from pyro_mcvae.compiled.graph import as_function
from pyro_mcvae.compiled.guards import trace
from pyro_mcvae.compiled.repeats import Outline, outline
from pyro_mcvae.ops.tensors import Generators
from tests.compiled.programs import Net, batches, make

Function = Callable[..., list[Tensor]]


def recorded(function: Function, *inputs: Tensor) -> tuple[GraphModule, list[Tensor]]:
    graph, constants, _ = as_function(trace(function, list(inputs)))
    return graph, [*(c.detach() for c in constants), *inputs]


def outlined(graph: GraphModule, example: list[Tensor]) -> Outline:
    with torch.no_grad():
        found = outline(graph, example)
    assert found is not None
    assert_same(found, graph, example)
    return found


def as_it_is(body: GraphModule, _: list[Tensor], __: bool) -> Callable[[], Function]:
    def run(*inputs: Tensor) -> list[Tensor]:
        result: list[Tensor] = body(*inputs)
        return result

    return lambda: run


def assert_same(found: Outline, graph: GraphModule, example: list[Tensor]) -> None:
    """Check that the bodies compute the recording, bit for bit, and draw its random numbers."""
    driver = quick(found.driver(as_it_is))
    with torch.no_grad():
        for _ in range(2):
            before = Generators()
            expected = graph(*example)
            after = torch.get_rng_state()
            before.put_back()
            actual = driver(*example)
            assert torch.equal(torch.get_rng_state(), after)
            assert len(actual) == len(expected)
            assert all(same_bits(a, b) for a, b in zip(actual, expected, strict=True))


# Chains and loops of operations -------------------------------------------------------------------


class Chain:
    """K transitions with a step size each, by their gradients, and the gradient of all of it."""

    def __init__(self, num_steps: int, **options: bool) -> None:
        self.steps = nn.Parameter(torch.rand(num_steps).mul(0.1))
        self.scales = nn.Parameter(torch.rand(num_steps, 4))
        self.matrix, self.options = nn.Parameter(torch.randn(4, 4)), options

    def __call__(self, x: Tensor) -> list[Tensor]:
        total, z = torch.zeros(()), x
        for k in range(len(self.steps)):
            z, work = self.transition(k, z)
            total = total + work
        params = [self.steps, self.scales, self.matrix]
        gradients = torch.autograd.grad(total + z.square().sum(), params)
        return [total.detach(), z.detach(), *gradients]

    def transition(self, k: int, z: Tensor) -> tuple[Tensor, Tensor]:
        v = torch.randn_like(z) * self.scales[k].exp()
        if self.options.get("dropout"):
            v = torch.nn.functional.dropout(v, 0.3)
        if self.options.get("odd") and k == 4:
            v = v.sin()
        if self.options.get("constant"):
            v = v + 0.1 * (k == 5)
        for _ in range(2):
            force = torch.tanh(z @ self.matrix).cos() - z
            v = v + self.steps[k] * force.clamp(-10, 10)
            z = z + self.steps[k] * v
        if self.options.get("shape") and k == 3:
            z = torch.cat([z, z[:1]])
        return z, (v.square().sum(-1) * (-0.5)).logsumexp(0)


def sizes_of(counts: tuple[int, ...], **options: bool) -> list[int]:
    x = torch.randn(3, 4)
    return [outlined(*recorded(Chain(k, **options), x)).size for k in counts]


def test_a_chain_of_any_length_is_compiled_in_the_same_time() -> None:
    assert max(sizes_of((6, 16))) < 200


@pytest.mark.parametrize("option", ["dropout", "odd", "constant", "shape"])
def test_copies_that_are_none(option: str) -> None:
    """Draws that depend on others, an operation, a number, or a shape, in one transition."""
    sizes_of((10,), **{option: True})


def test_what_does_not_repeat_is_left_alone() -> None:
    graph, example = recorded(Chain(2), torch.randn(3, 4))
    assert outline(graph, example) is None


# Training steps -----------------------------------------------------------------------------------


def step_of(loss: Any, net: Net, *args: Any) -> tuple[GraphModule, list[Tensor]]:
    """The graph of a training step, and its inputs."""
    compiled = CompiledELBO(loss, "eager")
    svi = SVI(net.model, net.guide, pyro.optim.Adam({"lr": 0.01}), compiled)
    for batch in batches(3):
        svi.step(batch, *args)
    (case,) = compiled._specializations.values()
    (recording,) = case._recordings
    return recording.graph, [
        t.detach() for t in (*recording.constants, batch, *map(torch.tensor, args))
    ]


CHAINS: dict[str, Callable[[int], Any]] = {
    "SIS": lambda k: TraceSIS_ELBO(k, max_plate_nesting=1),
    "SIS, ULA": lambda k: TraceSIS_ELBO(k, ULA(), max_plate_nesting=1),
    "AIS": lambda k: TraceAIS_ELBO(k, max_plate_nesting=1),
    "AIS, HMC": lambda k: TraceAIS_ELBO(k, HMC(num_leapfrog=2), max_plate_nesting=1),
    "a full mass": lambda k: TraceSIS_ELBO(
        kernel=UnderdampedLangevin.trained(k, full_mass=True), num_steps=k, max_plate_nesting=1
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n != "SIS" else []) for n in CHAINS]
)
def test_steps_of_chains(name: str) -> None:
    """A transition more costs less than a hundredth of what a transition has."""
    short, long = (outlined(*step_of(CHAINS[name](k), make(), 0.5)) for k in (6, 8))
    assert long.size - short.size < 10
