"""Ways to run a recording: its parts, compilers, and none."""

import contextlib
import itertools
import logging
import math
from collections.abc import Callable

import pyro
import pytest
import torch
import torch._inductor.config
from pyro.infer import SVI
from torch import Tensor, nn
from torch._inductor import codecache
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_mcvae import ULA, CompiledELBO, TraceSGVB_ELBO, TraceSIS_ELBO
from pyro_mcvae.chains.kernel import Kernel
from pyro_mcvae.compiled import kernels, repeats
from pyro_mcvae.compiled.agreement import check_kernels
from pyro_mcvae.compiled.graph import as_function
from pyro_mcvae.compiled.recording import record
from pyro_mcvae.compiled.repeats import compile_parts, cuts
from pyro_mcvae.compiled.signature import Call
from pyro_mcvae.compiled.tracing import trace
from pyro_mcvae.programs.executed_code import ExecutedCode
from tests.compiled.programs import Net, batches, make, train


def recorded(
    num_steps: int, kernel: Kernel | None = None
) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    net, loss = make(), TraceSIS_ELBO(num_steps, kernel, max_plate_nesting=1)
    x = batches(1)[0]
    for _ in range(3):
        with ExecutedCode() as executed:
            loss.loss_and_grads(net.model, net.guide, x)
    call = Call.of("loss_and_grads", net.model, net.guide, (x,), {})
    recording, _ = record(loss, call, executed)
    return recording.graph, [*recording.constants, x]


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(ULA(), id="ula"), pytest.param(None, id="trained", marks=pytest.mark.slow)],
)
def test_parts_compute_what_the_graph_computes_and_equal_ones_are_compiled_once(
    kernel: Kernel | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "_LARGE", dict.fromkeys(repeats._LARGE, 0))
    counts = []
    for num_steps in (6, 9):
        graph, inputs = recorded(num_steps, kernel)
        torch.manual_seed(0)
        expected = graph(*inputs)
        compiled = []

        def compiler(
            part: torch.fx.GraphModule, _: list[Tensor], compiled: list[object] = compiled
        ) -> torch.fx.GraphModule:
            compiled.append(part)
            return part

        run = compile_parts(graph, inputs, compiler)
        torch.manual_seed(0)
        assert all(torch.equal(a, b) for a, b in zip(run(*inputs), expected, strict=True))
        counts.append((len(list(run.children())), len(compiled)))
    # One part more of each transition, and one of its backward pass, which are compiled once.
    (parts, few), (more, many) = counts
    assert more == parts + 2 * 3
    assert few == many


