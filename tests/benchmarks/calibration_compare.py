"""
How often comparisons are right: coverage of two standard errors, and winners that were wrong.

    python -m tests.benchmarks.calibration_compare --seeds 100
    python -m tests.benchmarks.calibration_compare --only models

Models whose evidence is known exactly, also with the parameters that training ended with. For each
seed: whether the exact evidence of the evaluated data lies within two standard errors of the one
that is printed (Monte Carlo's); whether the exact difference does, of losses that on 5,000 other
data, whose error is over the data (data and training are drawn again with each seed); whether
one winner was declared; and whether that was the wrong one (wrong, and sure of it).
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

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
    def evaluated(seed: int) -> Row:
        pairs = {"a": first[:2], "b": second[:2]}
        result = compare_models(pairs, num_particles=1000, seed=seed, progress=False)
        exact = float(first[2] - second[2])
        value, error = result.difference("a", "b")
        sure = len(result.best) == 1
        winner = "a" if exact > 0 else "b"
        evidence = result["a"]
        off = abs(float(evidence.total - first[2]))
        return {
            "evidence": off < 2 * float(evidence.total_standard_error) + 1e-4,
            "within": abs(value - exact) < 2 * error,
            "doubtful": bool(result.doubtful),
            "sure": sure,
            "wrong": sure and result.best != [winner],
        }

    return evaluated


@dataclass
class Learned:
    """
    Programs whose model learns, and that know their evidence with the parameters that they have.

    :ivar draw: makes so many data.
    :ivar exact: log p(x) of each of the data, or of all together where there is one weight.
    :ivar num_test: how many are evaluated; all that are trained on, with one weight.
    """

    model: Callable[[Tensor], None]
    guide: Callable[[Tensor], None]
    draw: Callable[[int], Tensor]
    exact: Callable[[Tensor], Tensor]
    num_test: int = 200

    @property
    def population(self) -> bool:
        return self.num_test > 1


def learned(make: Callable[[], Learned]) -> Callable[[int], Row]:
    """The ELBO and IWAE-10, 100 steps on 100 data, evaluated on others."""

    def evaluated(seed: int) -> Row:
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        case = make()
        train, many = case.draw(100), case.draw(5_000 if case.population else 1)
        test = case.draw(case.num_test) if case.population else train
        losses = {"ELBO": Trace_ELBO(), "IWAE": TraceIWAE_ELBO(10)}
        adam = pyro.optim.Adam({"lr": 0.03})
        options = {"num_steps": 100, "num_checks": 1, "seed": seed, "progress": False}
        result = compare(
            case.model, case.guide, test, losses=losses, optim=adam, batches=[train], **options
        )
        here, everywhere = {}, {}
        for name in result:
            result.use(name)
            with torch.no_grad():
                here[name] = float(case.exact(test).mean())
                everywhere[name] = float(case.exact(many).mean()) if case.population else here[name]
        gain, error = result.gain("IWAE", "ELBO")
        heavy = any(float(f.evidence.unreliable.double().mean()) > 0.05 for f in result.values())
        sure = len(result.best) == 1 and not heavy
        winner = max(everywhere, key=lambda n: everywhere[n])
        evidence = result["IWAE"].evidence
        return {
            "evidence": abs(float(evidence.mean) - here["IWAE"])
            < 2 * float(evidence.mean_standard_error) + 1e-4,
            "within": abs(gain - everywhere["IWAE"] + everywhere["ELBO"]) < 2 * error,
            "doubtful": heavy,
            "sure": sure,
            "wrong": sure and result.best != [winner],
        }

    return evaluated


def factors(width: float, learns: bool) -> Learned:
    """Probabilistic PCA: loadings and the guide's scale are trained, or only the first."""
    loading = torch.tensor([[1.0, -0.5, 0.3, 0.8], [0.2, 0.9, -1.0, 0.4]])

    def draw(n: int) -> Tensor:
        return torch.randn(n, 2) @ loading + 0.5 * torch.randn(n, 4)

    def model(x: Tensor) -> None:
        own = pyro.param("loading", 0.3 * torch.eye(4)[:2] + 0.1)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z @ own, 0.5).to_event(1), obs=x)

    def guide(x: Tensor) -> None:
        encoder = pyro.param("encoder", torch.zeros(4, 2))
        scale = pyro.param("log_scale", torch.tensor(width).log()).exp() if learns else width
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x @ encoder, scale).to_event(1))

    def exact(x: Tensor) -> Tensor:
        own = pyro.param("loading")
        covariance = own.T @ own + 0.25 * torch.eye(4)
        return dist.MultivariateNormal(torch.zeros(4), covariance).log_prob(x)

    return Learned(model, guide, draw, exact)


