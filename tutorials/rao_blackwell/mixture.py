"""A Gaussian mixture (Liu et al. 2019, section 5.2): 200 points, 10 components, two dimensions.

Memberships are summed or sampled; the guide of the means is a point. Both start from K-means, as in
the paper, and the logit of the K-means label starts at 3, as in the published code. The ELBO has
all terms of both (in the published code some are missing)::

    python tutorials/rao_blackwell/mixture.py --out results
    python tutorials/rao_blackwell/mixture.py --out results --paper

``--paper`` is the scale of the paper, 20 runs of each estimator. ``--start points`` starts with
uniform memberships and random points as means, whose guide is Gaussian: q(z) is not concentrated
there, so sums of few categories gain less.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import Results, draw_curves, write_table
from torch import Tensor, nn

from pyro_mcvae import IndependentDraw, TraceRaoBlackwell_ELBO

COMPONENTS, SPREAD, EVERY = 10, 5.0, 25


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
    """The paper's guide: points for the means, logits for the memberships."""

    def __init__(self, loc: Tensor, logits: Tensor) -> None:
        super().__init__()
        self.loc, self.logits = nn.Parameter(loc.clone()), nn.Parameter(logits.clone())

    def means(self) -> Any:
        return dist.Delta(self.loc, event_dim=1)

    def forward(self, x: Tensor) -> None:
        with pyro.plate("components", COMPONENTS):
            pyro.sample("mean", self.means())
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Categorical(logits=self.logits))


class GaussianGuide(Guide):
    def __init__(self, loc: Tensor, logits: Tensor) -> None:
        super().__init__(loc, logits)
        self.log_scale = nn.Parameter(torch.full((COMPONENTS, 2), -1.0))

    def means(self) -> Any:
        return dist.Normal(self.loc, self.log_scale.exp()).to_event(1)


def k_means(x: Tensor) -> Guide:
    """Return the paper's guide at the centers and labels of K-means."""
    from sklearn.cluster import KMeans

    result = KMeans(COMPONENTS, n_init=10, random_state=0).fit(x.numpy())
    labels = torch.as_tensor(result.labels_).long()
    logits = 3.0 * nn.functional.one_hot(labels, COMPONENTS).float()
    return Guide(torch.as_tensor(result.cluster_centers_).float(), logits)


def points(x: Tensor) -> Guide:
    """Return a Gaussian guide at random points, with uniform memberships."""
    return GaussianGuide(x[torch.randperm(len(x))[:COMPONENTS]], torch.zeros(len(x), COMPONENTS))


STARTS: dict[str, Callable[[Tensor], Guide]] = {"k-means": k_means, "points": points}


def train(
    x: Tensor, start: str, elbo: TraceRaoBlackwell_ELBO, steps: int, seed: int
) -> list[float]:
    """Return the negative ELBO, with memberships summed, after every 25 steps."""
    pyro.set_rng_seed(seed)
    guide = STARTS[start](x)
    module = elbo(model, guide)
    module(x)
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.05)
    exact_sum, losses = TraceRaoBlackwell_ELBO(math.inf), []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        module(x).backward()
        optimizer.step()
        if step % EVERY == 0 or step == steps:
            losses.append(exact_sum.loss(model, guide, x))
    return losses


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--paper", action="store_true", help="20 runs, from K-means")
    parser.add_argument("--start", choices=STARTS, default="k-means")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data; runs have 0, 1, ...")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args(argv)
    if args.paper:
        args.repeats, args.start = 20, "k-means"
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    pyro.set_rng_seed(args.seed)
    x = make_data(200)
    plus = {"baseline": IndependentDraw()}
    methods: dict[str, dict[str, Any]] = {
        **{f"k = {k}, n = 1": {"num_categories": k, **plus} for k in (0, 1, 3, 5, COMPONENTS)},
        **{f"k = 0, n = {n}": {"num_categories": 0, "num_samples": n, **plus} for n in (2, 4)},
    }
    recorded = [s for s in range(1, args.steps + 1) if s % EVERY == 0 or s == args.steps]
    marks = sorted({max(0, len(recorded) // part - 1) for part in (4, 2, 1)})
    curves, rows, results = {}, [], Results(args.out / "mixture.csv", args.seed, argv)
    for name, options in methods.items():
        runs = [
            train(x, args.start, TraceRaoBlackwell_ELBO(**options), args.steps, seed)
            for seed in range(args.repeats)
        ]
        result = torch.tensor(runs)
        curves[name] = result.mean(0).tolist()
        row = [name]
        for mark in marks:
            values, step = result[:, mark], recorded[mark]
            error = values.std().item() / len(values) ** 0.5
            loss = values.mean().item()
            results.add(method=name, step=step, negative_elbo=loss, standard_error=error)
            row.append(f"{loss:.1f} ± {error:.1f}")
        rows.append(row)
        print(row, flush=True)
    header = ["REINFORCE+", *(f"-ELBO after {recorded[mark]} steps" for mark in marks)]
    print(write_table(args.out / "mixture.md", header, rows))
    draw_curves(args.out / "mixture.png", curves, f"steps / {EVERY}", "-ELBO")


if __name__ == "__main__":
    main()
