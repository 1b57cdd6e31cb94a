"""What repeats in a recorded graph is compiled once, and computes what the recording does."""

import contextlib
import runpy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor, nn
from torch.fx import GraphModule

from pyro_mcvae import (
    CompiledELBO,
    TraceSIS_ELBO,
)
from pyro_mcvae.compiled import backends, inductor
from pyro_mcvae.compiled.backends import same_bits
from pyro_mcvae.compiled.graph import as_function, quick
from pyro_mcvae.compiled.repeats import Outline, outline
from pyro_mcvae.compiled.tracer import trace
from pyro_mcvae.ops.tensors import Generators
from tests.compiled.programs import reasons

Function = Callable[..., list[Tensor]]


def recorded(function: Function, *inputs: Tensor) -> tuple[GraphModule, list[Tensor]]:
    graph, constants, _ = as_function(*trace(function, list(inputs)))
    return graph, [*(c.detach() for c in constants), *inputs]


def outlined(graph: GraphModule, example: list[Tensor]) -> Outline:
    with torch.no_grad():
        found = outline(graph, example)
    assert found is not None
    assert_same(found, graph, example)
    return found


def as_it_is(body: GraphModule, _: list[Tensor]) -> Callable[[], Function]:
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


@pytest.mark.slow
def test_a_chain_of_any_length_is_compiled_in_the_same_time() -> None:
    assert max(sizes_of((6, 16))) < 250


@pytest.mark.parametrize("option", ["dropout", "odd", "constant", "shape"])
def test_copies_that_are_none(option: str) -> None:
    """Draws that depend on others, an operation, a number, or a shape, in one transition."""
    sizes_of((10,), **{option: True})


def test_what_does_not_repeat_is_left_alone() -> None:
    graph, example = recorded(Chain(2), torch.randn(3, 4))
    assert outline(graph, example) is None


# Training steps -----------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are replayed, where they would be compiled."""

    def replayed(graph: GraphModule, _: list[Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
        run = quick(graph)
        return lambda inputs: list(run(*inputs))

    monkeypatch.setattr(backends, "PUBLIC_ONLY", False)
    monkeypatch.setattr(inductor, "_inductor", replayed)
    monkeypatch.setattr(inductor, "in_one_file", contextlib.nullcontext)


@pytest.mark.slow
def test_training_and_evaluation_of_masked_minibatches(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    data, mask = torch.randn(12), torch.arange(12) % 3 > 0

    def model() -> None:
        with pyro.plate("data", 12, subsample_size=4) as index:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            with pyro.poutine.mask(mask=mask[index]):
                pyro.sample("x", dist.Normal(z, 1.0), obs=data[index])

    def guide() -> None:
        slope = pyro.param("slope", torch.tensor(0.1))
        with pyro.plate("data", 12, subsample_size=4) as index:
            pyro.sample("z", dist.Normal(slope * data[index], 0.7))

    runs = []
    for wrap in (lambda loss: loss, CompiledELBO):
        pyro.clear_param_store()
        loss = wrap(TraceSIS_ELBO(5, max_plate_nesting=1))
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss)
        torch.manual_seed(1)
        losses = [svi.step() for _ in range(7)] + [svi.evaluate_loss() for _ in range(6)]
        runs.append([*losses, pyro.param("slope").item(), *loss.last_step.log_weight.tolist()])
    assert not reasons(loss)
    assert runs[0] == runs[1]
    assert caplog.text.count("without those that repeat") == 2
    assert "cannot compile" not in caplog.text


def test_an_input_of_another_layout_is_refused(no_compiler: None) -> None:
    graph, example = recorded(Chain(6), torch.randn(3, 4))
    run = backends.Backend("inductor", {}).compile(graph, example)
    with pytest.raises(RuntimeError, match="an input has another layout"):
        run(*(t.t() if t.dim() == 2 else t for t in example))


def test_small_memory_of_bodies_is_kept_between_steps(tmp_path: Path) -> None:
    (tmp_path / "generated.py").write_text("""
import torch
empty_strided_cpu, reinterpret_tensor = torch.empty_strided, torch.as_strided

def call(self, args):
    x, = args
    args.clear()
    buf0 = empty_strided_cpu((3, 1), (1, 1), dtype=torch.float32)
    buf1 = reinterpret_tensor(buf0, (3,), (1,)); del buf0  # reuse
    buf2 = empty_strided_cpu((9000,), (1,), dtype=torch.float32)
    buf3 = reinterpret_tensor(buf2, (3,), (1,), 0)
    torch.add(x, 1, out=buf1)
    buf4 = torch.exp(x)
    del x
    return (buf1, buf2, buf3, buf4)
""")
    call = types.MethodType(runpy.run_path(str(tmp_path / "generated.py"))["call"], object())
    run = inductor._with_memory(call)
    results = [run(torch.full((3,), float(i))) for i in range(3)]
    assert results[0][0] is results[1][0] is results[2][0]
    assert results[2][0].tolist() == [3.0, 3.0, 3.0]
    for i, (_, large, view, exp) in enumerate(results):
        assert large.data_ptr() == view.data_ptr()
        torch.testing.assert_close(exp, torch.full((3,), float(i)).exp())
    assert len({large.data_ptr() for _, large, *_ in results}) == 3


@pytest.mark.slow
def test_compiled_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many kernels for any length; what a step returned stays as it is in the next one."""
    counts, compile = [], inductor._inductor
    monkeypatch.setattr(backends, "PUBLIC_ONLY", False)
    for count in (6, 16):
        graph, example = recorded(Chain(count), torch.randn(3, 4))
        kernels: list[int] = []

        def counted(*args: Any, kernels: list[int] = kernels) -> Any:
            kernels.append(1)
            return compile(*args)

        monkeypatch.setattr(inductor, "_inductor", counted)
        run = backends.Backend("inductor", {}).compile(graph, example)
        counts.append(len(kernels))
        first = run(*example)
        before = [t.clone() for t in first]
        run(*(2 * t for t in example))
        assert all(same_bits(a, b) for a, b in zip(first, before, strict=True))
    assert counts[0] == counts[1]
