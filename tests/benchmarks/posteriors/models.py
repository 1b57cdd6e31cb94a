"""Posteriors of models as Pyro users write them, on data that come with packages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch import Tensor


@dataclass(frozen=True)
class Posterior:
    """
    A model, and where its data are from.

    :ivar evidence: computes the log evidence, where that is easy.
    """

    make: Callable[..., Callable[[], Any]]
    source: str
    guides: tuple[type, ...] = (AutoNormal,)
    evidence: Callable[[], float] | None = None


def statsmodels_data(name: str) -> Any:
    """
    :raises ImportError: with the remedy, where statsmodels is not installed.
    """
    try:
        from statsmodels import datasets
    except ImportError as error:
        raise ImportError(
            f"the data of this posterior, statsmodels.datasets.{name}, come with statsmodels: "
            f"pip install statsmodels, or choose others by --models"
        ) from error
    return getattr(datasets, name).load_pandas().data


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.get_default_dtype())


def standardized(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0)


def autoregressive_precision(size: int, phi: float, scale: float) -> Tensor:
    """Of h_t = phi h_{t-1} + scale u_t, with h_0 from N(0, (scale / phi)^2) about."""
    precision = torch.zeros(size, size)
    i = torch.arange(size)
    precision[i, i] = (1 + phi**2) / scale**2
    precision[0, 0] = (1 - phi**2) / scale**2 + phi**2 / scale**2
    precision[-1, -1] = 1 / scale**2
    precision[i[1:], i[:-1]] = precision[i[:-1], i[1:]] = -phi / scale**2
    return precision


def simulated_returns(size: int) -> tuple[Tensor, Tensor]:
    """Returns, and the precision of their log variances."""
    phi, scale = 0.95, 0.25
    noise = torch.Generator().manual_seed(1)
    h = torch.zeros(size, dtype=torch.float32)
    for t in range(1, size):
        h[t] = phi * h[t - 1] + scale * torch.randn((), generator=noise, dtype=torch.float32)
    y = torch.randn(size, generator=noise, dtype=torch.float32) * (h / 2).exp()
    return y.to(torch.get_default_dtype()), autoregressive_precision(size, phi, scale)


def gaussian(name: str, factor: Tensor, white: bool = False) -> Tensor:
    """A draw from N(0, factor factor^T), or of the standard normal that makes it."""
    if white:
        normal = dist.Normal(0.0, 1.0).expand([len(factor)]).to_event(1)
        return pyro.sample(name, normal) @ factor.T
    prior = dist.MultivariateNormal(torch.zeros(len(factor)), scale_tril=factor)
    return pyro.sample(name, prior)


def simulated_volatility(size: int, white: bool = False) -> Callable[[], None]:
    """Log variances h of returns; autoregression and scale are known."""
    y, precision = simulated_returns(size)
    prior = dist.MultivariateNormal(torch.zeros(size), precision_matrix=precision)

    def model() -> None:
        h = gaussian("h", prior.scale_tril, True) if white else pyro.sample("h", prior)
        pyro.sample("y", dist.Normal(0.0, (h / 2).exp()).to_event(1), obs=y)

    return model


def inflation_volatility() -> Callable[[], None]:
    """Quarterly changes of US inflation; a random walk of the log variance, its scale unknown."""
    rate = tensor(statsmodels_data("macrodata")["infl"].to_numpy())
    y = (rate[1:] - rate[:-1])[-200:]
    y = y / y.std()

    def model() -> None:
        scale = pyro.sample("scale", dist.LogNormal(-1.5, 0.5))
        first = pyro.sample("first", dist.Normal(0.0, 1.0))
        steps = pyro.sample("steps", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
        h = first.unsqueeze(-1) + scale.unsqueeze(-1) * steps.cumsum(-1)
        pyro.sample("y", dist.StudentT(5.0, 0.0, (h / 2).exp()).to_event(1), obs=y)

    return model


def gaussian_process(x: Tensor, amplitude: float, length: float, noise: float = 1e-4) -> Tensor:
    """The Cholesky factor of a squared exponential kernel's covariance."""
    covariance = amplitude**2 * (-0.5 * torch.cdist(x, x).square() / length**2).exp()
    return torch.linalg.cholesky(covariance + noise * torch.eye(len(x)))


def sunspot_counts() -> tuple[Tensor, Tensor]:
    """Yearly numbers since 1800, and the factor of the covariance of their log intensities."""
    data = statsmodels_data("sunspots")
    data = data[data["YEAR"] >= 1800]
    year, count = tensor(data["YEAR"].to_numpy()), tensor(data["SUNACTIVITY"].to_numpy()).round()
    return count, gaussian_process(year.unsqueeze(-1), amplitude=1.5, length=2.0, noise=0.01)


def sunspots() -> Callable[[], None]:
    """A log-Gaussian Cox process."""
    count, factor = sunspot_counts()

    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(3.0, 1.0))
        f = gaussian("f", factor)
        rate = (mean.unsqueeze(-1) + f).exp()
        pyro.sample("count", dist.Poisson(rate).to_event(1), obs=count)

    return model


