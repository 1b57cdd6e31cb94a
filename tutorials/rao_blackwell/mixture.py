"""A Gaussian mixture (Liu et al. 2019, section 5.2): 200 points, 10 components, two dimensions.

Memberships are summed or sampled; means have a Gaussian guide. The ELBO has all terms of both (in
the published code some are missing)::

    python tutorials/rao_blackwell/mixture.py --out results
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from common import Results, draw_curves, write_table
from torch import Tensor, nn

from pyro_mcvae import IndependentDraw, TraceRaoBlackwell_ELBO

COMPONENTS, SPREAD = 10, 5.0


def make_data(count: int) -> Tensor:
    means = SPREAD * torch.randn(COMPONENTS, 2)
    return means[torch.randint(COMPONENTS, (count,))] + torch.randn(count, 2)


def model(x: Tensor) -> None:
    with pyro.plate("components", COMPONENTS):
        mean = pyro.sample("mean", dist.Normal(torch.zeros(2), SPREAD).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(torch.ones(COMPONENTS)))
        pyro.sample("x", dist.Normal(mean[z], 1.0).to_event(1), obs=x)


class Guide(nn.Module):
    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.loc = nn.Parameter(x[torch.randperm(len(x))[:COMPONENTS]].clone())
        self.log_scale = nn.Parameter(torch.full((COMPONENTS, 2), -1.0))
        self.logits = nn.Parameter(torch.zeros(len(x), COMPONENTS))

    def forward(self, x: Tensor) -> None:
        with pyro.plate("components", COMPONENTS):
            pyro.sample("mean", dist.Normal(self.loc, self.log_scale.exp()).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Categorical(logits=self.logits))


def train(x: Tensor, elbo: TraceRaoBlackwell_ELBO, steps: int, seed: int) -> list[float]:
    pyro.set_rng_seed(seed)
    guide = Guide(x)
    module = elbo(model, guide)
    module(x)
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.05)
    exact_sum, losses = TraceRaoBlackwell_ELBO(math.inf), []
    for step in range(steps):
        optimizer.zero_grad()
        module(x).backward()
        optimizer.step()
        if step % 10 == 0:
            losses.append(exact_sum.loss(model, guide, x))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the data; runs have 0, 1, ...")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    pyro.enable_validation(False)
    pyro.set_rng_seed(args.seed)
    x = make_data(200)
    plus = {"baseline": IndependentDraw()}
    methods = {
        **{f"k = {k}, n = 1": {"num_categories": k, **plus} for k in (0, 1, 3, 5, COMPONENTS)},
        **{f"k = 0, n = {n}": {"num_categories": 0, "num_samples": n, **plus} for n in (2, 4)},
    }
    curves, rows, results = {}, [], Results(args.out / "mixture.csv", args.seed)
    for name, options in methods.items():
        runs = [
            train(x, TraceRaoBlackwell_ELBO(**options), args.steps, seed)  # type: ignore[arg-type]
            for seed in range(args.repeats)
        ]
        result = torch.tensor(runs)
        curves[name] = result.mean(0).tolist()
        middle = result[:, result.shape[1] // 4]
        spread = [
            f"{t.mean():.1f} ± {t.std() / len(t) ** 0.5:.1f}" for t in (middle, result[:, -1])
        ]
        rows.append([name, *spread])
        for step, values in ((args.steps // 4, middle), (args.steps, result[:, -1])):
            error = values.std().item() / len(values) ** 0.5
            loss = values.mean().item()
            results.add(method=name, step=step, negative_elbo=loss, standard_error=error)
        print(rows[-1], flush=True)
    header = ["REINFORCE+", f"-ELBO after {args.steps // 4} steps", f"after {args.steps}"]
    print(write_table(args.out / "mixture.md", header, rows))
    draw_curves(args.out / "mixture.png", curves, "steps / 10", "-ELBO")


if __name__ == "__main__":
    main()