def test_parts_of_one_output_hand_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though Inductor makes a list of it, in the part itself."""
    monkeypatch.setattr(repeats, "_LARGE", dict.fromkeys(repeats._LARGE, 0))

    def function(x: Tensor) -> tuple[Tensor]:
        for _ in range(4):
            for j in range(40):
                x = x.sin() + j
        return (x,)

    def compiler(part: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        (output,) = (n for n in part.graph.nodes if n.op == "output")
        if not isinstance(output.args[0], tuple | list):
            output.args = ((output.args[0],),)
            part.recompile()
        return part

    x = torch.randn(3)
    graph = make_fx(function)(x)
    assert torch.equal(compile_parts(graph, [x], compiler)(x)[0], function(x)[0])


def test_parts_that_hand_on_less_are_compiled_once_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeats, "_LARGE", dict.fromkeys(repeats._LARGE, 0))

    def function(x: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for _ in range(4):
            for j in range(40):
                x = x.sin() + j
                if j in (10, 20):
                    kept.append(x)
        return x, kept[2], kept[5]  # of the second and the third part, at other places

    compiled = []

    def compiler(part: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        compiled.append(part)
        return part

    x = torch.randn(3)
    found = compile_parts(make_fx(function)(x), [x], compiler)(x)
    assert all(torch.equal(a, b) for a, b in zip(found, function(x), strict=True))
    assert len(compiled) == 1


def test_cuts_find_every_repetition() -> None:
    a, b = [f"a{i}" for i in range(35)], [f"b{i}" for i in range(50)]
    labels = ["x", *a, *a, *a, "y", *b, *b, "z"]
    assert sorted(cuts(labels)) == [1, 36, 71, 106, 107, 157, 207]
    assert cuts(a + b) == set()


def test_a_backend_that_fails_is_replaced_by_replay(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler here")

    found = []
    for loss in (TraceSGVB_ELBO(), CompiledELBO(TraceSGVB_ELBO(), backend=broken)):
        with caplog.at_level(logging.WARNING):
            found.append(train(make(), loss)[0])
    assert found[0] == found[1]
    lines = [r.getMessage() for r in caplog.records if "no compiler here" in r.getMessage()]
    assert len(lines) == 1  # of the steps; evaluations were too few to be compiled
    assert "replayed without a compiler from now on" in lines[0]


def test_what_would_be_compiled_for_minutes_is_left_to_replays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of equal parts one counts."""
    monkeypatch.setattr(repeats, "_LARGE", dict.fromkeys(repeats._LARGE, 0))
    x = torch.randn(3)

    def alike(x: Tensor) -> tuple[Tensor]:
        for _ in range(4):
            for j in range(40):
                x = x.sin() + j
        return (x,)

    def different(x: Tensor) -> tuple[Tensor]:
        for j in range(160):
            x = x.sin() + j
        return (x,)

    monkeypatch.setattr(repeats, "_MOST", 150)
    for function in (alike, different):
        wrong = function is different
        refused = pytest.raises(RuntimeError, match=r"its 32[0-9] different operations would take")
        with refused if wrong else contextlib.nullcontext():
            compile_parts(make_fx(function)(x), [x], lambda part, _: part)


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
    graph = trace(_noisy, [x])
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=wrong) if wrong else contextlib.nullcontext():
        check_kernels(lambda x: change(graph(x), next(calls)), graph, [x])
    assert wrong or torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_are_as_exact_as_the_coarsest_type_of_the_recording(kind: torch.dtype) -> None:
    x = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float32)
    graph = trace(lambda x: [x.to(kind).exp().float()], [x])
    passes = contextlib.nullcontext() if kind == torch.bfloat16 else pytest.raises(RuntimeError)
    with passes:
        check_kernels(lambda x: [graph(x)[0] * 1.05], graph, [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_output_is_compared_on_the_scale_of_its_own_entries(dtype: torch.dtype) -> None:
    x = torch.tensor([0.3, -1.0, 2.0], dtype=dtype)
    graph = trace(lambda x: [x * 1e5, x * 1e-9, x.log()], [x])  # log of a negative number is NaN
    check_kernels(graph, graph, [x])
    for output in range(3):

        def run(x: Tensor, output: int = output) -> list[Tensor]:
            found: list[Tensor] = graph(x)
            found[output] = found[output] + found[output].nansum() * 1e-3
            return found

        with pytest.raises(RuntimeError, match=f"output {output} of 3"):
            check_kernels(run, graph, [x])


def test_rounding_that_a_long_chain_or_a_cancelled_sum_magnifies_is_no_error() -> None:
    slope = nn.Parameter(torch.tensor(0.7))
    x = torch.randn(10_000).requires_grad_(False)

    def function(x: Tensor) -> list[Tensor]:
        chaotic = x[:5].sigmoid()
        for _ in range(12):
            chaotic = (3.2 + slope) * chaotic * (1 - chaotic)
        terms = x * slope
        return [chaotic, torch.cat([terms, -terms.flip(0)]).sum()]

    graph, constants, _ = as_function(trace(function, [x]))
    graph = GraphModule(nn.Module(), graph.graph)
    order = torch.randperm(len(x))

    def reordered(slope: Tensor, x: Tensor) -> list[Tensor]:
        return [graph(slope * (1 + 1e-16), x)[0], graph(slope, x[order])[1]]

    check_kernels(reordered, graph, [*constants, x])


def test_kernels_are_compared_at_later_uses_too(caplog: pytest.LogCaptureFixture) -> None:
    """From their ninth call on these are wrong, which the next comparison finds."""

    def backend(graph: GraphModule, _: list[Tensor]) -> Callable[..., object]:
        calls = itertools.count()
        return lambda *inputs: [
            t * (1 + 1e-3 * (next(calls) > 200)) if t.is_floating_point() else t
            for t in graph(*inputs)
        ]

    losses, _ = train(make(), TraceSGVB_ELBO(), 40)
    found, _ = train(make(), CompiledELBO(TraceSGVB_ELBO(), backend=backend), 40)
    assert "without a compiler from now on: its kernels compute other numbers" in caplog.text
    assert found != pytest.approx(losses, rel=1e-8)


def test_a_backend_of_torch_compile() -> None:
    losses, _ = train(make(), TraceSGVB_ELBO())
    found, _ = train(make(), CompiledELBO(TraceSGVB_ELBO(), backend="aot_eager"))
    assert found == pytest.approx(losses, rel=1e-10)


# Inductor's own imports and code warn; errors of theirs would be taken for a compiler that fails.
_OF_INDUCTOR = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.slow
@_OF_INDUCTOR
def test_inductor_draws_the_numbers_of_the_plain_loss(caplog: pytest.LogCaptureFixture) -> None:
    losses, _ = train(make(), TraceSIS_ELBO(2, max_plate_nesting=1))
    found, _ = train(make(), CompiledELBO(TraceSIS_ELBO(2, max_plate_nesting=1)))
    assert found == pytest.approx(losses, rel=1e-8)
    assert "compiled in" in caplog.text
    assert "cannot compile" not in caplog.text


@pytest.mark.slow
@_OF_INDUCTOR
@pytest.mark.parametrize("works", [True, False], ids=["in one file", "one by one"])
def test_kernels_of_several_graphs_are_compiled_together(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not works:
        monkeypatch.setattr(kernels, "_file", lambda *_: "no C++ at all")
    alone = []
    load = codecache.CppPythonBindingsCodeCache.load_pybinding
    monkeypatch.setattr(
        codecache.CppPythonBindingsCodeCache,
        "load_pybinding",
        lambda *args: alone.append(args) or load(*args),
    )
    x = torch.randn(20, 30)
    graphs = [
        make_fx(lambda x: [(x * 2.0).sin().sum(0), x.exp().sum(1)])(x),
        make_fx(lambda x: [(x * 3.0).cos().sum(0), x.tanh().sum(1)])(x),
    ]
    expected = [graph(x) for graph in graphs]
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        with kernels.in_one_file():
            runs = [torch._inductor.compile(graph, [x]) for graph in graphs]
        for run, values in zip(runs, expected, strict=True):
            torch.testing.assert_close(list(run(x)), values)
    assert bool(alone) != works


def test_kernels_are_shared_out_over_two_files_of_about_one_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = [kernels._Kernel([], "x" * n, codecache.CppPythonBindingsCodeCache) for n in range(30)]
    assert kernels._shared_out(many) == [many]
    monkeypatch.setattr(kernels, "_LONG", 100)
    monkeypatch.setattr(kernels.os, "cpu_count", lambda: 2)
    first, second = kernels._shared_out(many)
    assert sorted(len(k.source) for k in (*first, *second)) == list(range(30))
    sizes = [sum(len(k.source) for k in file) for file in (first, second)]
    assert abs(sizes[0] - sizes[1]) < 30
    monkeypatch.setattr(kernels.os, "cpu_count", lambda: 1)
    assert len(kernels._shared_out(many)) == 1


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
