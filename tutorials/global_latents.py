"""Compare one weight over everything (``joint=True``) with one weight per datum.

With few data, one weight over everything gives the tighter bound. With many data it degenerates.

Run it::

    python tutorials/global_latents.py
    python tutorials/global_latents.py --data 40
"""

import argparse
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import ELBO, RenyiELBO
from torch import Tensor

from pyro_mcvae import TraceIWAE_ELBO

Program = Callable[[], None]


def programs(x: Tensor) -> tuple[Program, Program]:
    """Return data with local latents around a common mean, and a guide that nearly fits."""
    loc, scale, local = 0.5, 0.8, x / 2
    if len(x) != 4:  # 1.3 times as wide as the posterior of the mean
        precision = 1 + len(x) / 1.25
        loc, scale = float(x.sum()) / 1.25 / precision, 1.3 * precision**-0.5
        local = (4 * loc + x) / 5

    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(mean, 0.5))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide() -> None:
        pyro.sample("mean", dist.Normal(loc, scale))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(local, 0.75 if len(x) == 4 else 0.5))

    return model, guide


def bound(pair: tuple[Program, Program], elbo: ELBO, count: int = 400) -> str:
    with pyro.validation_enabled(False):
        result = torch.tensor([-elbo.loss(*pair) for _ in range(count)])
    return f"{result.mean():.3f} ± {result.std() / count**0.5:.3f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=int, default=4, metavar="N")
    size = parser.parse_args().data
    pyro.set_rng_seed(0)
    generator = torch.Generator().manual_seed(0)
    x = torch.tensor([1.0, -0.5, 2.0, 0.3])
    if size != 4:
        x = 0.7 + 1.25**0.5 * torch.randn(size, generator=generator)
    covariance = 1.25 * torch.eye(size) + 1.0
    exact = dist.MultivariateNormal(torch.zeros(size), covariance).log_prob(x)
    print(f"exact {exact:.3f}")
    pair = programs(x)
    for particles in (10, 1000):
        theirs = RenyiELBO(0, particles, max_plate_nesting=1, vectorize_particles=True)
        print(f"K = {particles}")
        print(f"  TraceIWAE_ELBO            {bound(pair, TraceIWAE_ELBO(particles))}")
        print(f"  TraceIWAE_ELBO joint=True {bound(pair, TraceIWAE_ELBO(particles, joint=True))}")
        print(f"  RenyiELBO(alpha=0)        {bound(pair, theirs)}")
