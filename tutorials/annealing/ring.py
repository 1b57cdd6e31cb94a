"""Train Gaussian guides for a posterior with the shape of a ring (Thin et al. 2021, figure 1).

:math:`x \\sim N(\\xi (|z|^2 + \\zeta), \\sigma^2)` with :math:`z \\sim N(0, I)` in two dimensions.
A guide is trained with each objective. The figure has draws of the guide, draws that are resampled
by their weights or moved by the chain, and the true posterior on a grid. Run it::

    python tutorials/annealing/ring.py --out results
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.infer import SVI
from torch import Tensor
from tqdm import tqdm

from pyro_mcvae import (
    MALA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
    refine,
)
from pyro_mcvae.chains.parameters import AdaptiveStepSize
from pyro_mcvae.evaluation.plots import STYLES

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from results import Results

(BLUE, _), (ORANGE, _) = STYLES[1:3]
XI, ZETA, SIGMA, X = 1.0, 0.5, 0.4, 2.5


def log_joint(z: Tensor) -> Tensor:
    prior = dist.Normal(0.0, 1.0).log_prob(z).sum(-1)
    return prior + dist.Normal(XI * (z.square().sum(-1) + ZETA), SIGMA).log_prob(torch.tensor(X))


def model(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        pyro.sample("x", dist.Normal(XI * (z.square().sum(-1) + ZETA), SIGMA), obs=x)


def normal_guide(x: Tensor) -> None:
    loc = pyro.param("loc", lambda: torch.tensor([0.3, 0.1]))
    scale = pyro.param("scale", lambda: torch.full((2,), 0.5), constraint=constraints.positive)
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(loc, scale).expand([len(x), 2]).to_event(1))


class FlowGuide:
    """A guide with Pyro's spline coupling layers."""

    def __init__(self) -> None:
        import pyro.distributions.transforms as T

        self.layers = torch.nn.ModuleList()
        self.transforms: list[Any] = []
        for _ in range(6):
            layer = T.spline_coupling(2, hidden_dims=[32, 32], count_bins=8, bound=4.0)
            self.layers.append(layer)
            self.transforms += [layer, T.Permute(torch.tensor([1, 0]))]

    def __call__(self, x: Tensor) -> None:
        pyro.module("flow", self.layers)
        base = dist.Normal(0.0, 1.0).expand([len(x), 2]).to_event(1)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.TransformedDistribution(base, self.transforms))


@dataclass
class Method:
    name: str
    elbo: Any
    guide: Any
    draws: Tensor | None = None
    refined: Tensor | None = None
    bound: float = math.nan
    error: float = math.nan  # standard error of the bound


def methods() -> list[Method]:
    # The log density decreases like |z|^4, so some chains diverge at the default target.
    step_size = AdaptiveStepSize(target_acceptance=0.95)
    underdamped = UnderdampedLangevin(step_size, momentum=0.5)
    return [
        Method("ELBO", TraceSGVB_ELBO(num_particles=10), normal_guide),
        Method("IWAE-10", TraceIWAE_ELBO(10), normal_guide),
        Method("ELBO, flow guide", TraceSGVB_ELBO(num_particles=10), FlowGuide()),
        Method("SIS-10", TraceSIS_ELBO(10, underdamped, num_particles=10), normal_guide),
        Method("AIS-10", TraceAIS_ELBO(10, MALA(), num_particles=10), normal_guide),
    ]


