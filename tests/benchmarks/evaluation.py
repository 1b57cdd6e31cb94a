"""Time and peak memory of evaluating a VAE of MNIST's size (784-400-64): run it::

    python tests/benchmarks/evaluation.py --data-root data --images 1000 --particles 1000

``--data-root`` is the folder of ``MNIST/raw/*.gz``: a VAE is trained on it for ``--epochs`` and
evaluated on its test images. Without it weights are those of the initialization, and images random.
"""

import argparse
import gzip
import os
import resource
import time
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import nn

from pyro_mcvae import HMC, TraceSGVB_ELBO, log_evidence


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


def images(root, kind):
    """Gray values in [0, 1], one image per row."""
    with gzip.open(root / "MNIST" / "raw" / f"{kind}-images-idx3-ubyte.gz") as file:
        pixels = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8, offset=16)
    return pixels.view(-1, 784).float() / 255


def train(vae, pixels, epochs):
    svi = SVI(vae.model, vae.guide, pyro.optim.Adam({"lr": 1e-3}), loss=TraceSGVB_ELBO())
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(pixels)).split(100):
            total += svi.step(pixels[rows].bernoulli())
        print(f"epoch {epoch + 1}: ELBO {-total / len(pixels):.2f} nats per image")


def resident(begin=False):
    """The most memory of the process in MiB, since the last call with ``begin`` (on Linux)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(row for row in status.read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def evaluate(name, vae, x, options):
    before = resident(begin=True)
    wall, cpu = time.perf_counter(), time.process_time()
    result = log_evidence(vae.model, vae.guide, x, **options)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    error = float(result.standard_error.square().sum().sqrt()) / len(x)
    k = result.pareto_k[result.pareto_k.isfinite()]
    tail = f", Pareto k median {float(k.median()):.2f}" if len(k) else ""
    print(
        f"{name}, {len(x)} images: {wall:.1f} s ({cpu:.1f} s CPU), memory {before:.0f} MiB before, "
        f"{resident():.0f} at the most, "
        f"bound {float(result.bound.mean()):.2f}, log evidence {float(result.mean):.2f} ± "
        f"{error:.2f}{tail}; load {os.getloadavg()[0]:.1f}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="the folder of MNIST/")
    parser.add_argument("--epochs", type=int, default=3, help="of training on it")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--particles", type=int, nargs="+", default=[1000])
    parser.add_argument("--chains", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    pyro.enable_validation(False)
    vae = VAE().to(args.device)
    x = (torch.rand(args.images, 784) < 0.3).float().to(args.device)
    if args.data_root is not None:
        train(vae, images(args.data_root, "train").to(args.device), args.epochs)
        x = images(args.data_root, "t10k")[: args.images].bernoulli().to(args.device)
    chains = {"num_particles": args.chains, "schedule": args.steps, "kernel": HMC()}
    evaluate(f"AIS, {args.steps} steps, HMC(3), {args.chains} chains", vae, x, chains)
    for count in args.particles:
        evaluate(f"IS, {count} particles", vae, x, {"num_particles": count})


if __name__ == "__main__":
    main()
