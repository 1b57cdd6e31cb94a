"""
Stochastic volatility, 200 latents: a chain on few numbers, whose time is Python.

A log volatility h that reverts to its mean, and returns y[t] ~ Normal(0, exp(h[t] / 2)).
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn

from pyro_mcvae import ULA, CompiledELBO, TraceSIS_ELBO
from tests.benchmarks import by_hand as hand

LENGTH, PERSISTENCE, NOISE, STEP = 200, 0.95, 0.25, 0.05
Step = Callable[[], Any]


def precision() -> Tensor:
    """Of an autoregression that begins at zero."""
    diagonal = torch.full((LENGTH,), 1 + PERSISTENCE**2)
    diagonal[-1] = 1.0
    beside = torch.full((LENGTH - 1,), -PERSISTENCE)
    return (diagonal.diag() + beside.diag(1) + beside.diag(-1)) / NOISE**2


def returns() -> Tensor:
    """Data drawn from the model."""
    generator = torch.Generator().manual_seed(1)
    factor = torch.linalg.cholesky(precision())
    noise = torch.randn(2, LENGTH, 1, generator=generator)
    h = torch.linalg.solve_triangular(factor.t(), noise[0], upper=True)
    return (noise[1] * (h / 2).exp())[:, 0]


class Programs:
    """The model, and a guide of independent normals."""

    def __init__(self) -> None:
        self.precision, self.zeros = precision(), torch.zeros(LENGTH)

    def model(self, y: Tensor) -> None:
        h = pyro.sample("h", dist.MultivariateNormal(self.zeros, precision_matrix=self.precision))
        h = h.squeeze(-2) if h.dim() > 1 else h
        with pyro.plate("time", LENGTH):
            pyro.sample("y", dist.Normal(0.0, (h / 2).exp()), obs=y)


class ByHand(nn.Module):
    """What a step by hand asks for, without the constants."""

    def __init__(self) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(LENGTH))
        self.log_scale = nn.Parameter(torch.full((LENGTH,), 0.1).log())
        self.precision = precision()

    def guide(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.loc, self.log_scale

    def log_joint(self, y: Tensor, h: Tensor) -> Tensor:
        prior = -0.5 * (h * (self.precision @ h)).sum()
        return prior - 0.5 * (h + y.square() * (-h).exp()).sum()


def by_hand_step(steps: int, y: Tensor) -> Step:
    step: Step = hand.step(ByHand(), partial(hand.sis, num_steps=steps, eta=STEP), y, lambda m: m)
    return step


def svi_step(loss: Any, y: Tensor) -> Step:
    model = Programs().model
    guide = AutoNormal(model, init_loc_fn=lambda site: torch.zeros(LENGTH), init_scale=0.1)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 5e-3}), loss)
    return lambda: svi.step(y)


def numpyro_step(steps: int, y: Tensor) -> Step:
    """NumPyro's chain of as many steps, compiled by JAX."""
    import jax
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoDAIS

    data, matrix = jax.numpy.array(y.numpy()), jax.numpy.array(precision().numpy())
    zeros = jax.numpy.zeros(LENGTH)

    def model() -> None:
        h = numpyro.sample("h", dist.MultivariateNormal(zeros, precision_matrix=matrix))
        with numpyro.plate("time", LENGTH):
            numpyro.sample("y", dist.Normal(0.0, jax.numpy.exp(h / 2)), obs=data)

    guide = AutoDAIS(model, K=steps, init_scale=0.1)
    svi = SVI(model, guide, numpyro.optim.Adam(5e-3), Trace_ELBO())
    state, update = svi.init(jax.random.PRNGKey(0)), jax.jit(svi.update)

    def step() -> float:
        nonlocal state
        state, loss = update(state)
        return float(loss)

    return step


def sides(case: Any, compiled: bool) -> dict[str, Callable[[], Step]]:
    """One chain of a case's size; NumPyro's where it can be imported."""
    y = returns()

    def objective() -> TraceSIS_ELBO:
        return TraceSIS_ELBO(case.size, ULA(STEP), max_plate_nesting=1)

    result = {
        "SVI": lambda: svi_step(objective(), y),
        "by hand": lambda: by_hand_step(case.size, y),
    }
    if compiled:
        result["replay"] = lambda: svi_step(CompiledELBO(objective(), "eager"), y)
        result["Inductor"] = lambda: svi_step(CompiledELBO(objective()), y)
    if importlib.util.find_spec("numpyro"):
        result["AutoDAIS"] = lambda: numpyro_step(case.size, y)
    return result
