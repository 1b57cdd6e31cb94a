"""
How often comparisons are right: coverage of two standard errors, and winners that were wrong.

    python -m tests.benchmarks.calibration_compare --seeds 100
    python -m tests.benchmarks.calibration_compare --only models

Models whose evidence is known exactly, also with the parameters that training ended with. For each
seed: whether the exact difference lies within two standard errors of the one that is said; whether
one winner was declared; and whether that was the wrong one (wrong, and sure of it).
"""

import argparse
import time
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from torch import Tensor

from pyro_mcvae import TraceIWAE_ELBO, compare, compare_models

Row = dict[str, bool]

GENERATOR = torch.Generator().manual_seed(0)
COLUMNS = torch.randn(30, 5, generator=GENERATOR) + torch.randn(30, 1, generator=GENERATOR)
TARGET = COLUMNS @ torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0])
TARGET = TARGET + torch.randn(30, generator=GENERATOR)


def regression(prior: float, factor: float, full: bool = False) -> tuple[object, object, Tensor]:
    """Linear regression: model, guide (mean field, or all covariances), exact log evidence."""
    precision = COLUMNS.T @ COLUMNS + torch.eye(5) / prior**2
    mean = torch.linalg.solve(precision, COLUMNS.T @ TARGET)
    covariance = torch.linalg.inv(precision) * factor**2
    scale = factor * precision.diagonal().rsqrt()
    exact = dist.MultivariateNormal(
        torch.zeros(30), prior**2 * COLUMNS @ COLUMNS.T + torch.eye(30)
    ).log_prob(TARGET)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(5), prior).to_event(1))
        predicted = (COLUMNS @ w.unsqueeze(-1)).squeeze(-1)
        pyro.sample("y", dist.Normal(predicted, 1.0).to_event(1), obs=TARGET)

    def guide() -> None:
        wide = dist.MultivariateNormal(mean, covariance)
        pyro.sample("w", wide if full else dist.Normal(mean, scale).to_event(1))

    return model, guide, exact


def models(first: tuple, second: tuple) -> Callable[[int], Row]:
    def judged(seed: int) -> Row:
        pairs = {"a": first[:2], "b": second[:2]}
        found = compare_models(pairs, num_particles=1000, seed=seed, progress=False)
        exact = float(first[2] - second[2])
        value, error = found.difference("a", "b")
        sure = len(found.best) == 1
        winner = "a" if exact > 0 else "b"
        return {"within": abs(value - exact) < 2 * error, "sure": sure,
                "wrong": sure and found.best != [winner]}  # fmt: skip

    return judged


def factors(width: float, learns: bool) -> Callable[[int], Row]:
    """Probabilistic PCA, 40 data; loadings and the guide's scale are trained, or only the first."""
    x = torch.randn(40, 2, generator=GENERATOR) @ torch.randn(2, 4, generator=GENERATOR)
    x = x + 0.5 * torch.randn(40, 4, generator=GENERATOR)

    def model(x: Tensor) -> None:
        loading = pyro.param("loading", 0.3 * torch.eye(4)[:2] + 0.1)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z @ loading, 0.5).to_event(1), obs=x)

    def guide(x: Tensor) -> None:
        encoder = pyro.param("encoder", torch.zeros(4, 2))
        scale = pyro.param("log_scale", torch.tensor(width).log()).exp() if learns else width
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x @ encoder, scale).to_event(1))

    def exact() -> Tensor:
        loading = pyro.param("loading").detach()
        covariance = loading.T @ loading + 0.25 * torch.eye(4)
        return dist.MultivariateNormal(torch.zeros(4), covariance).log_prob(x).mean()

    def judged(seed: int) -> Row:
        pyro.clear_param_store()
        losses = {"ELBO": Trace_ELBO(), "IWAE": TraceIWAE_ELBO(10)}
        adam = pyro.optim.Adam({"lr": 0.03})
        options = {"num_steps": 60, "num_checks": 1, "seed": seed, "progress": False}
        found = compare(model, guide, x, losses=losses, optim=adam, **options)
        truth = {}
        for name in found:
            found.use(name)
            truth[name] = float(exact())
        gain, error = found.gain("IWAE", "ELBO")
        difference = truth["IWAE"] - truth["ELBO"]
        heavy = any(float(f.evidence.unreliable.double().mean()) > 0.05 for f in found.values())
        sure = len(found.best) == 1 and not heavy
        winner = max(truth, key=lambda n: truth[n])
        return {"within": abs(gain - difference) < 2 * error, "sure": sure,
                "wrong": sure and found.best != [winner]}  # fmt: skip

    return judged


CASES: dict[str, Callable[[int], Row]] = {
    "models: 0.23 nats apart, good guides": models(
        regression(1.0, 1.1, True), regression(1.3, 1.1, True)
    ),
    "models: the same, mean field": models(regression(1.0, 1.0), regression(1.3, 1.0)),
    "models: 0.72 nats apart, the better one's guide too narrow": models(
        regression(1.0, 0.6), regression(1.6, 1.1, True)
    ),
    "models: 0.23 nats apart, both guides too narrow": models(
        regression(1.0, 0.6), regression(1.3, 0.6)
    ),
    "losses: pPCA, guide learns": factors(0.6, True),
    "losses: pPCA, guide held too narrow": factors(0.25, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| comparison | seeds | within 2 SE | one winner | wrong winner | CPU |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, judged in CASES.items():
        if args.only in name:
            began = time.process_time()
            rows = [judged(seed) for seed in range(args.seeds)]
            seconds = (time.process_time() - began) / args.seeds
            shares = (
                f"{sum(r[key] for r in rows) / len(rows):.2f}"
                for key in ("within", "sure", "wrong")
            )
            print(f"| {name} | {args.seeds} | {' | '.join(shares)} | {seconds:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
