"""NumPyro on the same models and data, where it is installed: optional columns, and references."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch

from tests.benchmarks.posteriors import models
from tests.benchmarks.posteriors.trials import Settings, Trained

OTHERS = ["NumPyro-ELBO", "NumPyro-Renyi-100", "AutoDAIS-10"]


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


def _items(dist: Any, jnp: Any, sample: Any, answers: Any) -> None:
    persons, items = answers.shape
    difficulty = sample("difficulty", dist.Normal(0.0, 1.0).expand([items]).to_event(1))
    slope = sample("slope", dist.LogNormal(0.0, 0.5).expand([items]).to_event(1))
    ability = sample("ability", dist.Normal(0.0, 1.0).expand([persons]).to_event(1))
    logits = slope * (ability[:, None] - difficulty)
    sample("answers", dist.Bernoulli(logits=logits).to_event(2), obs=answers)


def _schools(dist: Any, jnp: Any, sample: Any, y: Any, error: Any) -> None:
    mean = sample("mean", dist.Normal(0.0, 5.0))
    spread = sample("spread", dist.HalfCauchy(5.0))
    effect = sample("effect", dist.Normal(mean, spread).expand([8]).to_event(1))
    sample("y", dist.Normal(effect, error).to_event(1), obs=y)


PROGRAMS: dict[str, tuple[Callable[..., None], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "volatility": (_volatility, partial(models.simulated_returns, 200)),
    "sunspots": (_sunspots, models.sunspot_counts),
    "logistic": (_logistic, models.tumours),
    "process": (_process, models.flowers),
    "items": (_items, models.tumour_answers),
    "schools": (_schools, models.schools_data),
}
NONCENTERED = {"schools": ["effect"]}


def program_of(name: str) -> Callable[[], None]:
    """
    The model for NumPyro.

    :raises ImportError: with the remedy, where NumPyro is not installed.
    """
    try:
        import jax
        import numpyro
        import numpyro.distributions as dist
    except ImportError as error:
        raise ImportError("this needs NumPyro: pip install numpyro") from error
    jax.config.update("jax_enable_x64", True)
    program, data = PROGRAMS[name]
    args = [jax.numpy.asarray(values.numpy()) for values in data()]
    return lambda: program(dist, jax.numpy, numpyro.sample, *args)


def trained_by_numpyro(name: str, objective: str, settings: Settings, seed: int) -> Trained:
    """As many steps as the ELBO's and the objective's together, which it has from the start."""
    model = program_of(name)
    import jax
    import numpyro
    from numpyro.infer import SVI, RenyiELBO, Trace_ELBO
    from numpyro.infer.autoguide import AutoDAIS, AutoNormal

    if objective.startswith("AutoDAIS"):
        guide = AutoDAIS(model, K=10, eta_init=0.01, eta_max=0.5, init_scale=0.1)
    else:
        guide = AutoNormal(model, init_scale=0.1)
    loss = RenyiELBO(alpha=0, num_particles=100) if "Renyi" in objective else Trace_ELBO()
    steps = settings.elbo_steps + settings.steps
    rate = settings.learning_rate
    optimizer = numpyro.optim.ClippedAdam(lambda i: rate * 0.1 ** (i / steps), clip_norm=10.0)
    svi = SVI(model, guide, optimizer, loss)
    begin = time.process_time()
    state = svi.init(jax.random.PRNGKey(seed))
    update, times = jax.jit(svi.update), []
    for _ in range(steps):
        start = time.process_time()
        state, value = update(state)
        value.block_until_ready()
        times.append(1e3 * (time.process_time() - start))
    seconds = time.process_time() - begin
    evaluate = jax.jit(lambda key: svi.evaluate(state._replace(rng_key=key)))
    keys = jax.random.split(jax.random.PRNGKey(seed + 1), settings.draws)
    bounds = [-float(evaluate(key)) for key in keys]
    error = statistics.stdev(bounds) / len(bounds) ** 0.5
    return Trained(statistics.fmean(bounds), error, statistics.median(times), seconds)


def reference(name: str, draws: int, chains: int, seed: int) -> dict[str, numpy.ndarray]:
    """
    Draws of long chains of NumPyro's NUTS, by site: ``[chains, draws, *shape]``.

    Of sites in ``NONCENTERED`` the chains move standardized values: the posterior is the same.
    """
    model = program_of(name)
    import jax
    from numpyro.handlers import reparam
    from numpyro.infer import MCMC, NUTS
    from numpyro.infer.reparam import LocScaleReparam

    config = {site: LocScaleReparam(centered=0.0) for site in NONCENTERED.get(name, [])}
    model = reparam(model, config=config)
    kernel = NUTS(model, target_accept_prob=0.95)
    chain = MCMC(
        kernel,
        num_warmup=2000,
        num_samples=draws,
        num_chains=chains,
        chain_method="sequential",
        progress_bar=False,
    )
    chain.run(jax.random.PRNGKey(seed))
    result = chain.get_samples(group_by_chain=True).items()
    return {n: numpy.array(v) for n, v in result if not n.endswith("_decentered")}
