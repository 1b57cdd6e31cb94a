"""Ways to run a recording: its parts, compilers, and none."""

import contextlib
import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch._inductor.config
from pyro.infer import SVI
from torch import Tensor, nn
from torch.fx import GraphModule

from pyro_mcvae import CompiledELBO, TraceSGVB_ELBO, TraceSIS_ELBO
from pyro_mcvae.compiled import backends
from pyro_mcvae.compiled.backends import check_kernels
from pyro_mcvae.compiled.graph import as_function
from pyro_mcvae.compiled.tracer import trace
from tests.compiled.programs import Net, batches, make, train


@pytest.mark.slow
def test_a_backend_that_fails_is_replaced_by_replay(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler here")

    result = []
    for loss in (TraceSGVB_ELBO(), CompiledELBO(TraceSGVB_ELBO(), backend=broken)):
        with caplog.at_level(logging.WARNING):
            result.append(train(make(), loss)[0])
    assert result[0] == result[1]
    lines = [r.getMessage() for r in caplog.records if "no compiler here" in r.getMessage()]
    assert len(lines) == 1  # of the steps; evaluations were too few to be compiled
    assert "replayed without a compiler from now on" in lines[0]


def test_kernels_that_draw_and_then_fail_leave_the_draws_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Tensor) -> list[Tensor]:
        torch.rand(())
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(backends, "compile_by_inductor", lambda *_: broken)
    compiled = CompiledELBO(TraceSGVB_ELBO())
    assert train(make(), compiled)[0] == train(make(), TraceSGVB_ELBO())[0]


def _noisy(x: Tensor) -> list[Tensor]:
    return [x.exp() + torch.randn_like(x), (x > 0).sum(), x > 0]


