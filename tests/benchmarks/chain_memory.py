"""Peak memory and time of one SIS step by the way in which its gradient is found.

A 784-400-64 VAE, batch 1000. Each row runs in a process of its own::

    python -m tests.benchmarks.chain_memory --steps 20
"""

import argparse
import resource
import subprocess
import sys
import time

import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_mcvae import ULA, TraceSIS_ELBO
from tests.benchmarks.step_time import VAE

WAYS = {
    "full": {},
    "reweighted": {"gradient_estimator": "reweighted"},
}


def measure(way: str, num_steps: int, batch: int) -> None:
    torch.set_num_threads(1)
    vae, x = VAE(), torch.rand(batch, 784).bernoulli()
    elbo = TraceSIS_ELBO(num_steps, ULA(0.01), max_plate_nesting=1, **WAYS[way])
    svi = SVI(vae.model, vae.guide, Adam({"lr": 1e-3}), loss=elbo)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    svi.step(x)
    start = time.process_time()
    for _ in range(3):
        svi.step(x)
    seconds = (time.process_time() - start) / 3
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"K={num_steps:3}  {way:24} {peak / 1024:8.0f} MB {1e3 * seconds:8.0f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="the larger number of chain steps")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--way", choices=WAYS)
    args = parser.parse_args()
    if args.way:
        return measure(args.way, args.steps, args.batch)
    for num_steps in (args.steps // 4, args.steps):
        for way in WAYS:
            flags = ["--way", way, "--steps", str(num_steps), "--batch", str(args.batch)]
            subprocess.run(
                [sys.executable, "-m", "tests.benchmarks.chain_memory", *flags], check=True
            )
    return None


if __name__ == "__main__":
    main()
