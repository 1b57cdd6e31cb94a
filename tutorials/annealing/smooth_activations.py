"""Measure the bias of the gradient of chains through ReLU, whose second derivative is zero.

The script compares the gradient for a guide's location and scale under SIS and AIS with finite
differences of the bound with the same random numbers, for decoders with ReLU and softplus. Run it::

    python tutorials/annealing/smooth_activations.py
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_mcvae import MALA, ULA, TraceAIS_ELBO, TraceSIS_ELBO, UnderdampedLangevin

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda z: 3 * torch.relu(z),
    "softplus": lambda z: torch.nn.functional.softplus(6 * z) / 2,
}
LOSSES = {
    "SIS, underdamped": lambda: TraceSIS_ELBO(3, kernel=UnderdampedLangevin(0.3, momentum=0.7)),
    "SIS, ULA": lambda: TraceSIS_ELBO(3, kernel=ULA(0.05)),
    "AIS, MALA": lambda: TraceAIS_ELBO(3, kernel=MALA(0.05)),
}


def guide(x: Tensor) -> None:
    loc = pyro.param("loc", torch.tensor(0.3))
    scale = pyro.param("scale", torch.tensor(0.6))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(loc, scale))


def make_model(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(function(z), 0.5), obs=x)

    return model


def bound(loss: Any, model: Any, x: Tensor, parameter: str, change: float, seed: int) -> float:
    """Return the loss of a datum with another value of a parameter."""
    pyro.set_rng_seed(seed)
    value = pyro.param(parameter).unconstrained()
    with torch.no_grad():
        value.add_(change)
    result = loss.loss(model, guide, x) / len(x)
    with torch.no_grad():
        value.sub_(change)
    return float(result)


def gradient(loss: Any, model: Any, x: Tensor, parameter: str, seed: int) -> float:
    pyro.set_rng_seed(seed)
    loss.loss_and_grads(model, guide, x)
    result = pyro.param(parameter).unconstrained().grad / len(x)
    for name in ("loc", "scale"):
        pyro.param(name).unconstrained().grad = None
    return float(result)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args(argv)
    torch.set_default_dtype(torch.float64)
    x = torch.full((args.data,), 1.5)

    for activation, function in ACTIVATIONS.items():
        model = make_model(function)
        for name, make in LOSSES.items():
            for parameter in ("loc", "scale"):
                pyro.clear_param_store()
                loss, result, exact = make(), [], []
                for seed in range(args.seeds):
                    result.append(gradient(loss, model, x, parameter, seed))
                    ends = [bound(loss, model, x, parameter, c, seed) for c in (0.02, -0.02)]
                    exact.append((ends[0] - ends[1]) / 0.04)
                difference = torch.tensor(result) - torch.tensor(exact)
                error = float(difference.std()) / args.seeds**0.5
                print(
                    f"{activation:9} {name:17} {parameter:6}"
                    f" gradient {sum(result) / args.seeds:6.3f},"
                    f" finite differences {sum(exact) / args.seeds:6.3f} ± {error:.3f}"
                )


if __name__ == "__main__":
    main()
