"""Tried and dropped: a Markov chain for each datum that goes on from epoch to epoch, and no bound.

    python -m tests.benchmarks.persistent_chains --transitions 1 5

The VAE of the quickstart on scikit-learn's digits, trained on the ends of chains of HMC (two
leapfrog steps) that move each image's code towards its posterior under the decoder of the moment,
from where they were an epoch before. The encoder follows their draws. Evaluated on held-out images
like the quickstart, and by annealed chains.
"""

import argparse
import time

import pyro
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal
from tqdm import tqdm

from pyro_mcvae import HMC, TraceIWAE_ELBO, log_evidence
from tutorials.quickstart import VAE, load_digits

NUM_LEAPFROG, TARGET, BATCH = 2, 0.8, 100


class Chains:
    """A code for each image, and a step size for all that adapts to an acceptance of 0.8."""

    def __init__(self, vae: VAE, count: int) -> None:
        self.vae, self.codes = vae, torch.randn(count, vae.num_latents)
        self.step_size, self.evaluations = torch.tensor(0.2), 0

    def log_joint(self, z: Tensor, x: Tensor) -> Tensor:
        likelihood = Bernoulli(logits=self.vae.decoder(z)).log_prob(x).sum(-1)
        return Normal(0.0, 1.0).log_prob(z).sum(-1) + likelihood

    def gradient(self, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        self.evaluations += 1
        z = z.detach().requires_grad_()
        value = self.log_joint(z, x)
        return value.detach(), torch.autograd.grad(value.sum(), z)[0]

    def move(self, rows: Tensor, x: Tensor, transitions: int) -> Tensor:
        z = self.codes[rows]
        value, slope = self.gradient(z, x)
        for _ in range(transitions):
            start = torch.randn_like(z)
            new, new_slope, momentum = z, slope, start
            for _ in range(NUM_LEAPFROG):
                momentum = momentum + self.step_size / 2 * new_slope
                new = new + self.step_size * momentum
                new_value, new_slope = self.gradient(new, x)
                momentum = momentum + self.step_size / 2 * new_slope
            kinetic = (start.square() - momentum.square()).sum(-1) / 2
            fraction = (new_value - value + kinetic).exp().clamp(max=1.0)
            taken = torch.rand_like(fraction) < fraction
            z = torch.where(taken[:, None], new, z)
            slope = torch.where(taken[:, None], new_slope, slope)
            value = torch.where(taken, new_value, value)
            self.step_size = self.step_size * (1 + 0.05 * (fraction.mean() - TARGET))
        self.codes[rows] = z
        return z


def run(transitions: int, epochs: int, seed: int) -> None:
    pyro.set_rng_seed(seed)
    train, test = load_digits()
    test = test.bernoulli(generator=torch.Generator().manual_seed(0))
    vae = VAE(train.shape[-1], 200, 16)
    chains, optim = Chains(vae, len(train)), torch.optim.Adam(vae.parameters(), lr=3e-3)
    start, steps = time.process_time(), 0
    for _ in tqdm(range(epochs), f"{transitions} transitions", unit="epoch"):
        for rows in torch.randperm(len(train)).split(BATCH):
            x = train[rows].bernoulli()
            z = chains.move(rows, x, transitions)
            loc, log_scale = vae.encoder(x).chunk(2, -1)
            log_q = Normal(loc, log_scale.exp()).log_prob(z).sum(-1)
            optim.zero_grad()
            (-chains.log_joint(z, x) - log_q).mean().backward()
            optim.step()
            steps += 1
    seconds = time.process_time() - start
    iwae = TraceIWAE_ELBO(1000)
    with torch.no_grad():
        parts = [iwae.bounds(vae.model, vae.guide, x).per_datum for x in test.split(50)]
    weights = torch.cat(parts)
    annealed = log_evidence(
        vae.model, vae.guide, test, num_particles=10, schedule=100, kernel=HMC(num_leapfrog=3)
    )
    print(
        f"{transitions} transitions, {epochs} epochs, seed {seed}: "
        f"{chains.evaluations / steps:.0f} gradients, {1e3 * seconds / steps:.1f} CPU ms a step; "
        f"log p(x) per image {weights.mean():.2f} ± {weights.std() / len(test) ** 0.5:.2f} by "
        f"weights, {annealed.log_evidence.mean():.2f} by chains"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transitions", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for transitions in args.transitions:
        run(transitions, args.epochs, args.seed)


if __name__ == "__main__":
    main()
