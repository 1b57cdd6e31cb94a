"""The benchmark compares steps that compute the same."""

import json
import sys
from functools import partial

import pyro
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks import (
    __main__,
    by_hand,
    memory,
    run_modes,
    suite,
    truncated_sides,
    volatility,
    where,
)
from tests.benchmarks.suite import Specialization
from tests.benchmarks.truncated_by_hand import ByHand
from tests.cases import every


@pytest.fixture(autouse=True)
def single_precision(double_precision):
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("objective", "decoder"),
    every(2, [("SGVB", "mlp"), ("IWAE", "mlp"), ("SIS", "mlp"), ("SGVB", "conv"), ("AIS", "mlp")]),
)
def test_both_sides_have_one_bound(objective, decoder):
    case = Specialization(objective, size=2, batch=3, latent=4, decoder=decoder)
    x = torch.rand(3, suite.PIXELS).bernoulli()
    vae, elbo = suite.VAE(case), suite.objective(case)
    ours = [elbo.loss(vae.model, vae.guide, x) for _ in range(30)]
    theirs = [-suite.by_hand(case)(by_hand.Plain(vae), x).item() for _ in range(30)]
    ours, theirs = torch.tensor(ours), torch.tensor(theirs)
    error = ((ours.var() + theirs.var()) / 30).sqrt()
    assert abs(ours.mean() - theirs.mean()) < 4.5 * error


@pytest.mark.slow
def test_the_rao_blackwellized_step_has_the_bound_and_gradient():
    case = Specialization("RB", size=1, batch=3, latent=4)
    x = torch.rand(3, suite.PIXELS).bernoulli()
    vae, elbo = suite.VAE(case), suite.objective(case)
    vae.encoder[2].bias.data = torch.randn(4)
    weight, result = vae.encoder[2].bias, []
    for bound in (
        lambda: -elbo.differentiable_loss(vae.model, vae.guide, x),
        lambda: suite.by_hand(case)(by_hand.Categories(vae), x),
        lambda: suite.by_hand(case)(by_hand.BareCategories(vae), x),
    ):
        drawn = []
        for _ in range(50):
            value = bound()
            (gradient,) = torch.autograd.grad(value, weight)
            drawn.append(torch.cat([value.detach().reshape(1), gradient]))
        result.append(torch.stack(drawn))
    for other in result[1:]:
        error = ((result[0].var(0) + other.var(0)) / 50).sqrt()
        assert (abs(result[0].mean(0) - other.mean(0)) < 4.5 * error + 1e-4).all()


def test_truncated_sides_have_one_free_energy():
    one, bare = (kind(N=20, S=4, H=5) for kind in (ByHand, truncated_sides.Bare))
    states, index = one.space.unpack(one.stored), torch.arange(20)
    wanted = one.log_joint(states, one.x)
    assert torch.allclose(bare.log_joint(states, one.x), wanted, rtol=1e-5)
    model = truncated_sides.Programs(one).model
    guide = truncated_sides._guide(one, model).eval()
    loss = truncated_sides._elbo().loss(model, guide, one.x, index)
    assert loss == pytest.approx(-wanted.logsumexp(1).sum().item(), rel=1e-5)


