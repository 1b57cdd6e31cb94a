"""
How often the evaluators are right: coverage of two standard errors, false certainty.

    python -m tests.benchmarks.calibration --seeds 100 --out calibration.json
    python -m tests.benchmarks.calibration --weights

Models whose evidence is known exactly, with guides from close to far off, are evaluated once per
seed (the data stay). For each: how often the exact log evidence of all data lies within two
standard errors of `log_evidence` and of `report`; how often `report` trusts its evidence; how often
it does so though that is off by more than three errors and 0.05 nats per weight (too sure); and how
often it says that the guide misses a part of the posterior, where it does or does not.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_mcvae import report
from pyro_mcvae.evaluation.weights import WeightSummary
from tests.models import (
    ConjugateGaussian,
    DiscreteMixture,
    HierarchicalGaussian,
    NestedGaussian,
)

Program = Callable[[], None]
Specialization = tuple[
    Program, Program, Tensor, bool
]  # model, guide, exact evidence, whether a mode is missed


def gaussian(log_s: float) -> Specialization:
    """Twenty data with a latent each; the guide's scale is exp(log_s)."""
    exact = ConjugateGaussian(N=20)
    exact.set_guide("exact", log_s=log_s)
    return exact.model, exact.guide, exact.log_evidence(), False


def hierarchical(preset: str) -> Specialization:
    """A global latent over ten local ones, weighed together: eleven dimensions."""
    exact = HierarchicalGaussian()
    exact.set_guide(preset)
    return exact.model, exact.guide, exact.log_evidence(), False


def nested() -> Specialization:
    exact = NestedGaussian()
    return exact.model, exact.guide, exact.log_evidence(), False


def mixture() -> Specialization:
    exact = DiscreteMixture()
    return exact.model, exact.guide, exact.log_evidence(), False


