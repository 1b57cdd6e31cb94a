"""Compare importance weights and chains: six objectives on two posteriors.

``AutoNormal`` nearly fits the posterior of a logistic regression with 31 coefficients. The
posterior of the log variances of 200 days has strong correlations in 200 dimensions. Each guide is
trained with the ELBO first, and then a copy of it with every objective. Run it::

    python tutorials/annealing/draws_or_chains.py --out results
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from tqdm import tqdm

from pyro_mcvae import (
    HMC,
    CompiledELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    log_evidence,
    refine,
)

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from results import Results

Model = Callable[[], None]
LOGISTIC, VOLATILITY = "logistic regression, 31 coefficients", "log variances of 200 days"


def logistic() -> Model:
    """Return scikit-learn's data of 569 tumours: 30 measurements each, and an intercept."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.get_default_dtype())
    x = torch.cat([(x - x.mean(0)) / x.std(0), torch.ones(len(x), 1)], -1)
    y = torch.tensor(data.target, dtype=x.dtype)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=w @ x.T), obs=y)

    return model


def simulated_returns() -> tuple[Tensor, Tensor]:
    """Return simulated returns of 200 days, and the Cholesky factor of the prior."""
    days = torch.arange(200.0)
    covariance = 0.25**2 / (1 - 0.95**2) * 0.95 ** (days[:, None] - days).abs()
    factor = torch.linalg.cholesky(covariance)
    return (factor @ torch.randn(200) / 2).exp() * torch.randn(200), factor


def volatility(returns: Tensor, factor: Tensor) -> Model:
    def model() -> None:
        h = pyro.sample("h", dist.MultivariateNormal(torch.zeros(200), scale_tril=factor))
        pyro.sample("returns", dist.Normal(0.0, (h / 2).exp()).to_event(1), obs=returns)

    return model


def objectives() -> dict[str, Any]:
    return {
        "ELBO": TraceSGVB_ELBO(),
        "IWAE-10": TraceIWAE_ELBO(10),
        "IWAE-100": TraceIWAE_ELBO(100),
        "IWAE-1000": TraceIWAE_ELBO(1000),
        "SIS-10": TraceSIS_ELBO(10),
        "SIS-10, 8 chains": TraceSIS_ELBO(10, num_particles=8, multi_sample=True),
    }


def fit(model: Model, guide: AutoNormal, loss: Any, steps: int, name: str) -> dict[str, float]:
    """Train the guide. Return the last bound, its error, and the CPU time of a step."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    optimizer = pyro.optim.ClippedAdam({"lr": 0.01, "lrd": 0.1 ** (1 / steps)})
    svi = SVI(model, guide, optimizer, CompiledELBO(loss, backend="eager"))
    start = time.process_time()
    for _ in tqdm(range(steps), f"{name:>16}", leave=False):
        svi.step()
    spent = 1e3 * (time.process_time() - start) / steps
    if isinstance(loss, torch.nn.Module):  # step sizes are fixed from here on
        loss.eval()
    with torch.no_grad():
        bounds = torch.tensor([-svi.evaluate_loss() for _ in range(100)])
    return {"bound": float(bounds.mean()), "error": float(bounds.std()) / 10, "ms": spent}


def draw(
    result: dict[str, dict[str, dict[str, float]]], bands: dict[str, Tensor], path: Path
) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(12.5, 3.3), layout="constrained")
    for panel, (name, rows) in zip(panels, result.items(), strict=False):
        gaps = [row["gap"] for row in rows.values()]
        best = min(gaps)
        colors = ["#2a6f97" if gap == best else "#a9c6d9" for gap in gaps]
        bars = panel.barh(list(rows), gaps, color=colors)
        panel.bar_label(bars, [f"{gap:.1f}" for gap in gaps], padding=3, fontsize=9)
        panel.margins(x=0.15)
        panel.invert_yaxis()
        panel.set(title=name, xlabel="gap to log p(x), nats (lower is better)")
    for (name, band), color in zip(bands.items(), ("#a9c6d9", "#e07a3f"), strict=True):
        panels[2].fill_between(range(200), *band, color=color, alpha=0.6, lw=0, label=name)
    panels[2].set(title="log variance, 90 % of the draws", xlabel="day")
    panels[2].margins(y=0.25)  # room for the legend
    panels[2].legend(fontsize=9, loc="upper left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, dict[str, float]]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elbo-steps", type=int, default=1500, help="steps of the ELBO")
    parser.add_argument("--steps", type=int, default=400, help="further steps of each objective")
    parser.add_argument("--chains", type=int, default=100, help="of the evidence")
    parser.add_argument("--seed", type=int, default=0, help="seed of the simulated data")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    args = parser.parse_args(argv)

    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(args.seed)
    models = {LOGISTIC: logistic(), VOLATILITY: volatility(*simulated_returns())}
    results = Results(args.out / "draws_or_chains.csv", args.seed, argv)
    whitened = {"kernel": HMC(num_leapfrog=4, jitter=0.3), "coordinates": "whitened", "seed": 0}
    result: dict[str, dict[str, dict[str, float]]] = {}
    bands: dict[str, Tensor] = {}
    with pyro.validation_enabled(False):
        for name, model in models.items():
            print(name)
            start, rows = AutoNormal(model, init_scale=0.1), result.setdefault(name, {})
            start()
            for label, loss in objectives().items():
                guide = copy.deepcopy(start) if rows else start
                rows[label] = fit(
                    model, guide, loss, args.steps if rows else args.elbo_steps, label
                )
            evidence = log_evidence(
                model, start, num_particles=args.chains, schedule=100, **whitened
            )
            exact, error = float(evidence.total), float(evidence.total_standard_error)
            print(f"log evidence {exact:.1f} ± {error:.1f}, from chains in white coordinates")
            for label, row in rows.items():
                row["gap"] = exact - row["bound"]
                results.add(posterior=name, objective=label, evidence=exact, **row)
                print(
                    f"{label:17} gap {row['gap']:6.1f} ± {row['error']:.1f} nats, "
                    f"{row['ms']:5.1f} ms a step"
                )
            if name == VOLATILITY:
                moved = {"schedule": 20, "num_transitions": 5, **whitened}
                for label, options in (("guide, ELBO", {}), ("moved by chains", moved)):
                    draws = refine(model, start, num_samples=500, num_particles=1, **options)[
                        "h"
                    ].reshape(-1, 200)
                    bands[label] = draws.quantile(draws.new_tensor([0.05, 0.95]), 0)
    draw(result, bands, args.out / "draws_or_chains.png")
    return result


if __name__ == "__main__":
    main()