def test_volatility_sides_have_one_density():
    y, one, programs = volatility.returns(), volatility.ByHand(), volatility.Programs()
    result = []
    for h in torch.randn(3, volatility.LENGTH):
        conditioned = pyro.condition(programs.model, {"h": h})
        log_joint = pyro.poutine.trace(conditioned).get_trace(y).log_prob_sum()
        result.append(log_joint - one.log_joint(y, h))
    torch.testing.assert_close(result[0].expand(3), torch.stack(result), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("way", [by_hand.Distributions, by_hand.Bare])
@pytest.mark.parametrize("objective", ["SGVB", "IWAE", "SIS", "AIS"])
def test_every_way_of_running_the_programs_is_the_same_step(objective, way):
    case = Specialization(objective, size=2, batch=3, latent=4)
    x = torch.rand(3, suite.PIXELS).bernoulli()
    vae, bound = suite.VAE(case, stored=False), suite.by_hand(case)
    result = []
    for one in (by_hand.Plain, way):
        torch.manual_seed(0)
        value = bound(one(vae), x)
        if one is by_hand.Distributions and objective in ("SIS", "AIS"):
            value = value + 3 * by_hand.constant(torch.zeros(4))  # which the others leave out
        result.append([value, *torch.autograd.grad(value, list(vae.parameters()))])
    torch.testing.assert_close(*result, rtol=1e-4, atol=1e-4)


def test_memory_is_counted():
    kept = []

    def make():
        kept.append(torch.zeros(2**18))  # 1 MB of single precision

        def step():
            kept.append(torch.zeros(2**18))
            return torch.zeros(2**19)  # gone afterwards

        return step

    assert memory.peak(make, "cpu", warmup=2) == 1 + 3 + 2


@pytest.mark.slow
def test_it_writes_json_and_a_table(tmp_path, monkeypatch, capsys):
    small = [Specialization(name, size=2, batch=3, latent=4) for name in ("SGVB", "SIS")]
    small.append(Specialization("Truncated", size=4, batch=3, latent=64))
    monkeypatch.setattr(suite, "cases", lambda *_: iter(small))
    out = tmp_path / "benchmark.json"
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--steps", "2", "--out", str(out)])
    threads = torch.get_num_threads()
    __main__.main()
    torch.set_num_threads(threads)
    result = json.loads(out.read_text())
    assert result["about"]["torch"] == torch.__version__
    assert [row["objective"] for row in result["rows"]] == ["SGVB", "SIS", "Truncated"]
    for row in result["rows"][:2]:
        assert set(row["milliseconds"]) == {
            "SVI",
            "module",
            "by hand",
            "bare Pyro",
            "Pyro's",
            "least",
        }
        times = row["milliseconds"]
        assert row["ratios"]["SVI / by hand"] == times["SVI"] / times["by hand"]
        memory = row["megabytes"]
        assert row["ratios"]["memory: module / by hand"] == memory["module"] / memory["by hand"]
    lines = out.with_suffix(".md").read_text().splitlines()
    assert len(lines) == 5
    assert lines[2].startswith("| SGVB; batch 3, latent 4 |")
    assert "SVI / least" in capsys.readouterr().out


def test_parts_add_up_to_the_step(monkeypatch):
    times = iter([1.0, 4.0, 4.0, 6.0, 6.5, 7.0, 7.5, 10.0])
    monkeypatch.setattr(suite, "medians", lambda steps, *_: dict(zip(steps, times, strict=True)))
    result = where.parts(Specialization("SGVB", batch=3, latent=4), 1)
    assert result["backward"] == 3.0
    assert result["this package"] == 0.5
    assert sum(result.values()) == 10.0
    lines = where.table({"SGVB": result}).splitlines()
    assert lines[2] == "| networks forward | 1.0 ms, 10% |"
    assert lines[-1] == "| the whole step | 10.0 ms |"


@pytest.mark.parametrize("objective", ["SGVB", "SIS"])
def test_chains_differentiate_gradients_and_others_do_not(objective):
    case = Specialization(objective, size=2, batch=3, latent=4)
    counts = {}
    for rung in ("networks forward", "backward", "double backward"):
        with profile(activities=[ProfilerActivity.CPU]) as result:
            where.ladder(case)[rung]()()
        events = {e.key: e.count for e in result.key_averages()}
        names = ("aten::tanh", "TanhBackward0", "TanhBackwardBackward0")
        counts[rung] = [events.get(name, 0) for name in names]
    # The encoder, and the decoder at each state of a chain: the last one's gradient moves nothing.
    assert counts["networks forward"][1] == 0
    if objective == "SGVB":
        assert counts["backward"] == counts["double backward"] == [2, 2, 0]
    else:
        assert counts["backward"] == [4, 3, 0]
        assert counts["double backward"] == [4, 7, 3]


@pytest.mark.parametrize("make", [run_modes.topics, partial(run_modes.hidden_markov, length=2)])
def test_particles_are_run_in_each_way_and_are_the_same(make):
    case, x = make("cpu")
    losses = []
    for way in ("leading dim", "vmap"):
        step = run_modes.step_of(case, x[:5], way)
        pyro.set_rng_seed(0)
        losses.append(step())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    run_modes.step_of(case, x[:5], "loop")()
