"""
How many operations a step launches, beside the same step that one writes by hand with PyTorch's
distributions: on the CPU, where a step may read values, and on the simulated device, where it must
not. Counts, not times: a GPU that is not busy waits for each launch.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pyro
import pytest
import torch

from pyro_mcvae import (
    MALA,
    ULA,
    CompiledELBO,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)
from tests.benchmarks import by_hand as hand
from tests.benchmarks.vae import VAE
from tests.device.operations import count, gradient_step

MANY = {"vectorize_particles": True, "max_plate_nesting": 1}
# The loss, and its bound by hand.
CASES = {
    "SGVB": (TraceSGVB_ELBO, hand.sgvb),
    "IWAE-10": (lambda: TraceIWAE_ELBO(10, gradient_estimator="reparam", **MANY), hand.iwae),
    "SIS-5": (lambda: TraceSIS_ELBO(5, ULA(0.05)), hand.sis),
    "AIS-5": (lambda: TraceAIS_ELBO(5, MALA(0.05), **MANY), hand.ais),
    "Rao-Blackwell": (TraceRaoBlackwell_ELBO, hand.rao_blackwell),
}
SIZES = {"latent": 4, "pixels": 8, "hidden": 6, "decoder": "mlp", "device": "cpu"}
QUICK = ("SGVB", "cpu"), ("SGVB", "sim"), ("IWAE-10", "cpu")
# The most that a step may launch of each operation by hand.
PLAIN, RECORDED = 1.15, 1.0


@dataclass
class Counts:
    """
    Operations of warm steps.

    :ivar distributions: by hand, with PyTorch's distributions.
    :ivar formulas: by hand, without distributions and constants.
    :ivar programs: of the model and guide as Pyro runs them, under a handler that does the least.
    """

    plain: int
    recorded: int
    distributions: int
    formulas: int
    programs: int


def counts(name: str, device: torch.device) -> Counts:
    loss, bound = CASES[name]
    discrete = name == "Rao-Blackwell"
    pyro.enable_validation(False)
    objective = "RB" if discrete else name
    vae = VAE(SimpleNamespace(objective=objective, **SIZES), stored=False).to(device)
    x = torch.rand(5, SIZES["pixels"]).bernoulli().to(device)
    ways = (
        (hand.CategoricalDistributions, hand.Categories, hand.BareCategories)
        if discrete
        else (hand.Distributions, hand.Plain, hand.Bare)
    )
    found = []
    for wrap in (lambda loss: loss, partial(CompiledELBO, backend="eager")):
        step = partial(wrap(loss()).differentiable_loss, vae.model, vae.guide, x)
        found.append(count(gradient_step(step, vae.parameters())))
    for way in ways:
        found.append(count(gradient_step(lambda w=way: -bound(w(vae), x), vae.parameters())))
    return Counts(*found)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(n, p, marks=[pytest.mark.slow] * ((n, p) not in QUICK))
        for n in CASES
        for p in ("cpu", "sim")
    ],
)
def test_a_step_launches_hardly_more_than_by_hand(name, place, device):
    found = counts(name, torch.device("cpu") if place == "cpu" else device)
    assert found.plain <= PLAIN * found.distributions, found
    assert found.recorded <= RECORDED * found.distributions, found