RUNS: dict[str, tuple[Callable[[list[Tensor], int], list[Tensor]], str]] = {
    "the same": (lambda found, call: found, ""),
    "rounded otherwise": (lambda found, call: [found[0] * (1 + 1e-6), *found[1:]], ""),
    "another decision, once": (lambda found, call: [found[0] + (call == 1), *found[1:]], ""),
    "wrong by a thousandth": (lambda found, call: [found[0] * 1.001, *found[1:]], "output 0 of 3"),
    "not a number": (lambda found, call: [found[0] * math.nan, *found[1:]], "output 0 of 3"),
    "infinite": (lambda found, call: [found[0] / 0, *found[1:]], "output 0 of 3"),
    "wrong by five percent": (lambda found, call: [found[0] * 1.05, *found[1:]], "output 0 of 3"),
    "miscounted": (lambda found, call: [found[0], found[1] + 1, found[2]], "output 1 of 3"),
    "decided otherwise": (lambda found, call: [*found[:2], ~found[2]], "output 2 of 3"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_compiled_kernels_are_compared_with_the_recording(kind: str) -> None:
    change, wrong = RUNS[kind]
    x, calls = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float32), itertools.count(1)
    graph, *_ = as_function(*trace(_noisy, [x]))
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=wrong) if wrong else contextlib.nullcontext():
        check_kernels(lambda x: change(graph(x), next(calls)), graph, [x])
    assert wrong or torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_are_as_exact_as_the_coarsest_type_of_the_recording(kind: torch.dtype) -> None:
    x = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float32)
    graph, *_ = as_function(*trace(lambda x: [x.to(kind).exp().float()], [x]))
    passes = contextlib.nullcontext() if kind == torch.bfloat16 else pytest.raises(RuntimeError)
    with passes:
        check_kernels(lambda x: [graph(x)[0] * 1.05], graph, [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_output_is_compared_on_the_scale_of_its_own_entries(dtype: torch.dtype) -> None:
    x = torch.tensor([0.3, -1.0, 2.0], dtype=dtype)
    # The logarithm of a negative number is NaN.
    graph, *_ = as_function(*trace(lambda x: [x * 1e5, x * 1e-9, x.log()], [x]))
    check_kernels(graph, graph, [x])
    for output in range(3):

        def run(x: Tensor, output: int = output) -> list[Tensor]:
            result = list(graph(x))
            result[output] = result[output] + result[output].nansum() * 1e-3
            return result

        with pytest.raises(RuntimeError, match=f"output {output} of 3"):
            check_kernels(run, graph, [x])


def test_a_sum_in_another_order_is_no_error() -> None:
    x = torch.rand(1_000_000)
    graph, *_ = as_function(*trace(lambda x: [x.sum()], [x]))
    one_by_one = torch.tensor(np.add.accumulate(x.numpy())[-1])
    error = float((one_by_one / graph(x)[0] - 1).abs()) / torch.finfo().eps
    assert 32 < error < 1_000
    check_kernels(lambda x: [one_by_one], graph, [x])
    with pytest.raises(RuntimeError, match="output 0 of 1"):
        check_kernels(lambda x: [graph(x)[0] * 1.0003], graph, [x])


def test_other_choices_between_near_ties_are_no_error() -> None:
    slope = nn.Parameter(torch.tensor(1.0))
    near = 1 + torch.randint(0, 9, (1_000,)) * torch.finfo().eps
    x = torch.stack([near, torch.ones(1_000)])
    graph, constants, _ = as_function(
        *trace(lambda x: [torch.stack([x[0], x[1] * slope]).argmax(0)], [x])
    )
    graph = GraphModule(nn.Module(), graph.graph)
    best = graph(*constants, x)[0]
    flipped = best.where(torch.arange(1_000) >= 100, 1 - best)
    check_kernels(lambda *_: [flipped], graph, [*constants, x])
    far = torch.stack([torch.full((1_000,), 1.1), torch.ones(1_000)])
    best = graph(*constants, far)[0]
    flipped = best.where(torch.arange(1_000) >= 1, 1 - best)
    with pytest.raises(RuntimeError, match="output 0 of 1"):
        check_kernels(lambda *_: [flipped], graph, [*constants, far])


def test_rounding_that_a_long_chain_or_a_cancelled_sum_magnifies_is_no_error() -> None:
    slope = nn.Parameter(torch.tensor(0.7))
    x = torch.randn(10_000).requires_grad_(False)

    def function(x: Tensor) -> list[Tensor]:
        chaotic = x[:5].sigmoid()
        for _ in range(12):
            chaotic = (3.2 + slope) * chaotic * (1 - chaotic)
        terms = x * slope
        return [chaotic, torch.cat([terms, -terms.flip(0)]).sum()]

    graph, constants, _ = as_function(*trace(function, [x]))
    graph = GraphModule(nn.Module(), graph.graph)
    order = torch.randperm(len(x))

    def reordered(slope: Tensor, x: Tensor) -> list[Tensor]:
        return [graph(slope * (1 + 1e-16), x)[0], graph(slope, x[order])[1]]

    check_kernels(reordered, graph, [*constants, x])


def test_the_rounding_of_large_terms_that_cancel_is_no_error() -> None:
    # A ratio of two densities near 1, such as an acceptance rate, from log densities near 1000.
    x = 3 * torch.randn(200, dtype=torch.float32)
    shift = nn.Parameter(torch.tensor(1e-3, dtype=torch.float32))

    def function(x: Tensor) -> list[Tensor]:
        return [((x + shift).square().sum() - x.square().sum()).exp()]

    graph, constants, _ = as_function(*trace(function, [x]))
    graph = GraphModule(nn.Module(), graph.graph)
    expected = graph(*constants, x)[0]
    rounding = x.square().sum() * torch.finfo(x.dtype).eps
    assert rounding > 5 * 32 * torch.finfo(x.dtype).eps
    check_kernels(lambda *_: [expected * (1 + rounding)], graph, [*constants, x])
    with pytest.raises(RuntimeError, match="output 0 of 1"):
        check_kernels(lambda *_: [expected * (1 + 30 * rounding)], graph, [*constants, x])


@pytest.mark.slow
def test_kernels_are_compared_at_later_uses_too(caplog: pytest.LogCaptureFixture) -> None:
    """From their ninth call on these are wrong, which the next comparison finds."""

    def backend(graph: GraphModule, _: list[Tensor]) -> Callable[..., object]:
        calls = itertools.count()
        return lambda *inputs: [
            t * (1 + 1e-3 * (next(calls) > 200)) if t.is_floating_point() else t
            for t in graph(*inputs)
        ]

    losses, _ = train(make(), TraceSGVB_ELBO(), 40)
    result, _ = train(make(), CompiledELBO(TraceSGVB_ELBO(), backend=backend), 40)
    assert "without a compiler from now on: its kernels compute other numbers" in caplog.text
    assert result != pytest.approx(losses, rel=1e-8)


@pytest.mark.slow
def test_a_backend_of_torch_compile() -> None:
    losses, _ = train(make(), TraceSGVB_ELBO())
    result, _ = train(make(), CompiledELBO(TraceSGVB_ELBO(), backend="aot_eager"))
    assert result == pytest.approx(losses, rel=1e-10)


# Inductor's own imports and code warn; errors of theirs would be taken for a compiler that fails.
_OF_INDUCTOR = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.slow
@_OF_INDUCTOR
def test_inductor_draws_the_numbers_of_the_plain_loss(caplog: pytest.LogCaptureFixture) -> None:
    losses, _ = train(make(), TraceSIS_ELBO(2, max_plate_nesting=1))
    result, _ = train(make(), CompiledELBO(TraceSIS_ELBO(2, max_plate_nesting=1)))
    assert result == pytest.approx(losses, rel=1e-8)
    assert "compiled in" in caplog.text
    assert "cannot compile" not in caplog.text


OPTIONS = [{}, {"mode": "reduce-overhead"}, {"backend": "eager"}]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_on_a_gpu(options: dict[str, str]) -> None:
    net: Net = make().to("cuda", torch.float32)
    plain = TraceSIS_ELBO(2, max_plate_nesting=1).to("cuda")
    loss = CompiledELBO(plain, **options)  # type: ignore[arg-type]
    svi = SVI(net.model, net.guide, pyro.optim.Adam({"lr": 0.01}), loss)
    losses = [svi.step(x.to("cuda", torch.float32)) for x in batches(60)]
    assert all(map(math.isfinite, losses))
    assert sum(losses[-20:]) < sum(losses[:20])


def _same_memory(graph: GraphModule, example: list[Tensor]) -> Callable[..., list[Tensor]]:
    """Writes the results of each call to the memory of the first, as CUDA graphs do."""
    kept: list[Tensor] = []

    def run(*inputs: Tensor) -> list[Tensor]:
        results = graph(*inputs)
        kept.extend(r.clone() for r in results[len(kept) :])
        for memory, result in zip(kept, results, strict=True):
            memory.copy_(result)
        return kept

    return run


@pytest.mark.parametrize("backend", ["eager", _same_memory], ids=["eager", "same memory"])
def test_gradients_add_up_and_weights_stay(backend: Any) -> None:
    def model() -> None:
        pyro.sample(
            "x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0), obs=torch.ones(())
        )

    def guide() -> None:
        pyro.sample("z", dist.Normal(pyro.param("loc", torch.zeros(())), 1.0))

    total, weights = {}, {}
    for loss in (TraceSIS_ELBO(2), CompiledELBO(TraceSIS_ELBO(2), backend=backend)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        weights[loss] = []
        for _ in range(7):
            loss.loss_and_grads(model, guide)
            weights[loss].append(loss.last_step.log_weight)
        total[loss] = pyro.param("loc").unconstrained().grad
    (plain, compiled), (expected, actual) = total.values(), weights.values()
    torch.testing.assert_close(compiled, plain)
    torch.testing.assert_close(torch.stack(actual), torch.stack(expected))
