"""
How many operations a step launches, beside the same step by hand and beside the same programs under
a handler that does the least. Counts, not times: a GPU that is not busy waits for each launch.

The limits are what was counted with PyTorch 2.13: none may grow, but by the operation or two by
which versions of PyTorch differ.
"""

from functools import cache, partial
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
# The loss, its bound by hand, and the most that plain and recorded steps may launch of each
# operation by hand, and of each of the programs alone.
CASES = {
    "SGVB": (TraceSGVB_ELBO, hand.sgvb, (1.71, 1.53), (1.45, 1.3)),
    "IWAE-10": (
        lambda: TraceIWAE_ELBO(10, gradient_estimator="reparam", **MANY),
        hand.iwae,
        (1.64, 1.79),
        (1.3, 1.42),
    ),
    "SIS-5": (lambda: TraceSIS_ELBO(5, ULA(0.05)), hand.sis, (1.34, 1.18), (1.22, 1.08)),
    "AIS-5": (lambda: TraceAIS_ELBO(5, MALA(0.05), **MANY), hand.ais, (1.26, 1.04), (1.19, 0.98)),
    "Rao-Blackwell": (TraceRaoBlackwell_ELBO, hand.rao_blackwell, (1.85, 1.67), (1.57, 1.41)),
}
SIZES = {"latent": 4, "pixels": 8, "hidden": 6, "decoder": "mlp", "device": "cpu"}


@cache
def counts(name):
    """Plain, recorded, by hand, and the programs alone."""
    loss, bound, *_ = CASES[name]
    discrete = name == "Rao-Blackwell"
    pyro.enable_validation(False)
    vae = VAE(SimpleNamespace(objective="RB" if discrete else name, **SIZES), stored=False)
    x = torch.rand(5, SIZES["pixels"]).bernoulli()
    ways = (hand.Categories, hand.BareCategories) if discrete else (hand.Plain, hand.Bare)
    result = []
    for wrap in (lambda loss: loss, partial(CompiledELBO, backend="eager")):
        elbo = wrap(loss())
        step = partial(elbo.differentiable_loss, vae.model, vae.guide, x)
        result.append(count(gradient_step(step, vae.parameters())))
    for way in ways:
        result.append(count(gradient_step(lambda w=way: -bound(w(vae), x), vae.parameters())))
    return result


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("SIS-5", "AIS-5"))) for n in CASES]
)
def test_a_step_launches_no_more_than_it_did(name):
    plain, recorded, by_hand, bare = counts(name)
    for steps, limits in ((by_hand, CASES[name][2]), (bare, CASES[name][3])):
        assert plain <= limits[0] * steps + 2, (plain, steps)
        assert recorded <= limits[1] * steps + 2, (recorded, steps)
