"""Judges replay the transitions of long schedules: the numbers of the plain ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_mcvae import HMC, ULA, LearnedStepSize, log_evidence, refine
from pyro_mcvae.chains.annealing import anneal, evaluator
from pyro_mcvae.compiled.graph import as_function, split_off
from pyro_mcvae.compiled.tracer import trace
from pyro_mcvae.compiled.transition import RecordedTransition
from pyro_mcvae.evaluation import options as annealing

x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def model(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z.tanh(), 0.5), obs=x)


def guide(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(x / 2, 0.7))


def judged(
    by: Callable[..., Any],
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    long: int,
    guide: Any = guide,
    **options: Any,
) -> tuple[Any, int]:
    """What a judge finds, and how many transitions were replayed."""
    made: list[RecordedTransition] = []

    def make(*args: Any) -> RecordedTransition:
        made.append(RecordedTransition(*args))
        return made[-1]

    monkeypatch.setattr(annealing, "_LONG", long)
    monkeypatch.setattr(annealing, "RecordedTransition", make)
    options = {"num_particles": 3, "schedule": 12, "warmup": 2, "max_plate_nesting": 1, **options}
    result = by(model, guide, x, seed=3, **options)
    return result, sum(m._uses for m in made)


evidence = partial(judged, partial(log_evidence, keep_log_weight=True))
draws = partial(judged, partial(refine, num_samples=4, num_transitions=12), schedule=2)


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (HMC(num_leapfrog=2), {}),
        (HMC(0.3, num_leapfrog=1, jitter=0.3), {"chunk_size": 2}),
        (ULA(0.05), {"coordinates": "latent"}),
    ],
    ids=["adapted", "jitter, in chunks", "unadjusted"],
)
def test_the_weights_are_the_plain_ones(
    kernel: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, replayed = evidence(model, monkeypatch, 1000, kernel=kernel, **options)
    assert replayed == 0
    result, replayed = evidence(model, monkeypatch, 10, kernel=kernel, **options)
    assert replayed >= 8
    assert torch.equal(result.log_weight, plain.log_weight)
    assert torch.equal(result.acceptance, plain.acceptance)
    assert torch.equal(result.step_size, plain.step_size)


def test_the_moved_draws_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, replayed = draws(model, monkeypatch, 1000, kernel=HMC(num_leapfrog=2))
    assert replayed == 0
    result, replayed = draws(model, monkeypatch, 10, kernel=HMC(num_leapfrog=2))
    assert replayed >= 8
    assert torch.equal(result["z"], plain["z"])


def by_value(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z if z.detach().sum() > 0 else 2 * z, 0.5), obs=x)


def test_what_cannot_be_recorded_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = evidence(by_value, monkeypatch, 1000, kernel=HMC(0.3))
    result, replayed = evidence(by_value, monkeypatch, 10, kernel=HMC(0.3))
    assert replayed == 0
    assert torch.equal(result.log_weight, plain.log_weight)


def test_parameters_of_each_transition_run_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    step_size = LearnedStepSize(0.01, num_transitions=12)
    step_size.log_value.data = torch.linspace(0.01, 0.1, 12).log()
    kernel = ULA(step_size)
    plain, _ = evidence(model, monkeypatch, 1000, kernel=kernel)
    result, replayed = evidence(model, monkeypatch, 10, kernel=kernel)
    assert replayed == 0
    assert torch.equal(result.log_weight, plain.log_weight)


def test_what_is_not_seen_is_found_at_the_beginning_of_a_chain() -> None:
    held = np.ones(1)  # an array that changes in place

    def density(z: Tensor) -> tuple[Tensor, Tensor]:
        return -0.5 * z.square().sum(-1), -float(held[0]) * z.square().sum(-1)

    betas = torch.linspace(0, 1, 7)
    recorded = RecordedTransition(kernel := HMC(0.3), ())
    for scale in (1.0, 3.0, 1.0):
        held[0] = scale
        weights = []
        for moves in (recorded, kernel):
            torch.manual_seed(2)
            start = evaluator(density)(torch.randn(4, 2))
            weights.append(anneal(start, betas, moves, evaluator(density, False)).log_weight)
        assert torch.equal(*weights)


def test_recordings_that_pay_are_made_for_any_number_of_batches() -> None:
    """Of 8 densities each, one after the other: those of short chains soon run as ever."""
    recorded = []
    for steps in (70, 5):
        moves = RecordedTransition(HMC(0.3, num_leapfrog=1), ())
        betas = torch.linspace(0, 1, steps)
        for scale in range(1, 9):

            def density(z: Tensor, scale: int = scale) -> tuple[Tensor, Tensor]:
                return -0.5 * z.square().sum(-1), -scale * z.square().sum(-1)

            start = evaluator(density)(torch.randn(4, 2))
            anneal(start, betas, moves, evaluator(density, False))
        recorded.append((moves._recorded, moves._unsupported))
    assert recorded[0][0] >= 8
    assert recorded[0][1] is False
    assert recorded[1] == (7, True)


def test_what_depends_on_fixed_constants_is_computed_once_and_nothing_else() -> None:
    fixed, moving = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])

    def function(x: Tensor) -> list[Tensor]:
        ones = torch.ones_like(x * moving)
        return [x * fixed.exp().log1p() + moving.exp() * ones + torch.randn_like(fixed)]

    x = torch.tensor([0.5, -1.0])
    graph, constants, _ = as_function(*trace(function, [x]))
    before = sum(node.op == "call_function" for node in graph.graph.nodes)
    prepare, graph = split_off(graph.graph, [c is not moving for c in constants])
    assert sum(node.op == "call_function" for node in graph.graph.nodes) < before
    prepared = prepare(*constants)
    for _ in range(2):
        torch.manual_seed(1)
        expected = function(x)[0]
        torch.manual_seed(1)
        assert torch.equal(graph(*prepared, x)[0], expected)
        moving.mul_(2.0)
