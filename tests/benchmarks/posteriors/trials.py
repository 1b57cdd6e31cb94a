"""One trial: a guide that the ELBO has trained, trained on with an objective, and its bound."""

from __future__ import annotations

import copy
import math
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
# After which step a trial is stopped that would take too long; and steps that are timed both ways.
_LOOK, _TIMED = 8, 7


@dataclass(frozen=True)
class Settings:
    """
    How long everything takes.

    :ivar most_seconds: of CPU time for the steps of one trial: one that would take more is none.
    """

    elbo_steps: int = 2000
    steps: int = 1000
    learning_rate: float = 0.01
    draws: int = 200
    most_seconds: float = 200.0
    evaluation_steps: int = 400
    evaluation_chains: int = 200
    backend: str | None = "eager"


@dataclass(frozen=True)
class Trained:
    """
    :ivar bound: the objective, in nats, and its standard error, over ``draws`` draws.
    :ivar milliseconds: CPU time of a step, the median.
    :ivar seconds: CPU time of all steps, recordings included.
    :ivar plain: the time of a step that is not recorded, in recorded ones.
    """

    bound: float
    error: float
    milliseconds: float
    seconds: float
    plain: float = math.nan


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
    for step in range(steps):
        times.append(timed(svi.step))
        progress()
        if step == _LOOK and steps * min(times) > 1e3 * settings.most_seconds:
            return Trained(math.nan, math.nan, min(times), time.process_time() - begin)
    seconds = time.process_time() - begin
    plain = SVI(model, guide, optimizer(steps, settings.learning_rate / 100), loss)
    ratio = math.nan if compiled is loss or not steps else plain_over_recorded(plain, svi)
    if hasattr(loss, "eval"):
        loss.eval()
    with torch.no_grad():
        bounds = [-svi.evaluate_loss() for _ in range(settings.draws)]
    step_time = statistics.median(times) if times else 0.0
    error = statistics.stdev(bounds) / len(bounds) ** 0.5
    return Trained(statistics.fmean(bounds), error, step_time, seconds, ratio)


def timed(step: Callable[[], Any]) -> float:
    """Milliseconds of CPU time."""
    start = time.process_time()
    step()
    return 1e3 * (time.process_time() - start)


def plain_over_recorded(plain: SVI, recorded: SVI) -> float:
    """The ratio of their median times, over steps that take turns."""
    pairs = [(timed(plain.step), timed(recorded.step)) for _ in range(_TIMED)]
    of_plain, of_recorded = zip(*pairs, strict=True)
    return statistics.median(of_plain) / statistics.median(of_recorded)


def begin(posterior: Posterior, guide: type, settings: Settings, seed: int, progress: Progress):
    """The model, a guide that the ELBO has trained, and how the ELBO fared."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = posterior.make()
    auto = guide(model, init_scale=0.1)
    auto()  # which makes its parameters
    result = train(model, auto, TraceSGVB_ELBO(), settings, settings.elbo_steps, progress)
    return model, auto, result


def continued(model: Any, guide: Any, loss: Any, settings: Settings, seed: int, progress: Progress):
    """A copy of the guide, trained on, and how the objective fared."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed + 1)
    guide = copy.deepcopy(guide)
    return guide, train(model, guide, loss, settings, settings.steps, progress)


def evaluated(
    posterior: Posterior, model: Any, guide: Any, settings: Settings, seed: int
) -> tuple[float, float]:
    """
    The log evidence and its standard error: exact, or by chains in white coordinates.

    Chains from a guide that is far off find too little, by tens of nats, and their error does not
    say so.
    """
    if posterior.evidence is not None:
        return posterior.evidence(), 0.0
    pyro.clear_param_store()
    result = log_evidence(
        model,
        copy.deepcopy(guide),
        num_particles=settings.evaluation_chains,
        schedule=settings.evaluation_steps,
        kernel=HMC(num_leapfrog=4, jitter=0.3),
        coordinates="whitened",
        joint=True,
        seed=seed,
    )
    return float(result.total), float(result.total_standard_error)
