"""Measure the gaps of bounds to the exact evidence of probabilistic PCA.

The model is linear, :math:`z \\sim N(0, I_{100})`, :math:`x \\sim N(\\theta_0 + \\theta_1 z, 0.1^2
I_{784})` with the initial weights of ``torch.nn.Linear``, so that log p(x) is known. The guide is
the best one with independent coordinates. Nothing is trained. Each bound is evaluated at several
step sizes, and the tightest value is used. Run it::

    python tutorials/annealing/ppca_gaps.py --out results
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from tqdm import tqdm

from pyro_mcvae import (
    MALA,
    ULA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from pyro_mcvae.evaluation.plots import STYLES

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from results import Results


class PCA:
    """Return model and guide, and the exact evidence of ``count`` data drawn from the model."""

    def __init__(self, p: int, d: int, count: int, sigma: float = 0.1) -> None:
        linear = torch.nn.Linear(d, p).requires_grad_(False)
        self.weight, self.offset, self.sigma = linear.weight, linear.bias, sigma
        precision = torch.eye(d) + self.weight.T @ self.weight / sigma**2
        marginal = dist.LowRankMultivariateNormal(
            self.offset, self.weight, torch.full((p,), sigma**2)
        )
        self.x = marginal.sample((count,))
        self.log_evidence = marginal.log_prob(self.x).mean()
        gain = torch.linalg.solve(precision, self.weight.T / sigma**2)
        self.loc, self.scale = (self.x - self.offset) @ gain.T, precision.diagonal().rsqrt()

    def model(self) -> None:
        with pyro.plate("data", len(self.x)):
            prior = dist.Normal(0.0, 1.0).expand(self.scale.shape).to_event(1)
            mean = self.offset + pyro.sample("z", prior) @ self.weight.T
            pyro.sample("x", dist.Normal(mean, self.sigma).to_event(1), obs=self.x)

    def guide(self) -> None:
        with pyro.plate("data", len(self.x)):
            pyro.sample("z", dist.Normal(self.loc, self.scale).to_event(1))

    def gaps(self, elbo: Any, repeats: int) -> torch.Tensor:
        """Return bound minus log evidence per datum, for each evaluation."""
        losses = [elbo.loss(self.model, self.guide) for _ in range(repeats)]
        return -torch.tensor(losses) / len(self.x) - self.log_evidence


@dataclass(frozen=True)
class Row:
    """A bound as a function of its step size, and the gap in an earlier experiment."""

    make: Callable[[float], Any]
    steps: Sequence[float] = (0.0,)
    published: float | None = None


def sis(count: int, kernel: Any, coordinates: Any = "noise") -> Callable[[float], Any]:
    return lambda step: TraceSIS_ELBO(count, kernel(step), coordinates=coordinates)


def ais(count: int, coordinates: Any = "noise") -> Callable[[float], Any]:
    return lambda step: TraceAIS_ELBO(count, MALA(step), coordinates=coordinates)


LATENT = (3e-4, 5e-4, 7e-4, 9e-4, 1.2e-3, 1.6e-3)
NOISE = (0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
LEAPFROG = (0.2, 0.3, 0.4, 0.5, 0.6)


def rows(known: bool = True) -> dict[str, Row]:
    """Return the bounds. ``known`` selects the size of the earlier experiment."""
    iwae = {5: -1.62, 10: -1.21, 50: -0.58}
    result = {"ELBO": Row(lambda _: TraceSGVB_ELBO(analytic_kl=False), published=-3.3)}
    for k, value in iwae.items():
        result[f"IWAE-{k}"] = Row(lambda _, k=k: TraceIWAE_ELBO(k), published=value)
    for k, value in ((5, -2.14), (10, -1.57)):
        result[f"SIS-{k}, ULA, latent"] = Row(sis(k, ULA, "latent"), LATENT, value)
        result[f"SIS-{k}, ULA"] = Row(sis(k, ULA), NOISE)
        for momentum in (0.5, 0.9):
            kernel = lambda step, m=momentum: UnderdampedLangevin(step, momentum=m)  # noqa: E731
            result[f"SIS-{k}, underdamped {momentum}"] = Row(sis(k, kernel), LEAPFROG)
    for k, value in ((5, -1.90), (10, -1.37)):
        result[f"AIS-{k}, MALA, latent"] = Row(ais(k, "latent"), LATENT, value)
        result[f"AIS-{k}, MALA"] = Row(ais(k), NOISE)
    return result if known else {n: Row(row.make, row.steps) for n, row in result.items()}


def measure(pca: PCA, row: Row, search: int, repeats: int) -> dict[str, float]:
    coarse = {s: pca.gaps(row.make(s), search).mean() for s in row.steps}
    step = max(coarse, key=lambda s: coarse[s].nan_to_num(-torch.inf))
    elbo = row.make(step)
    gaps = pca.gaps(elbo, repeats)
    last = getattr(elbo, "last_step", None)
    return {
        "gap": gaps.mean().item(),
        "error": (gaps.std() / repeats**0.5).item(),
        "step": step,
        "acceptance": float("nan") if last is None else last.acceptance.mean().item(),
    }


def draw(results: dict[str, dict[str, float]], table: dict[str, Row], path: Path) -> None:
    import matplotlib.pyplot as plt

    names = list(results)[::-1]
    figure, axes = plt.subplots(figsize=(7, 0.34 * len(names) + 1.2), layout="constrained")
    colors = dict(zip(("ELBO", "IWAE", "SIS", "AIS"), (c for c, _ in STYLES), strict=False))
    axes.barh(
        names,
        [results[n]["gap"] for n in names],
        xerr=[results[n]["error"] for n in names],
        color=[colors[n[:4] if n[:3] not in colors else n[:3]] for n in names],
    )
    known = [n for n in names if table[n].published is not None]
    if known:
        earlier = [table[n].published for n in known]
        axes.plot(earlier, known, "k|", ms=12, label="earlier experiment")
        axes.legend(loc="lower left")
    axes.set_xlabel("bound - log p(x), nats per datum (0 is exact)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--p", type=int, default=784)
    parser.add_argument("--d", type=int, default=100)
    parser.add_argument("--data", type=int, default=500, help="number of data")
    parser.add_argument("--search", type=int, default=1, help="evaluations per step size")
    parser.add_argument("--repeats", type=int, default=10, help="evaluations at the best step size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    args = parser.parse_args(argv)

    pyro.set_rng_seed(args.seed)
    table = rows((args.p, args.d) == (784, 100))
    results: dict[str, dict[str, float]] = {}
    file = Results(args.out / "ppca_gaps.csv", args.seed, argv)
    with torch.no_grad(), pyro.validation_enabled(False):
        pca = PCA(args.p, args.d, args.data)
        for name in tqdm(table, "bounds"):
            results[name] = measure(pca, table[name], args.search, args.repeats)
            file.add(bound=name, **results[name], earlier=table[name].published)
    print(f"{'bound':26}{'gap':>8}{'error':>8}{'step':>9}{'accepted':>10}{'earlier':>9}")
    for name, result in results.items():
        gap, error, step, accepted = result.values()
        earlier = table[name].published
        print(
            f"{name:26}{gap:8.2f}{error:8.3f}{step:9.2g}{accepted:10.2f}"
            f"{'' if earlier is None else f'{earlier:.2f}':>9}"
        )
    draw(results, table, args.out / "ppca_gaps.png")
    return results


if __name__ == "__main__":
    main()
