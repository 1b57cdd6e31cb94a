"""Posteriors with the shape of a ring, by five losses (Thin et al. 2021, figure 1).

The data are :math:`x_i \\sim N(\\xi (|z_i|^2 + \\zeta), \\sigma^2)` with :math:`z_i \\sim N(0, I)`
in two dimensions. The guide is amortized: a network returns the mean and the scale of
:math:`N(\\mu(x), \\sigma(x)^2 I)`. With Real NVP the draws are transformed by coupling layers,
conditional on x. The chains are those of the paper: ten transitions in latent coordinates, of ULA
(L-MCVAE) and of MALA with the control variate (A-MCVAE)::

    python tutorials/annealing/ring.py --out results
    python tutorials/annealing/ring.py --learn --out results

The figure has the approximations of one posterior: draws of the guide, draws that are resampled by
their weights, or the ends of chains. ``--learn`` also learns xi and zeta, from 1 and 1, as in the
supplement of the paper, and prints the maximum of the exact likelihood beside. The paper does not
have its xi, zeta, sigma, number of data, network and number of transitions.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.distributions.transforms as T
import torch
from pyro.distributions import constraints
from pyro.nn import PyroModule, PyroParam
from pyro.optim.clipped_adam import ClippedAdam
from torch import Tensor, nn
from tqdm import tqdm

from pyro_mcvae import (
    MALA,
    ULA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    refine,
)
from pyro_mcvae.evaluation.plots import STYLES

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from results import Results

(BLUE, _), (ORANGE, _) = STYLES[1:3]
XI, ZETA, SIGMA = 2.0, 0.5, 0.8
X = 5.0  # the datum of the figure, whose ring has a radius of about 1.4


class Model(PyroModule):
    """The model with the true xi and zeta, or with learned ones that start at 1."""

    def __init__(self, learn: bool = False) -> None:
        super().__init__()
        self.xi, self.zeta = torch.tensor(XI), torch.tensor(ZETA)
        if learn:
            self.xi, self.zeta = (
                PyroParam(torch.tensor(1.0), constraints.positive) for _ in range(2)
            )

    def likelihood(self, z: Tensor) -> dist.Normal:
        return dist.Normal(self.xi * (z.square().sum(-1) + self.zeta), SIGMA)

    def forward(self, x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
            pyro.sample("x", self.likelihood(z), obs=x)


def log_evidence(x: Tensor, xi: Tensor | float = XI, zeta: Tensor | float = ZETA) -> Tensor:
    """
    Return the exact log p(x): |z|^2 is exponential with mean 2, and the noise is normal.

    The sum of an exponential and a normal variable has a closed form.
    """
    rate, start = 1 / (2 * torch.as_tensor(xi)), torch.as_tensor(xi * zeta)
    value = rate * (start + rate * SIGMA**2 / 2 - x) + rate.log()
    return value + torch.special.log_ndtr((x - start) / SIGMA - rate * SIGMA)


class Guide(nn.Module):
    """N(mu(x), sigma(x)^2 I), transformed by the layers of Real NVP if ``layers`` > 0."""

    def __init__(self, layers: int = 0, hidden: int = 32) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()),
            nn.Linear(hidden, 3),
        )
        couplings = [T.conditional_affine_coupling(2, 1, [hidden] * 2) for _ in range(layers)]
        self.layers = nn.ModuleList(couplings)

    def forward(self, x: Tensor) -> None:
        # Inputs of about unit scale.
        context = (x.unsqueeze(-1) - 2 * XI) / (2 * XI)
        loc, log_scale = self.network(context).split([2, 1], -1)
        with pyro.plate("data", len(x)):
            base = dist.Normal(loc, log_scale.exp().expand_as(loc)).to_event(1)
            transforms: list[Any] = []
            for layer in self.layers:
                transforms += [layer.condition(context), T.Permute(torch.tensor([1, 0]))]
            law = dist.TransformedDistribution(base, transforms) if transforms else base
            pyro.sample("z", law)


@dataclass
class Method:
    """A loss and a guide, and the results of the training."""

    name: str
    elbo: Any
    layers: int = 0
    draws: Tensor | None = None  # of the guide
    refined: Tensor | None = None  # by weights or chains
    bound: float = math.nan
    error: float = math.nan  # standard error of the bound, over the data
    xi: float = XI
    zeta: float = ZETA


def methods() -> list[Method]:
    """Return the losses of figure 1."""
    num_steps = 10
    chain: dict[str, Any] = {"coordinates": "latent"}
    return [
        Method("VAE", TraceSGVB_ELBO()),
        Method("IWAE-10", TraceIWAE_ELBO(num_steps, gradient_estimator="reparam")),
        Method("Real NVP", TraceSGVB_ELBO(), layers=8),
        Method("A-MCVAE-10", TraceAIS_ELBO(num_steps, MALA(), num_particles=2, **chain)),
        Method("L-MCVAE-10", TraceSIS_ELBO(num_steps, ULA(), **chain)),
    ]


def make_data(count: int) -> Tensor:
    return Model().likelihood(torch.randn(count, 2)).sample()


def train(method: Method, x: Tensor, steps: int, learn: bool) -> tuple[Model, Guide]:
    """Train with minibatches of 100. Store the bound of all data."""
    pyro.clear_param_store()  # has xi and zeta of the loss before
    model, guide = Model(learn), Guide(method.layers)
    loss = method.elbo(model, guide)
    # The learning rate falls to a hundredth, because the last losses compare the methods.
    schedule = {"lr": 1e-2, "lrd": 1e-2 ** (1 / steps)}
    optimizer = ClippedAdam(loss.parameters(), **schedule)
    waiting: list[Tensor] = []
    for _ in tqdm(range(steps), f"{method.name:>16}", leave=False, disable=None):
        waiting = waiting or list(torch.randperm(len(x)).split(100))
        optimizer.zero_grad()
        loss(x[waiting.pop()]).backward()
        optimizer.step()
    each = torch.stack([method.elbo.bounds(model, guide, x).per_datum for _ in range(20)]).mean(0)
    method.bound, method.error = each.mean().item(), each.std().item() / len(x) ** 0.5
    method.xi, method.zeta = model.xi.item(), model.zeta.item()
    return model, guide


def sample(method: Method, model: Model, guide: Guide, count: int) -> None:
    """Store draws of one posterior: of the guide, and refined by the weights or the chains."""

    def draws(**options: Any) -> Tensor:
        result = refine(model, guide, torch.tensor([X]), num_samples=count, **options)
        return result["z"].reshape(-1, 2)

    method.draws = draws(num_particles=1)
    if isinstance(method.elbo, TraceIWAE_ELBO):
        method.refined = draws(num_particles=method.elbo.num_particles)
    elif hasattr(method.elbo, "kernel"):
        chain = {"schedule": method.elbo.schedule, "kernel": method.elbo.kernel}
        method.refined = draws(num_particles=1, warmup=0, coordinates="latent", **chain)


def ring_distance(z: Tensor) -> float:
    """Return the Kolmogorov distance of angles from the uniform law: 0 for a complete ring."""
    angle = (torch.atan2(z[:, 1], z[:, 0]) / (2 * math.pi) + 0.5).sort().values
    return float((angle - torch.linspace(0, 1, len(angle))).abs().max())


def most_likely(x: Tensor) -> tuple[float, float]:
    """Return the xi and zeta with the largest exact likelihood."""
    logs = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.LBFGS([logs], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -log_evidence(x, *logs.exp()).mean()
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    xi, zeta = logs.detach().exp().tolist()
    return xi, zeta


def draw(result: list[Method], path: Path) -> None:
    """Plot the true posterior, and the draws of each method."""
    from matplotlib.figure import Figure

    side = torch.linspace(-2.6, 2.6, 161)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
    prior = dist.Normal(0.0, 1.0).log_prob(grid).sum(-1)
    density = (prior + Model().likelihood(grid).log_prob(torch.tensor(X))).exp()
    figure = Figure(figsize=(2.3 * (len(result) + 1), 4.9), layout="constrained")
    axes = figure.subplots(2, len(result) + 1, sharex=True, sharey=True)
    rows: list[tuple[str, Callable[[Method], Tensor | None], str]] = [
        ("draws of the guide", lambda method: method.draws, BLUE),
        ("resampled, or ends of chains", lambda method: method.refined, ORANGE),
    ]
    for row, (label, points_of, color) in zip(axes, rows, strict=True):
        labelled = False
        for panel, method in zip(row[1:], result, strict=True):
            panel.set(aspect="equal", xticks=[], yticks=[], xlim=(-2.6, 2.6), ylim=(-2.6, 2.6))
            points = points_of(method)
            if points is None:
                panel.set_axis_off()
                continue
            panel.set_ylabel("" if labelled else label)
            labelled = True
            level = [0.3 * float(density.max())]
            panel.contour(side, side, density, levels=level, colors="k", linewidths=0.7)
            panel.scatter(*points[:1000].T, s=2, alpha=0.4, color=color, linewidths=0)
    for panel, method in zip(axes[0, 1:], result, strict=True):
        panel.set_title(f"{method.name}\nbound {method.bound:.2f}", fontsize=10)
    axes[0, 0].contourf(side, side, density, levels=12, cmap="Blues")
    axes[0, 0].set(aspect="equal", xticks=[], yticks=[], title="true posterior")
    axes[1, 0].set_axis_off()
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> list[Method]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="training steps of each loss")
    parser.add_argument("--data", type=int, default=1000, help="number of data")
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--learn", action="store_true", help="learn xi and zeta")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    args = parser.parse_args(argv)

    pyro.set_rng_seed(args.seed)
    x, result = make_data(args.data), methods()
    stem = "ring_learned" if args.learn else "ring"
    results = Results(args.out / f"{stem}.csv", args.seed, argv)
    best = most_likely(x) if args.learn else (XI, ZETA)
    exact = float(log_evidence(x, *best).mean())
    print(f"exact: log p(x) {exact:.3f}, xi {best[0]:.3f}, zeta {best[1]:.3f}")
    with pyro.validation_enabled(False):
        for method in result:
            sample(method, *train(method, x, args.steps, args.learn), args.draws)
            assert method.draws is not None
            ends = method.draws if method.refined is None else method.refined
            angles = ring_distance(method.draws), ring_distance(ends)
            results.add(
                objective=method.name,
                bound=method.bound,
                log_evidence=exact,
                likelihood=float(log_evidence(x, method.xi, method.zeta).mean()),
                xi=method.xi,
                zeta=method.zeta,
                angle_guide=angles[0],
                angle_refined=angles[1],
            )
            print(
                f"{method.name:12} bound {method.bound:7.3f} ± {method.error:.3f}, "
                f"xi {method.xi:.3f}, zeta {method.zeta:.3f}, "
                f"error of the angles {angles[0]:.2f}, refined {angles[1]:.2f}",
                flush=True,
            )
    draw(result, args.out / f"{stem}.png")
    return result


if __name__ == "__main__":
    main()
