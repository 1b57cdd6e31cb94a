"""Time one training step of each objective beside Pyro's nearest loss and a step without Pyro.

A 784-400-64 VAE, batch 100. The two sides of a row take turns in one process, and the ratio is of
their medians. Run it on a machine that does nothing else::

    python tests/benchmarks/step_time.py --threads 1 --steps 60
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from pyro_mcvae import TraceIWAE_ELBO, TraceSGVB_ELBO

Step = Callable[[], Any]


class VAE(nn.Module):
    count = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        # Of its own: modules that share names in the store are copied at every step.
        self.name = f"vae{next(self.count)}"
        self.encoder = nn.Sequential(nn.Linear(784, 400), nn.Tanh(), nn.Linear(400, 128))
        self.decoder = nn.Sequential(nn.Linear(64, 400), nn.Tanh(), nn.Linear(400, 784))

    def model(self, x: Tensor) -> None:
        pyro.module(self.name + ".decoder", self.decoder)
        with pyro.plate("data", len(x)):
            prior = dist.Normal(x.new_zeros(64), x.new_ones(64)).to_event(1)
            z = pyro.sample("z", prior)
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        pyro.module(self.name + ".encoder", self.encoder)
        with pyro.plate("data", len(x)):
            loc, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def with_pyro(loss: Any, x: Tensor) -> Step:
    vae = VAE()
    svi = SVI(vae.model, vae.guide, pyro.optim.Adam({"lr": 1e-3}), loss=loss)
    return lambda: svi.step(x)


def by_hand(bound: Callable[[VAE, Tensor], Tensor], x: Tensor) -> Step:
    vae = VAE()
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = -bound(vae, x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def sgvb(vae: VAE, x: Tensor) -> Tensor:
    loc, log_scale = vae.encoder(x).chunk(2, -1)
    z = loc + log_scale.exp() * torch.randn_like(loc)
    kl = 0.5 * (loc**2 + (2 * log_scale).exp() - 1) - log_scale
    return -binary_cross_entropy_with_logits(vae.decoder(z), x, reduction="sum") - kl.sum()


def iwae(vae: VAE, x: Tensor, num_particles: int = 10) -> Tensor:
    loc, log_scale = vae.encoder(x).chunk(2, -1)
    eps = torch.randn(num_particles, *loc.shape)
    z = loc + log_scale.exp() * eps
    logits = vae.decoder(z)
    likelihood = -binary_cross_entropy_with_logits(logits, x.expand_as(logits), reduction="none")
    log_ratio = -0.5 * z**2 + 0.5 * eps**2 + log_scale
    log_weight = likelihood.sum(-1) + log_ratio.sum(-1)
    return (log_weight.logsumexp(0) - math.log(num_particles)).sum()


def compare(name: str, ours: Step, theirs: Step, steps: int) -> None:
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(steps + 3):
        for side in (0, 1) if i % 2 else (1, 0):
            start = time.perf_counter()
            (ours, theirs)[side]()
            times[side].append(time.perf_counter() - start)
    a, b = (statistics.median(t[3:]) for t in times)  # the first steps warm up
    print(f"{name:44} {1e3 * a:8.2f} ms {1e3 * b:8.2f} ms   ratio {a / b:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    x = torch.rand(100, 784).bernoulli()
    many: dict[str, Any] = {"vectorize_particles": True, "max_plate_nesting": 1}
    print(f"torch {torch.__version__}, pyro {pyro.__version__}, {args.threads} thread(s)")
    for validation in (True, False):
        pyro.enable_validation(validation)
        print(f"Pyro's validation {'on' if validation else 'off'}:")
        rows = {
            "IWAE-10 / RenyiELBO(0), 10 particles": (
                TraceIWAE_ELBO(10, **many),
                RenyiELBO(0, 10, **many),
                1,
            ),
            "IWAE-10 reparam / RenyiELBO(0)": (
                TraceIWAE_ELBO(10, "reparam", **many),
                RenyiELBO(0, 10, **many),
                1,
            ),
            "SGVB / TraceMeanField_ELBO": (TraceSGVB_ELBO(), TraceMeanField_ELBO(), 3),
            "SGVB estimator A / Trace_ELBO": (TraceSGVB_ELBO(1, False), Trace_ELBO(), 3),
        }
        for name, (ours, theirs, more) in rows.items():
            compare(name, with_pyro(ours, x), with_pyro(theirs, x), more * args.steps)
        iwae_step = with_pyro(TraceIWAE_ELBO(10, **many), x)
        compare("IWAE-10 / by hand in PyTorch", iwae_step, by_hand(iwae, x), args.steps)
        sgvb_step = with_pyro(TraceSGVB_ELBO(), x)
        compare("SGVB / by hand in PyTorch", sgvb_step, by_hand(sgvb, x), 3 * args.steps)


if __name__ == "__main__":
    main()
