"""One trial: a guide that the ELBO has trained, trained on with an objective, and its bound."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.optim import ClippedAdam

from pyro_mcvae import HMC, CompiledELBO, TraceSGVB_ELBO, log_evidence
from tests.benchmarks.posteriors.models import Posterior

Progress = Callable[[], None]


@dataclass(frozen=True)
class Settings:
    """How long everything takes."""

    elbo_steps: int = 2000
    steps: int = 1000
    learning_rate: float = 0.01
    draws: int = 200
    judge_steps: int = 500
    judge_chains: int = 32
    backend: str | None = "eager"


@dataclass(frozen=True)
class Trained:
    """
    :ivar bound: the objective, in nats, and its standard error, over ``draws`` draws.
    :ivar milliseconds: CPU time of a step, the median.
    :ivar seconds: CPU time of all steps, recordings included.
    """

    bound: float
    error: float
    milliseconds: float
    seconds: float


def optimizer(steps: int, rate: float) -> ClippedAdam:
    """The learning rate falls to a tenth."""
    return ClippedAdam({"lr": rate, "lrd": 0.1 ** (1 / max(steps, 1))})


def train(
    model: Any, guide: Any, loss: Any, settings: Settings, steps: int, progress: Progress
) -> Trained:
    """Train, and say what the bound is at the end."""
    compiled = loss if settings.backend is None else CompiledELBO(loss, backend=settings.backend)
    svi = SVI(model, guide, optimizer(steps, settings.learning_rate), compiled)
    begin, times = time.process_time(), []
    for _ in range(steps):
        start = time.process_time()
        svi.step()
        times.append(1e3 * (time.process_time() - start))
        progress()
    seconds = time.process_time() - begin
    if hasattr(loss, "eval"):
        loss.eval()
    with torch.no_grad():
        bounds = [-svi.evaluate_loss() for _ in range(settings.draws)]
    step = statistics.median(times) if times else 0.0
    error = statistics.stdev(bounds) / len(bounds) ** 0.5
    return Trained(statistics.fmean(bounds), error, step, seconds)


def begin(posterior: Posterior, guide: type, settings: Settings, seed: int, progress: Progress):
    """The model, a guide that the ELBO has trained, and how the ELBO fared."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = posterior.make()
    auto = guide(model, init_scale=0.1)
    auto()  # which makes its parameters
    found = train(model, auto, TraceSGVB_ELBO(), settings, settings.elbo_steps, progress)
    return model, auto, found


def continued(model: Any, guide: Any, loss: Any, settings: Settings, seed: int, progress: Progress):
    """A copy of the guide, trained on, and how the objective fared."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed + 1)
    guide = copy.deepcopy(guide)
    return guide, train(model, guide, loss, settings, settings.steps, progress)


def judged(model: Any, guide: Any, settings: Settings, seed: int) -> tuple[float, float]:
    """The log evidence by long annealed HMC from the guide, and its standard error."""
    pyro.clear_param_store()
    found = log_evidence(
        model,
        copy.deepcopy(guide),
        num_particles=settings.judge_chains,
        schedule=settings.judge_steps,
        kernel=HMC(num_leapfrog=4),
        warmup=2,
        joint=True,
        seed=seed,
    )
    return float(found.total), float(found.total_standard_error)
