"""Distributions of annealed bounds and their gradients (Thin et al. 2021, figure 2).

The model is probabilistic PCA, z ~ N(0, I), x ~ N(theta_0 + theta_1 z, sigma^2 I), for which
log p(x) and its gradient are known. The guide is an amortized normal distribution with independent
coordinates, whose mean and log scale are linear in x. It is trained by IWAE with 100 draws, at
fixed theta. For each estimator the script draws

* the error of the bound, log p-hat - log p, per datum;
* the errors of the gradient in theta_0 and theta_1, in the direction of the exact gradient and as
  a total variance, both relative to the norm of the exact gradient.

L-K is SIS with K Langevin moves, A-K is AIS with K Metropolis-adjusted ones and a single chain (no
control variate), and A-K, CV has the control variate of eq. 26, for two chains. *Learned reversal*
replaces the reverse density of L-K by N(mu(z), sigma(z)^2), as in section 2.2 of the supplement,
and *learned correction* adds mu(z) to the mean of ULA's own reversal::

    python tutorials/annealing/ppca_gradients.py
    python tutorials/annealing/ppca_gradients.py --data-root data --paper

``--paper`` is the setting of the paper: 100 images of MNIST, 100 latents, 200 draws. The paper does
not have its theta, sigma and step sizes: theta has the initial weights of ``torch.nn.Linear``,
sigma is 0.1, and each step size gives the tightest bound of those in the script.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from tqdm import tqdm

from pyro_mcvae import (
    MALA,
    ULA,
    GaussianReverse,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
import data
from results import Results

SIGMA = 0.1
STEPS = (1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 9e-4, 1.2e-3, 1.6e-3)


class PCA(nn.Module):
    def __init__(self, x: Tensor, num_latents: int) -> None:
        super().__init__()
        self.x = x
        linear = nn.Linear(num_latents, x.shape[1])
        self.theta_0, self.theta_1 = linear.bias, linear.weight

    def forward(self) -> None:
        with pyro.plate("data", len(self.x)):
            prior = dist.Normal(self.x.new_zeros(self.theta_1.shape[1]), 1.0).to_event(1)
            mean = self.theta_0 + pyro.sample("z", prior) @ self.theta_1.T
            pyro.sample("x", dist.Normal(mean, SIGMA).to_event(1), obs=self.x)

    def log_evidence(self) -> Tensor:
        """Return the exact log p(x) of all data."""
        noise = torch.full((self.x.shape[1],), SIGMA**2)
        marginal = dist.LowRankMultivariateNormal(self.theta_0, self.theta_1, noise)
        return marginal.log_prob(self.x).sum()


class Guide(nn.Module):
    """Start at the best normal distribution with independent coordinates."""

    def __init__(self, model: PCA) -> None:
        super().__init__()
        self.x = model.x
        pixels, latents = model.theta_1.shape
        self.loc, self.log_scale = nn.Linear(pixels, latents), nn.Linear(pixels, latents)
        with torch.no_grad():
            weight, bias = model.theta_1, model.theta_0
            precision = torch.eye(latents) + weight.T @ weight / SIGMA**2
            gain = torch.linalg.solve(precision, weight.T / SIGMA**2)
            self.loc.weight.copy_(gain)
            self.loc.bias.copy_(-gain @ bias)
            self.log_scale.weight.zero_()
            self.log_scale.bias.copy_(-0.5 * precision.diagonal().log())

    def forward(self) -> None:
        with pyro.plate("data", len(self.x)):
            scale = self.log_scale(self.x).exp()
            pyro.sample("z", dist.Normal(self.loc(self.x), scale).to_event(1))


class LearnedReverse(nn.Module):
    """
    Reverse moves to N(mu(z), sigma(z)^2); with ``own``, mu(z) is added to ULA's own mean.

    It starts as a normal distribution around z, or as ULA's own reversal.
    """

    def __init__(self, num_latents: int, step_size: float, own: bool) -> None:
        super().__init__()
        self.step_size, self.own = step_size, own
        self.layers = nn.Sequential(
            nn.Linear(num_latents, 128), nn.Tanh(), nn.Linear(128, 2 * num_latents)
        )
        nn.init.zeros_(self.layers[2].weight)
        nn.init.zeros_(self.layers[2].bias)

    def forward(self, position: Tensor, gradient: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        shift, log_scale = self.layers(position).chunk(2, -1)
        if not self.own:  # remove the drift of ULA from the mean
            shift = shift - (self.step_size / 2) ** 0.5 * gradient
        return shift, log_scale


def sis(num_steps: int, step_size: float, reverse: nn.Module | None = None) -> Any:
    kernel = ULA(step_size, reverse=None if reverse is None else GaussianReverse(reverse))
    return TraceSIS_ELBO(num_steps, kernel, coordinates="latent")


def ais(num_steps: int, step_size: float, num_particles: int) -> Any:
    options: dict[str, Any] = {"coordinates": "latent", "num_particles": num_particles}
    return TraceAIS_ELBO(num_steps, MALA(step_size), **options)


def estimators() -> dict[str, Callable[[float], Any]]:
    """Return the losses of figure 2, by name, as functions of the step size."""
    result: dict[str, Callable[[float], Any]] = {}
    for k in (5, 10):
        result[f"L-{k}"] = lambda step, k=k: sis(k, step)
    for k in (5, 10):
        result[f"A-{k}"] = lambda step, k=k: ais(k, step, 1)
        result[f"A-{k}, CV"] = lambda step, k=k: ais(k, step, 2)
    return result


def fit(elbo: Any, model: PCA, guide: nn.Module, parts: nn.Module, steps: int, rate: float) -> None:
    """Train some parameters with a loss."""
    module = elbo(model, guide)
    optimizer = torch.optim.Adam(parts.parameters(), lr=rate)
    for _ in tqdm(range(steps), "training", leave=False, disable=None):
        optimizer.zero_grad()
        module().backward()
        optimizer.step()


def gap(elbo: Any, model: PCA, guide: Guide, repeats: int) -> float:
    """Return the mean bound minus log p(x), per datum."""
    with torch.no_grad():
        losses = torch.tensor([float(elbo.loss(model, guide)) for _ in range(repeats)])
        value = (-losses.mean() - model.log_evidence()) / len(model.x)
    return float(value.nan_to_num(-torch.inf))


def draws(elbo: Any, model: PCA, guide: Guide, count: int) -> tuple[Tensor, list[Tensor]]:
    """Return errors of the bound per datum, ``[count]``, and gradients in theta_0 and theta_1."""
    module, theta = elbo(model, guide), (model.theta_0, model.theta_1)
    exact = model.log_evidence().detach()
    bounds, gradients = [], []
    for _ in tqdm(range(count), "draws", leave=False, disable=None):
        loss = module()
        gradients.append([-g.flatten() for g in torch.autograd.grad(loss, theta)])
        bounds.append((-loss.detach() - exact) / len(model.x))
    return torch.stack(bounds), [torch.stack(part) for part in zip(*gradients, strict=True)]


def draw(values: dict[str, list[Tensor]], path: Path) -> None:
    from matplotlib.figure import Figure

    from pyro_mcvae.evaluation.plots import STYLES

    titles = ["log p-hat - log p, nats per datum"]
    titles += [f"gradient in theta_{i}, relative error" for i in range(2)]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels, middle = figure.subplots(1, 3, sharey=True), {"color": STYLES[1][0]}
    for axes, title, part in zip(panels, titles, zip(*values.values(), strict=True), strict=True):
        boxes = [x.numpy() for x in part]
        axes.boxplot(boxes, orientation="horizontal", showfliers=False, medianprops=middle)
        axes.axvline(0, lw=0.6, color="0.5")
        axes.set_title(title, fontsize=10)
    panels[0].set_yticks(range(1, len(values) + 1), list(values))
    panels[0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data.add_data_flags(parser, default=None)
    parser.add_argument("--latent", type=int, default=10)
    parser.add_argument("--images", type=int, default=20, help="number of data")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--fit", type=int, default=100, help="steps of IWAE for the guide")
    parser.add_argument("--reverse", type=int, default=200, help="steps for learned reversals")
    parser.add_argument("--search", type=int, default=5, help="evaluations per step size")
    parser.add_argument("--paper", action="store_true", help="100 images and latents, 200 draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    args = parser.parse_args(argv)
    if args.paper:
        if args.data_root is None:
            parser.error("--paper needs --data-root, the folder of MNIST")
        args.images, args.latent, args.draws, args.fit, args.reverse = 100, 100, 200, 200, 500
        args.search = 10
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    pyro.set_rng_seed(args.seed)
    if args.data_root is None:
        x = data.digits()[: args.images]
    else:
        x = data.mnist(args.data_root, True, args.download)[0][: args.images]
    model = PCA(x, args.latent)
    guide = Guide(model)
    fit(TraceIWAE_ELBO(100), model, guide, guide, args.fit, 1e-4)
    guide.requires_grad_(False)
    print(f"ELBO {gap(TraceSGVB_ELBO(analytic_kl=False), model, guide, 20):.2f} nats per datum")
    print(f"IWAE-100 {gap(TraceIWAE_ELBO(100), model, guide, 20):.2f}", flush=True)
    exact = torch.autograd.grad(model.log_evidence(), (model.theta_0, model.theta_1))
    losses = {}
    for name, make in estimators().items():
        step = max(STEPS, key=lambda s, make=make: gap(make(s), model, guide, args.search))
        losses[name] = make(step), step
        if name == "L-5":
            for label, own in (("learned reversal", False), ("learned correction", True)):
                reverse = LearnedReverse(args.latent, step, own)
                elbo = sis(5, step, reverse)
                fit(elbo, model, guide, reverse, args.reverse, 1e-3)
                reverse.requires_grad_(False)
                losses[f"L-5, {label}"] = elbo, step
    results = Results(args.out / "ppca_gradients.csv", args.seed, argv)
    values = {}
    print(f"{'':26}{'step':>8}{'-gap':>8}{'sd':>7}{'grad 0: bias, sd':>18}{'grad 1: bias, sd':>18}")
    for name, (elbo, step) in losses.items():
        bounds, gradients = draws(elbo, model, guide, args.draws)
        row = {"estimator": name, "step_size": step}
        row |= {"gap": float(bounds.mean()), "gap_sd": float(bounds.std())}
        text, parts = f"{name:26}{step:8.1e}{row['gap']:8.2f}{row['gap_sd']:7.2f}", [bounds]
        for i, (gradient, truth) in enumerate(zip(gradients, exact, strict=True)):
            norm = truth.norm()
            along = (gradient @ truth.flatten() / norm - norm) / norm
            row[f"bias_{i}"], row[f"sd_{i}"] = float(along.mean()), float(along.std())
            # The root of the total variance: of all entries, not only along the gradient.
            row[f"total_sd_{i}"] = float(gradient.var(0).sum().sqrt() / norm)
            text += f"{row[f'bias_{i}']:10.4f}{row[f'total_sd_{i}']:8.4f}"
            parts.append(along)
        values[name] = parts
        results.add(**row)
        print(text, flush=True)
    draw(values, args.out / "ppca_gradients.png")
    return results.rows


if __name__ == "__main__":
    main()