def gaussian() -> Learned:
    """A latent each, whose mean and scale are learned."""

    def prior() -> tuple[Tensor, Tensor]:
        return pyro.param("mean", torch.tensor(0.0)), pyro.param("log_t", torch.tensor(0.0)).exp()

    def model(x: Tensor) -> None:
        mean, t = prior()
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(mean, t))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x: Tensor) -> None:
        a, b = pyro.param("a", torch.tensor(0.3)), pyro.param("b", torch.tensor(0.0))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(a * x + b, 0.6))

    def exact(x: Tensor) -> Tensor:
        mean, t = prior()
        return dist.Normal(mean, (1 + t**2).sqrt()).log_prob(x)

    return Learned(model, guide, lambda n: 2.0 + 2.0 * torch.randn(n), exact)


def counts() -> Learned:
    """Poisson counts with a Gamma rate each, whose shape is learned; a log-normal guide."""

    def shape() -> Tensor:
        return pyro.param("log_shape", torch.tensor(0.0)).exp()

    def model(x: Tensor) -> None:
        a = shape()
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Gamma(a, 0.5))
            pyro.sample("x", dist.Poisson(z), obs=x)

    def guide(x: Tensor) -> None:
        a, b = pyro.param("a", torch.tensor(1.0)), pyro.param("b", torch.tensor(0.0))
        s = pyro.param("log_s", torch.tensor(-0.5)).exp()
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.LogNormal(a * (x + 1).log() + b, s))

    def exact(x: Tensor) -> Tensor:
        a = shape()
        odds = torch.tensor(1 / 1.5).log() - torch.tensor(0.5 / 1.5).log()
        return dist.NegativeBinomial(a, logits=odds).log_prob(x)

    def draw(n: int) -> Tensor:
        return dist.Poisson(dist.Gamma(3.0, 0.5).sample((n,))).sample()

    return Learned(model, guide, draw, exact)


def groups() -> Learned:
    """Four measurements of each group's mean; their mean and spread are learned."""

    def prior() -> tuple[Tensor, Tensor]:
        return pyro.param("mean", torch.tensor(0.0)), pyro.param("log_t", torch.tensor(0.0)).exp()

    def model(x: Tensor) -> None:
        mean, t = prior()
        with pyro.plate("groups", len(x)):
            z = pyro.sample("z", dist.Laplace(mean, t))
            pyro.sample("x", dist.Normal(z.unsqueeze(-1), torch.ones(4)).to_event(1), obs=x)

    def guide(x: Tensor) -> None:
        a, s = pyro.param("a", torch.tensor(0.5)), pyro.param("log_s", torch.tensor(-0.5)).exp()
        with pyro.plate("groups", len(x)):
            pyro.sample("z", dist.Normal(a * x.mean(-1), s))

    def exact(x: Tensor) -> Tensor:
        mean, t = prior()
        grid = torch.linspace(-12.0, 12.0, 1001)
        z = mean + t * grid
        density = dist.Laplace(mean, t).log_prob(z)
        # Given the group's mean its measurements are Normal around it: 4 / 2 (z - mean)^2.
        inner = dist.Normal(0.0, 1.0).log_prob(x - x.mean(-1, keepdim=True)).sum(-1)
        inner = inner.unsqueeze(-1) - 2 * (z - x.mean(-1, keepdim=True)).square()
        return (density + inner).logsumexp(-1) + (t * (grid[1] - grid[0])).log()

    def draw(n: int) -> Tensor:
        return 1.0 + 1.5 * torch.randn(n, 1) + torch.randn(n, 4)

    return Learned(model, guide, draw, exact)