def tumours() -> tuple[Tensor, Tensor]:
    """Thirty measurements and a constant; benign or not."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    x, y = standardized(tensor(data.data)), tensor(data.target)
    return torch.cat([x, torch.ones(len(x), 1)], -1), y


def breast_cancer() -> Callable[[], None]:
    """Logistic regression with 31 coefficients."""
    x, y = tumours()

    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=w @ x.T), obs=y)

    return model


def investment() -> Callable[[], None]:
    """Investments of eleven firms over twenty years, each with coefficients of its own."""
    data = statsmodels_data("grunfeld")
    firm = torch.tensor(data["firm"].astype("category").cat.codes.to_numpy(), dtype=torch.long)
    value, capital, y = (
        standardized(tensor(data[name].to_numpy()).log()) for name in ("value", "capital", "invest")
    )
    num_firms = int(firm.max()) + 1

    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        spread = pyro.sample("spread", dist.HalfNormal(1.0).expand([3]).to_event(1))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        with pyro.plate("firms", num_firms):
            effects = pyro.sample("effects", dist.Normal(mean, spread).to_event(1))
        a, b, c = effects.unbind(-1)
        at = a[..., firm] + b[..., firm] * value + c[..., firm] * capital
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(at, noise), obs=y)

    return model


def tumour_answers() -> tuple[Tensor]:
    """20 measurements of 80 tumours, each above its median or not."""
    from sklearn.datasets import load_breast_cancer

    x = tensor(load_breast_cancer().data)[:80, :20]
    return ((x > x.median(0).values).to(x.dtype),)


def item_response() -> Callable[[], None]:
    """Two-parameter logistic, of answers."""
    (answers,) = tumour_answers()
    persons, items = answers.shape

    def model() -> None:
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.0).expand([items]).to_event(1))
        slope = pyro.sample("slope", dist.LogNormal(0.0, 0.5).expand([items]).to_event(1))
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0).expand([persons]).to_event(1))
        gap = ability.unsqueeze(-1) - difficulty.unsqueeze(-2)
        logits = slope.unsqueeze(-2) * gap
        pyro.sample("answers", dist.Bernoulli(logits=logits).to_event(2), obs=answers)

    return model


def schools_data() -> tuple[Tensor, Tensor]:
    """Effects of coaching, and their standard errors."""
    y = tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    return y, tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def eight_schools() -> Callable[[], None]:
    """Effects of coaching (Rubin, 1981), centered."""
    y, error = schools_data()

    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
        spread = pyro.sample("spread", dist.HalfCauchy(5.0))
        with pyro.plate("schools", 8):
            effect = pyro.sample("effect", dist.Normal(mean, spread))
            pyro.sample("y", dist.Normal(effect, error), obs=y)

    return model


def schools_evidence() -> float:
    """By quadrature over the mean and the logarithm of the spread."""
    y, error = schools_data()
    grids = torch.linspace(-40, 40, 1601), torch.linspace(-14, 9, 4001)
    mean, log_spread = torch.meshgrid(*grids, indexing="ij")
    spread = log_spread.exp()
    log_prob = dist.Normal(0.0, 5.0).log_prob(mean) + dist.HalfCauchy(5.0).log_prob(spread)
    for one, its_error in zip(y, error, strict=True):
        log_prob = log_prob + dist.Normal(mean, (spread**2 + its_error**2).sqrt()).log_prob(one)
    cell = math.prod(float(g[1] - g[0]) for g in grids)
    return float((log_prob + log_spread).logsumexp((0, 1))) + math.log(cell)


def flowers() -> tuple[Tensor, Tensor]:
    """Versicolor or virginica, and the factor of a covariance by their sepals."""
    from sklearn.datasets import load_iris

    data = load_iris()
    x, y = standardized(tensor(data.data[50:, :2])), tensor(data.target[50:] - 1)
    return y, gaussian_process(x, amplitude=2.0, length=1.0)


def iris_process(white: bool = False) -> Callable[[], None]:
    """A Gaussian process classifier of 100 flowers."""
    y, factor = flowers()

    def model() -> None:
        f = gaussian("f", factor, white)
        pyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)

    return model


def diabetes_network() -> Callable[[], None]:
    """A Bayesian neural network with one layer of five, 62 latents, on 442 patients."""
    from sklearn.datasets import load_diabetes

    data, hidden = load_diabetes(), 5
    x, y = standardized(tensor(data.data)), standardized(tensor(data.target))
    num_inputs = x.shape[1]

    def model() -> None:
        prior = dist.Normal(0.0, 1.0)
        first = dist.Normal(0.0, 1 / math.sqrt(num_inputs)).expand([num_inputs, hidden])
        w1 = pyro.sample("w1", first.to_event(2))
        b1 = pyro.sample("b1", prior.expand([hidden]).to_event(1))
        w2 = pyro.sample("w2", prior.expand([hidden]).to_event(1))
        b2 = pyro.sample("b2", prior)
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        mean = torch.tanh(x @ w1 + b1) @ w2 + b2
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, noise), obs=y)

    return model


BOTH = (AutoNormal, AutoMultivariateNormal)
POSTERIORS = {
    "volatility": Posterior(partial(simulated_volatility, 200), "simulated"),
    "inflation": Posterior(inflation_volatility, "statsmodels.datasets.macrodata"),
    "sunspots": Posterior(sunspots, "statsmodels.datasets.sunspots"),
    "logistic": Posterior(breast_cancer, "sklearn.datasets.load_breast_cancer", BOTH),
    "investment": Posterior(investment, "statsmodels.datasets.grunfeld", BOTH),
    "items": Posterior(item_response, "sklearn.datasets.load_breast_cancer"),
    "schools": Posterior(eight_schools, "Rubin (1981)", BOTH, evidence=schools_evidence),
    "process": Posterior(iris_process, "sklearn.datasets.load_iris", BOTH),
    "volatility-white": Posterior(partial(simulated_volatility, 200, True), "simulated"),
    "process-white": Posterior(partial(iris_process, True), "sklearn.datasets.load_iris"),
    "network": Posterior(diabetes_network, "sklearn.datasets.load_diabetes"),
    "volatility-1000": Posterior(partial(simulated_volatility, 1000), "simulated"),
}
