"""Time one training step of each objective beside Pyro's nearest loss and a step without Pyro.

A 784-400-64 VAE, batch 100. The two sides of a row take turns in one process, and the ratio is of
their medians. Run it on a machine that does nothing else::

    python -m tests.benchmarks.step_time --threads 1 --steps 60
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor, nn

from pyro_mcvae import (
    MALA,
    ULA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)
from tests.benchmarks import by_hand as hand
from tests.benchmarks.by_hand import ais, iwae, sgvb, sis

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


def by_hand(bound: Callable[[Any, Tensor], Tensor], x: Tensor) -> Step:
    step: Step = hand.step(VAE(), bound, x)
    return step


def compare(name: str, ours: Step, theirs: Step, steps: int) -> None:
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(steps + 3):
        for side in (0, 1) if i % 2 else (1, 0):
            start = time.process_time()
            (ours, theirs)[side]()
            times[side].append(time.process_time() - start)
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
                TraceIWAE_ELBO(10, gradient_estimator="reparam", **many),
                RenyiELBO(0, 10, **many),
                1,
            ),
            "SGVB / TraceMeanField_ELBO": (TraceSGVB_ELBO(), TraceMeanField_ELBO(), 3),
            "SGVB estimator A / Trace_ELBO": (
                TraceSGVB_ELBO(1, analytic_kl=False),
                Trace_ELBO(),
                3,
            ),
        }
        for name, (ours, theirs, more) in rows.items():
            compare(name, with_pyro(ours, x), with_pyro(theirs, x), more * args.steps)
        iwae_step = with_pyro(TraceIWAE_ELBO(10, **many), x)
        compare("IWAE-10 / by hand in PyTorch", iwae_step, by_hand(iwae, x), args.steps)
        sgvb_step = with_pyro(TraceSGVB_ELBO(), x)
        compare("SGVB / by hand in PyTorch", sgvb_step, by_hand(sgvb, x), 3 * args.steps)
        one = {"max_plate_nesting": 1}
        for name, kernel in {"fixed": ULA(0.05), "adapting": ULA()}.items():
            sis_step = with_pyro(TraceSIS_ELBO(5, kernel, **one), x)
            compare(f"SIS-5 {name} / by hand in PyTorch", sis_step, by_hand(sis, x), args.steps)
        ais_step = with_pyro(TraceAIS_ELBO(5, MALA(0.05), **many), x)
        compare("AIS-5, 2 particles / by hand in PyTorch", ais_step, by_hand(ais, x), args.steps)
        fast = TraceSIS_ELBO(5, ULA(0.05), gradient_estimator="reweighted", **one)
        full = TraceSIS_ELBO(5, ULA(0.05), **one)
        compare("SIS-5 reweighted / full", with_pyro(fast, x), with_pyro(full, x), args.steps)


if __name__ == "__main__":
    main()