def regression(factor: float) -> Specialization:
    """Linear regression on five correlated columns; a mean field guide with scales too small."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(30, 5, generator=generator) + torch.randn(30, 1, generator=generator)
    y = columns @ torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0]) + torch.randn(30, generator=generator)
    precision = columns.T @ columns + torch.eye(5)
    mean = torch.linalg.solve(precision, columns.T @ y)
    scale = factor * precision.diagonal().rsqrt()
    covariance = columns @ columns.T + torch.eye(30)
    exact = dist.MultivariateNormal(torch.zeros(30), covariance).log_prob(y)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(5), 1.0).to_event(1))
        predicted = (columns @ w.unsqueeze(-1)).squeeze(-1)
        pyro.sample("y", dist.Normal(predicted, 1.0).to_event(1), obs=y)

    def guide() -> None:
        pyro.sample("w", dist.Normal(mean, scale).to_event(1))

    return model, guide, exact, False


def gamma_rate(factor: float) -> Specialization:
    """Counts with a Gamma rate: a skewed posterior, a log-normal guide."""
    counts = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])
    total, n = counts.sum(), len(counts)
    exact = (
        torch.lgamma(0.5 + total)
        - math.lgamma(0.5)
        - (0.5 + total) * math.log(1.0 + n)
        - torch.lgamma(counts + 1).sum()
    )
    shape, rate = 0.5 + total, 1.0 + n

    def model() -> None:
        z = pyro.sample("z", dist.Gamma(0.5, 1.0))
        with pyro.plate("data", n):
            pyro.sample("x", dist.Poisson(z), obs=counts)

    def guide() -> None:
        spread = factor * torch.special.polygamma(1, shape).sqrt()
        pyro.sample("z", dist.LogNormal(torch.digamma(shape) - rate.log(), spread))

    rate = torch.tensor(rate)
    return model, guide, exact, False


def magnitude(both: bool) -> Specialization:
    """Two modes; the guide knows one, or both."""
    x = torch.full((3,), 3.0)
    exact = (dist.Normal(0.0, math.sqrt(1.25)).log_prob(x) + math.log(2)).sum()

    def model() -> None:
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z.abs(), 0.5), obs=x)

    def guide() -> None:
        weights = torch.tensor([0.6, 0.4] if both else [1.0, 0.0])
        loc = 0.8 * x.unsqueeze(-1) * torch.tensor([1.0, -1.0])
        parts = dist.Normal(loc, 1.1 * math.sqrt(0.2))
        with pyro.plate("data", 3):
            mixing = dist.Categorical(weights.expand(3, 2))
            pyro.sample("z", dist.MixtureSameFamily(mixing, parts))

    def single() -> None:
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(0.8 * x, 1.1 * math.sqrt(0.2)))

    return model, guide if both else single, exact, not both


CASES: dict[str, Callable[[], Specialization]] = {
    "Gaussian, wide": lambda: gaussian(0.0),
    "Gaussian, narrow": lambda: gaussian(-0.7),
    "Gaussian, much too narrow": lambda: gaussian(-1.5),
    "hierarchical, close": lambda: hierarchical("conditional"),
    "hierarchical, off": lambda: hierarchical("mismatched"),
    "nested plates": nested,
    "discrete mixture": mixture,
    "regression, mean field": lambda: regression(1.0),
    "regression, narrow": lambda: regression(0.6),
    "Gamma rate": lambda: gamma_rate(1.0),
    "Gamma rate, narrow": lambda: gamma_rate(0.6),
    "two modes, one known": lambda: magnitude(False),
}


def evaluated(case: Specialization, seed: int, num_particles: int) -> dict[str, float]:
    """One verdict."""
    model, guide, exact, _ = case
    began = time.process_time()
    result = report(model, guide, num_particles=num_particles, seed=seed, progress=False)
    seconds = time.process_time() - began
    plain, evidence = result.guide, result.evidence
    error = float(evidence.total - exact)
    z = error / max(float(evidence.total_standard_error), 1e-9)
    plain_z = float(plain.total - exact) / max(float(plain.total_standard_error), 1e-9)
    off = abs(error) / evidence.log_evidence.numel() > 0.05
    return {
        "guide": abs(plain_z) < 2 or abs(float(plain.total - exact)) < 1e-4,
        "report": abs(z) < 2 or abs(error) < 1e-4,
        "trusted": result.trusted,
        "too sure": result.trusted and abs(z) > 3 and off,
        "misses": result.misses,
        "chains": float(result.chains is not None),
        "k": float(plain.pareto_k.median()),
        "error": error,
        "z": z,
        "seconds": seconds,
    }


def row(name: str, rows: list[dict[str, float]]) -> list[str]:
    def fraction(key: str, among: list[dict[str, float]] = rows) -> str:
        return f"{sum(r[key] for r in among) / len(among):.2f}" if among else ""

    trusted = [r for r in rows if r["trusted"]]
    ks = sorted(r["k"] for r in rows)
    return [
        name,
        f"{ks[len(ks) // 20]:.2f} to {ks[-1 - len(ks) // 20]:.2f}",
        fraction("guide"),
        fraction("report"),
        fraction("trusted"),
        fraction("report", trusted),
        fraction("too sure"),
        fraction("misses"),
        f"{statistics.mean(r['chains'] for r in rows):.1f}",
        f"{statistics.median(r['seconds'] for r in rows):.1f} s",
    ]


def weights() -> list[list[str]]:
    """Coverage of two standard errors, by the number of draws and the k-hat that they have."""
    bins = [-9.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0]
    head = ["draws", *(f"{a:.1f} to {b:.1f}" for a, b in itertools.pairwise(bins))]
    lines = [["below".join(h.split("-9.0 to")) for h in head], ["---", *["---:"] * (len(head) - 1)]]
    for count, repeats in ((100, 400), (1000, 400), (10_000, 100)):
        result = [scored(count, repeats, *case) for case in WEIGHTS]
        k, covered = (torch.cat([f[i] for f in result]) for i in range(2))
        shares = [covered[(k >= a) & (k < b)].double() for a, b in itertools.pairwise(bins)]
        lines.append([f"{count}", *(f"{float(s.mean()):.2f} ({len(s)})" for s in shares)])
    return lines


WEIGHTS = [
    (dim, variance, shift)
    for dim in (1, 2, 5, 20)
    for variance in (0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1)
    for shift in (0.0, 0.5)
    if dim < 20 or variance >= 0.5
]


def scored(count: int, repeats: int, dim: int, variance: float, shift: float) -> tuple[Tensor, ...]:
    """k-hat, and whether the log mean is within two errors of zero; for each repetition."""
    z = math.sqrt(variance) * torch.randn(count, repeats, dim)
    log_weight = (0.5 * z.square() - 0.5 * (z + shift).square() + 0.5 * math.log(variance)).sum(-1)
    log_weight = log_weight + 0.5 * (z.square() / variance - z.square()).sum(-1)
    summary = WeightSummary(count)
    summary.add(log_weight)
    return summary.pareto_k, summary.log_mean.abs() < 2 * summary.standard_error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--particles", type=int, default=1000)
    parser.add_argument("--only", nargs="+", metavar="CASE")
    parser.add_argument("--out", type=Path, default=Path("calibration.json"))
    parser.add_argument("--weights", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.weights:
        torch.manual_seed(0)
        print("\n".join("| " + " | ".join(line) + " |" for line in weights()))
        return
    head = ["case", "k-hat", "2 SE: guide", "2 SE: report", "trusted", "2 SE: trusted"]
    head += ["too sure", "says it misses", "chains", "CPU"]
    lines, kept = [head, ["---", *["---:"] * (len(head) - 1)]], {}
    for name in args.only or CASES:
        pyro.clear_param_store()
        case = CASES[name]()
        case[1]()  # its parameters are meant
        rows = [evaluated(case, seed, args.particles) for seed in range(args.seeds)]
        kept[name] = rows
        lines.append(row(name, rows))
        print(" | ".join(lines[-1]), flush=True)
        args.out.write_text(json.dumps(kept))
    print("\n".join("| " + " | ".join(line) + " |" for line in lines))


if __name__ == "__main__":
    main()