def train(method: Method, x: Tensor, steps: int) -> None:
    pyro.clear_param_store()
    svi = SVI(model, method.guide, pyro.optim.ClippedAdam({"lr": 5e-3}), loss=method.elbo)
    losses = []
    for _ in tqdm(range(steps), f"{method.name:>16}", leave=False):
        losses.append(svi.step(x))
    last = torch.tensor(losses[-steps // 5 :])
    method.bound = -float(last.mean())
    method.error = float(last.std(correction=0)) / math.sqrt(max(1, len(last) - 1))


def sample(method: Method, x: Tensor, count: int) -> None:
    """Store draws of the guide, and draws refined by the weights or chains of the objective."""

    def draws(**options: Any) -> Tensor:
        result = refine(model, method.guide, x, num_samples=count, **options)
        return result["z"].reshape(-1, 2)

    method.draws = draws(num_particles=1)
    if isinstance(method.elbo, TraceIWAE_ELBO):
        method.refined = draws(num_particles=10)
    elif hasattr(method.elbo, "kernel"):
        # Resample the last positions of unadjusted chains by their weights.
        candidates = 1 if method.elbo.kernel.adjusted else 10
        chain = {"schedule": method.elbo.schedule, "kernel": method.elbo.kernel, "warmup": 0}
        method.refined = draws(num_particles=candidates, **chain)


def draw(result: list[Method], path: Path) -> None:
    import matplotlib.pyplot as plt

    side = torch.linspace(-2.6, 2.6, 161)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
    density = log_joint(grid).exp()
    figure, axes = plt.subplots(
        2,
        len(result) + 1,
        figsize=(2.3 * (len(result) + 1), 4.9),
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for row in axes:
        for panel in row:
            panel.set(aspect="equal", xticks=[], yticks=[], xlim=(-2.6, 2.6), ylim=(-2.6, 2.6))
            panel.contour(
                side, side, density, levels=[0.3 * float(density.max())], colors="k", linewidths=0.7
            )
    axes[0, 0].contourf(side, side, density, levels=12, cmap="Blues")
    axes[0, 0].set_title("true posterior")
    axes[1, 0].set_axis_off()
    for artist in list(axes[1, 0].collections):
        artist.remove()
    axes[1, 0].text(
        0,
        0,
        "above: draws of\nthe trained guide\n\nbelow: resampled,\nor moved by\nthe chain",
        ha="center",
        va="center",
    )
    for i, method in enumerate(result, 1):
        axes[0, i].set_title(f"{method.name}\nbound {method.bound:.2f}", fontsize=10)
        for row, points, color in ((0, method.draws, BLUE), (1, method.refined, ORANGE)):
            if points is None:
                axes[row, i].set_axis_off()
                for artist in list(axes[row, i].collections):
                    artist.remove()
            else:
                axes[row, i].scatter(*points[:1000].T, s=2, alpha=0.4, color=color, linewidths=0)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def log_evidence() -> float:
    side = torch.linspace(-5, 5, 2001)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
    return float(log_joint(grid).flatten().logsumexp(0) + 2 * math.log(10 / 2000))


def ring_distance(z: Tensor) -> float:
    """Return the Kolmogorov distance of angles from the uniform law: 0 for a complete ring."""
    angle = (torch.atan2(z[:, 1], z[:, 0]) / (2 * math.pi) + 0.5).sort().values
    return float((angle - torch.linspace(0, 1, len(angle))).abs().max())


def main(argv: Sequence[str] | None = None) -> list[Method]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500, help="training steps per objective")
    parser.add_argument("--draws", type=int, default=5000, help="a multiple of 10")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    args = parser.parse_args(argv)

    pyro.set_rng_seed(args.seed)
    x, result = torch.tensor([X]), methods()
    results, exact = Results(args.out / "ring.csv", args.seed, argv), log_evidence()
    with pyro.validation_enabled(False):
        print(f"log evidence {exact:.3f}")
        for method in result:
            train(method, x, args.steps)
            sample(method, x, args.draws)
            assert method.draws is not None
            refined = math.nan if method.refined is None else ring_distance(method.refined)
            distance = ring_distance(method.draws)
            results.add(
                objective=method.name,
                bound=method.bound,
                log_evidence=exact,
                angle_guide=distance,
                angle_refined=refined,
            )
            print(
                f"{method.name:18} bound {method.bound:7.3f}, error of the angles {distance:.2f}, "
                f"refined {refined:.2f}"
            )
    draw(result, args.out / "ring.png")
    return result


if __name__ == "__main__":
    main()