def labels() -> Learned:
    """A mixture of three Gaussians whose means are learned; a classifier as the guide."""

    def means() -> Tensor:
        return pyro.param("means", torch.tensor([-1.0, 0.0, 1.0]))

    def model(x: Tensor) -> None:
        mean = means()
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.Categorical(torch.ones(3)))
            pyro.sample("x", dist.Normal(mean[y], 1.0), obs=x)

    def guide(x: Tensor) -> None:
        a, b = pyro.param("a", torch.zeros(3)), pyro.param("b", torch.zeros(3))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=x.unsqueeze(-1) * a + b))

    def exact(x: Tensor) -> Tensor:
        parts = dist.Normal(means(), 1.0).log_prob(x.unsqueeze(-1))
        return parts.logsumexp(-1) - torch.tensor(3.0).log()

    def draw(n: int) -> Tensor:
        return torch.tensor([-3.0, 0.0, 3.0])[torch.randint(3, (n,))] + torch.randn(n)

    return Learned(model, guide, draw, exact)


def prior_scale() -> Learned:
    """Linear regression, whose prior's scale is learned: one weight, five dimensions."""

    def scale() -> Tensor:
        return pyro.param("log_scale", torch.tensor(-1.0)).exp()

    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(5), scale()).to_event(1))
        predicted = (COLUMNS @ w.unsqueeze(-1)).squeeze(-1)
        pyro.sample("y", dist.Normal(predicted, 1.0).to_event(1), obs=y)

    def guide(y: Tensor) -> None:
        loc, s = pyro.param("loc", torch.zeros(5)), pyro.param("log_s", torch.full((5,), -1.5))
        pyro.sample("w", dist.Normal(loc, s.exp()).to_event(1))

    def exact(y: Tensor) -> Tensor:
        covariance = scale() ** 2 * COLUMNS @ COLUMNS.T + torch.eye(30)
        return dist.MultivariateNormal(torch.zeros(30), covariance).log_prob(y)

    return Learned(model, guide, lambda n: TARGET, exact, num_test=1)


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
    "losses: pPCA, guide learns": learned(lambda: factors(0.6, True)),
    "losses: pPCA, guide held too narrow": learned(lambda: factors(0.25, False)),
    "losses: Gaussian, prior learns": learned(gaussian),
    "losses: counts, shape learns": learned(counts),
    "losses: groups, spread learns": learned(groups),
    "losses: mixture, means learn": learned(labels),
    "losses: regression, one weight": learned(prior_scale),
}


def fraction(rows: list[Row], key: str) -> str:
    return f"{sum(r[key] for r in rows) / len(rows):.2f}" if rows else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = ["comparison", "seeds", "2 SE: evidence", "2 SE: gain", "k-hat doubtful"]
    head += ["2 SE: gain, of the others", "one winner", "wrong winner", "CPU"]
    print(f"| {' | '.join(head)} |\n| --- |{' ---: |' * (len(head) - 1)}")
    for name, evaluated in CASES.items():
        if args.only in name:
            began = time.process_time()
            rows = [evaluated(seed) for seed in range(args.seeds)]
            seconds = (time.process_time() - began) / args.seeds
            calm = [r for r in rows if not r["doubtful"]]
            shares = [fraction(rows, key) for key in ("evidence", "within", "doubtful")]
            shares += [fraction(calm, "within"), fraction(rows, "sure"), fraction(rows, "wrong")]
            print(f"| {name} | {args.seeds} | {' | '.join(shares)} | {seconds:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
