"""Time and peak memory of evaluating a VAE of MNIST's size (784-400-64): run it::

python tests/benchmarks/evaluation.py --images 1000 --particles 1000
"""

import argparse
import resource
import time

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_mcvae import HMC, log_evidence


class VAE(nn.Module):
    def __init__(self, hidden=400, latent=64):
        super().__init__()
        self.latent = latent
        self.encoder = nn.Sequential(
            nn.Linear(784, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent)
        )
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, 784))

    def model(self, x):
        pyro.module("vae", self)
        with pyro.plate("data", len(x)):
            prior = dist.Normal(x.new_zeros(self.latent), x.new_ones(self.latent)).to_event(1)
            z = pyro.sample("z", prior)
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("vae", self)
        with pyro.plate("data", len(x)):
            loc, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, (0.3 * log_scale).exp()).to_event(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--particles", type=int, default=1000)
    parser.add_argument("--chains", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    pyro.enable_validation(False)
    vae = VAE().to(args.device)
    x = (torch.rand(args.images, 784) < 0.3).float().to(args.device)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"before: peak memory {before:.0f} MiB")
    runs = {
        f"IS, {args.particles} particles": {"num_particles": args.particles},
        f"AIS, {args.steps} steps, HMC(3), {args.chains} chains": {
            "num_particles": args.chains,
            "schedule": args.steps,
            "kernel": HMC(0.1),
        },
    }
    for name, options in runs.items():
        wall, cpu = time.perf_counter(), time.process_time()
        found = log_evidence(vae.model, vae.guide, x, **options)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{name}, {args.images} images: {wall:.1f} s ({cpu:.1f} s CPU), peak memory "
            f"{peak:.0f} MiB, log evidence {float(found.mean):.2f}"
        )


if __name__ == "__main__":
    main()
