"""NumPyro's AutoDAIS on the same models and data, where it is installed: an optional column."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks.posteriors import models
from tests.benchmarks.posteriors.trials import Settings, Trained

DAIS = "AutoDAIS-10"


def _volatility(dist: Any, jnp: Any, sample: Any, y: Any, precision: Any) -> None:
    h = sample("h", dist.MultivariateNormal(jnp.zeros(len(y)), precision_matrix=precision))
    sample("y", dist.Normal(0.0, jnp.exp(h / 2)).to_event(1), obs=y)


def _sunspots(dist: Any, jnp: Any, sample: Any, count: Any, factor: Any) -> None:
    mean = sample("mean", dist.Normal(3.0, 1.0))
    f = sample("f", dist.MultivariateNormal(jnp.zeros(len(count)), scale_tril=factor))
    sample("count", dist.Poisson(jnp.exp(mean + f)).to_event(1), obs=count)


def _logistic(dist: Any, jnp: Any, sample: Any, x: Any, y: Any) -> None:
    w = sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    sample("y", dist.Bernoulli(logits=x @ w).to_event(1), obs=y)


def _process(dist: Any, jnp: Any, sample: Any, y: Any, factor: Any) -> None:
    f = sample("f", dist.MultivariateNormal(jnp.zeros(len(y)), scale_tril=factor))
    sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)


PROGRAMS: dict[str, tuple[Callable[..., None], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "volatility": (_volatility, models.simulated_returns),
    "sunspots": (_sunspots, models.sunspot_counts),
    "logistic": (_logistic, models.tumours),
    "process": (_process, models.flowers),
}


def dais(name: str, settings: Settings, seed: int) -> Trained:
    """
    As many steps as the ELBO's and the objective's together, which it has from the start.

    :raises ImportError: with the remedy, where NumPyro is not installed.
    """
    try:
        import jax
        import numpyro
        import numpyro.distributions as dist
        from numpyro.infer import SVI, Trace_ELBO
        from numpyro.infer.autoguide import AutoDAIS
    except ImportError as error:
        raise ImportError("--numpyro needs NumPyro: pip install numpyro") from error
    jax.config.update("jax_enable_x64", True)
    program, data = PROGRAMS[name]
    args = [jax.numpy.asarray(values.numpy()) for values in data()]

    def model() -> None:
        program(dist, jax.numpy, numpyro.sample, *args)

    guide = AutoDAIS(model, K=10, eta_init=0.01, eta_max=0.5, init_scale=0.1)
    steps = settings.elbo_steps + settings.steps
    rate = settings.learning_rate
    optimizer = numpyro.optim.ClippedAdam(lambda i: rate * 0.1 ** (i / steps), clip_norm=10.0)
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    begin = time.process_time()
    state = svi.init(jax.random.PRNGKey(seed))
    update, times = jax.jit(svi.update), []
    for _ in range(steps):
        start = time.process_time()
        state, loss = update(state)
        loss.block_until_ready()
        times.append(1e3 * (time.process_time() - start))
    seconds = time.process_time() - begin
    evaluate = jax.jit(lambda key: svi.evaluate(state._replace(rng_key=key)))
    keys = jax.random.split(jax.random.PRNGKey(seed + 1), settings.draws)
    bounds = [-float(evaluate(key)) for key in keys]
    error = statistics.stdev(bounds) / len(bounds) ** 0.5
    return Trained(statistics.fmean(bounds), error, statistics.median(times), seconds)
