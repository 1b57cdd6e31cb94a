"""Evaluators replay the transitions of long schedules: the numbers of the plain ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_mcvae import HMC, ULA, LearnedStepSize, log_evidence, refine
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


def evaluated(
    by: Callable[..., Any],
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    long: int,
    guide: Any = guide,
    **options: Any,
) -> tuple[Any, int]:
    """What an evaluator finds, and how many transitions were replayed."""
    made: list[RecordedTransition] = []

    def make(*args: Any) -> RecordedTransition:
        made.append(RecordedTransition(*args))
        return made[-1]

    monkeypatch.setattr(annealing, "_LONG", long)
    monkeypatch.setattr(annealing, "RecordedTransition", make)
    options = {"num_particles": 3, "schedule": 12, "warmup": 2, "max_plate_nesting": 1, **options}
    result = by(model, guide, x, seed=3, **options)
    return result, sum(m._uses for m in made)


evidence = partial(evaluated, partial(log_evidence, keep_log_weight=True))
draws = partial(evaluated, partial(refine, num_samples=4, num_transitions=12), schedule=2)


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
