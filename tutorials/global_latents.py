"""One weight over everything, or one per datum around draws of the global latents: on small full
data the first bound is tighter, and ``joint=True`` asks for it.

Run it::

    python tutorials/global_latents.py
"""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import ELBO, RenyiELBO

from pyro_mcvae import TraceIWAE_ELBO

x = torch.tensor([1.0, -0.5, 2.0, 0.3])


def model() -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(mean, 0.5))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def guide() -> None:
    pyro.sample("mean", dist.Normal(0.5, 0.8))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(x / 2, 0.75))


def bound(elbo: ELBO, count: int = 400) -> str:
    with pyro.validation_enabled(False):
        found = torch.tensor([-elbo.loss(model, guide) for _ in range(count)])
    return f"{found.mean():.3f} ± {found.std() / count**0.5:.3f}"


if __name__ == "__main__":
    pyro.set_rng_seed(0)
    exact = dist.MultivariateNormal(torch.zeros(4), 1.25 * torch.eye(4) + 1.0).log_prob(x)
    print(f"exact {exact:.3f}")
    for particles in (10, 1000):
        theirs = RenyiELBO(0, particles, max_plate_nesting=1, vectorize_particles=True)
        print(f"K = {particles}")
        print(f"  TraceIWAE_ELBO            {bound(TraceIWAE_ELBO(particles))}")
        print(f"  TraceIWAE_ELBO joint=True {bound(TraceIWAE_ELBO(particles, joint=True))}")
        print(f"  RenyiELBO(alpha=0)        {bound(theirs)}")
    for size in (10, 32):
        elbo = TraceIWAE_ELBO(size, num_global_particles=size)
        print(f"K = {size}, num_global_particles={size}  {bound(elbo, 100)}")
