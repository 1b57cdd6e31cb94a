"""No latent can be weighed per datum: every objective is the plain ELBO, and names the cause."""

import logging
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    MALA,
    CompiledELBO,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)
from tests.estimates import assert_mean

X = torch.linspace(-1.0, 2.0, 20, dtype=torch.float64)
MAKES = {
    "iwae": lambda: TraceIWAE_ELBO(3),
    "sis": lambda: TraceSIS_ELBO(3),
    "ais": lambda: TraceAIS_ELBO(3, MALA(0.1)),
    "many": lambda: TraceSIS_ELBO(3, num_particles=4, multi_sample=True),
    "reweighted": lambda: TraceSIS_ELBO(3, gradient_estimator="reweighted"),
    "compiled": lambda: CompiledELBO(TraceSIS_ELBO(3), backend="eager"),
}


def model():
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 20, subsample_size=5) as index:
        pyro.sample("x", dist.Normal(w, 1.0), obs=X[index])


def guide():
    pyro.sample("w", dist.Normal(pyro.param("loc", torch.tensor(0.3)), 0.4))


def exact(x, points=0.0):
    q = dist.Normal(0.3, 0.4)
    divergence = torch.distributions.kl_divergence(q, dist.Normal(0.0, 1.0))
    return (dist.Normal(0.3 + points, 1.0).log_prob(x) - 0.4**2 / 2).sum() - divergence


@pytest.mark.parametrize("name", MAKES)
def test_every_objective_has_value_and_gradient_of_the_elbo_and_says_so_once(name, caplog):
    elbo = MAKES[name]()
    values, slopes = [], []
    with caplog.at_level(logging.WARNING):
        for i in range(40):
            pyro.enable_validation(i == 0)
            values.append(-elbo.loss_and_grads(model, guide))
            slopes.append(pyro.param("loc").grad.clone())
            pyro.param("loc").grad.zero_()
    assert_mean(torch.tensor(values), exact(X))
    assert_mean(torch.stack(slopes), -((X - 0.3).sum() - 0.3))
    (message,) = [r.getMessage() for r in caplog.records if "averaged" in r.getMessage()]
    assert "plate 'data' (5 of 20) depend on the guide's 'w' outside" in message


def test_full_data_after_a_minibatch_are_moved():
    def program(is_model, size):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 20, subsample_size=size) as index:
            if is_model:
                pyro.sample("x", dist.Normal(w, 1.0), obs=X[index])

    elbo = TraceSIS_ELBO(3)
    for size, moved in ((5, False), (20, True), (5, True), (5, True)):
        elbo.loss(partial(program, True), partial(program, False), size)
        assert (elbo.last_step is not None) == moved


def test_averages_say_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        TraceSGVB_ELBO(3).loss(model, guide)
        TraceIWAE_ELBO(1).loss(model, guide)
    assert not caplog.text
