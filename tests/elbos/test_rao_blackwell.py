"""The laws of the Rao-Blackwellized gradients: their mean is the exhaustive sum's."""

import math

import pyro
import pytest
import torch

from pyro_mcvae import IndependentDraw, LeaveOneOut, TraceRaoBlackwell_ELBO
from tests.elbos.discrete_programs import ALL, PROGRAMS

programs = pytest.mark.parametrize("name", PROGRAMS)
ESTIMATORS = {
    "k0": lambda: {"num_categories": 0},
    "k0-n3": lambda: {"num_categories": 0, "num_samples": 3},
    "k1": dict,
    "k2-n2": lambda: {"num_categories": 2, "num_samples": 2},
    "budget2": lambda: {"budget": 2},
    "k0-plus": lambda: {"num_categories": 0, "baseline": IndependentDraw()},
    "k1-plus": lambda: {"baseline": IndependentDraw()},
    "k1-loo": lambda: {"num_samples": 2, "baseline": LeaveOneOut()},
    "k1-exact-entropy": lambda: {"entropy": "exact"},
}


def repeated(elbo, program, steps):
    """Losses and gradients of several steps, one step per row."""
    losses, grads = [], []
    for i in range(steps):
        with pyro.validation_enabled(i == 0):
            losses.append(elbo.loss_and_grads(program.model, program.guide))
        grads.append(program.take_gradients())
    return torch.tensor(losses), {k: torch.stack([g[k] for g in grads]) for k in grads[0]}


def assert_means(program, elbo, steps=40, sigmas=5.5):
    exact_loss, exact = program.exact()
    losses, grads = repeated(elbo, program, steps)
    for key, found, truth in [
        ("loss", losses, exact_loss),
        *((k, grads[k], exact[k]) for k in exact),
    ]:
        error = found.std(0) / steps**0.5
        off = (found.mean(0) - truth).abs()
        assert (off <= sigmas * error + 1e-9).all(), f"{key}: off by {off}, error {error}"


@programs
@pytest.mark.parametrize("k", [3, ALL])
def test_k_of_all_values_is_the_exact_sum(name, k):
    program = PROGRAMS[name]
    loss, exact = program.exact()
    k = 4 if name == "binomial" and k == 3 else k
    for vectorize in (False, True):
        elbo = TraceRaoBlackwell_ELBO(k, num_particles=2, vectorize_particles=vectorize)
        assert math.isclose(elbo.loss_and_grads(program.model, program.guide), loss, rel_tol=1e-9)
        found = program.take_gradients()
        for key, value in exact.items():
            torch.testing.assert_close(found[key], value)


@programs
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_mean_is_the_exact_sum(name, estimator):
    program = PROGRAMS[name]
    elbo = TraceRaoBlackwell_ELBO(
        num_particles=200, vectorize_particles=True, **ESTIMATORS[estimator]()
    )
    assert_means(program, elbo)
