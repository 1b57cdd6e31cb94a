"""
NumPyro's NUTS on posteriors of posteriordb: errors and CPU seconds, compilation included.

    python -m tests.benchmarks.posteriordb.numpyro_side --data-root posteriordb --out nuts.csv

The regressions, eight schools and Kilpisjärvi, with NumPyro's defaults: one chain of 1,000 warm-up
steps and 1,000 draws, in double precision. The models are those of ``models.py``.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpyro
import numpyro.distributions as dist
import torch
from jax import numpy as jnp
from numpyro.infer import MCMC, NUTS

from tests.benchmarks.posteriordb.__main__ import errors
from tests.benchmarks.posteriordb.models import CAUCHY, REGRESSIONS, ROOT, data_of, vector

positive, real = dist.constraints.positive, dist.constraints.real


def flat(name: str, support: Any = real, shape: tuple[int, ...] = ()) -> Any:
    return numpyro.sample(name, dist.ImproperUniform(support, (), shape))


def regression(x: Any, y: Any, sigma: Callable[[], Any], beta: Any = None) -> Callable[[], None]:
    def model() -> None:
        b = flat("beta", real, x.shape[1:]) if beta is None else numpyro.sample("beta", beta)
        numpyro.sample("y", dist.Normal(x @ b, sigma()), obs=y)

    return model


def design(name: str) -> tuple[Any, Any]:
    columns, y = (REGRESSIONS | CAUCHY)[name](data_of(name))
    x = torch.stack([torch.ones_like(y), *columns], -1)
    return jnp.asarray(x.numpy()), jnp.asarray(y.numpy())


def sampled(fn: Any) -> Callable[[], Any]:
    return lambda: numpyro.sample("sigma", fn)


def program(name: str) -> Callable[[], None]:
    """Return the model of a posterior."""
    if name in REGRESSIONS:
        return regression(*design(name), lambda: flat("sigma", positive))
    if name in CAUCHY:
        return regression(*design(name), sampled(dist.HalfCauchy(2.5)))
    d = {k: jnp.asarray(v.numpy()) if hasattr(v, "numpy") else v for k, v in data_of(name).items()}
    if name.endswith("-blr"):
        beta = dist.Normal(0.0, 10.0).expand([d["X"].shape[1]])
        return regression(d["X"], d["y"], sampled(dist.HalfNormal(10.0)), beta)
    if name.startswith("kilpis"):

        def line() -> None:
            a = numpyro.sample("alpha", dist.Normal(d["pmualpha"], d["psalpha"]))
            b = numpyro.sample("beta", dist.Normal(d["pmubeta"], d["psbeta"]))
            mean, sigma = a + b * d["x"], flat("sigma", positive)
            numpyro.sample("y", dist.Normal(mean, sigma), obs=d["y"])

        return line

    def schools() -> None:
        t = numpyro.sample("theta_trans", dist.Normal(0.0, 1.0).expand([8]))
        mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
        numpyro.deterministic("theta", t * tau + mu)
        numpyro.sample("y", dist.Normal(t * tau + mu, d["sigma"]), obs=d["y"])

    return schools


NAMES = [*REGRESSIONS, *CAUCHY, "sblrc-blr", "sblri-blr", "kilpisjarvi_mod-kilpisjarvi"]
NAMES += ["eight_schools-eight_schools_noncentered"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    ROOT.append(options.data_root)
    jax.config.update("jax_enable_x64", True)
    torch.set_default_dtype(torch.float64)
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["posterior", "mean", "log_sd", "seconds"])
        for name in options.names or NAMES:
            model, start = program(name), time.process_time()
            nuts = MCMC(NUTS(model), num_warmup=1000, num_samples=1000, progress_bar=False)
            nuts.run(jax.random.key(0))
            draws = {k: torch.tensor(jax.device_get(v)) for k, v in nuts.get_samples().items()}
            seconds = time.process_time() - start
            parts = {n: v for k, w in draws.items() if w.dim() > 1 for n, v in vector(k, w).items()}
            row = [name, *(f"{e:.4g}" for e in (*errors(name, draws | parts), seconds))]
            writer.writerow(row)
            print(*row, flush=True)


if __name__ == "__main__":
    main()
