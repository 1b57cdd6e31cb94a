"""A model that draws numbers apart from its sites, as dropout does: one density along a chain."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal, init_to_value
from pyro.infer.reparam import ConjugateReparam

from pyro_mcvae import (
    ULA,
    CompiledELBO,
    LinearSchedule,
    TraceIWAE_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from tests.compiled.programs import reasons
from tests.estimates import assert_mean

x = torch.tensor([1.0, -0.5, 2.0])
# Given the noise x is normal: the evidence is a mixture's.
parts = torch.stack([dist.Normal(shift, 1.25**0.5).log_prob(x) for shift in (0.0, 3.0)])
EXACT = float((parts.logsumexp(0) - math.log(2)).sum())


def model(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        shift = 3 * torch.full_like(z, 0.5).bernoulli()
        pyro.sample("x", dist.Normal(z + shift, 0.5), obs=x)


def mean_field(x):
    loc = pyro.param("loc", torch.zeros(3))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(loc, 1.0))


def test_the_mean_weight_of_a_chain_is_the_evidence():
    pyro.set_rng_seed(0)
    kernel, many = UnderdampedLangevin(0.3), {"num_particles": 5000, "max_plate_nesting": 1}
    elbo = TraceSIS_ELBO(None, kernel, schedule=LinearSchedule(10), multi_sample=True, **many)
    with torch.no_grad():
        bounds = torch.tensor([-elbo.loss(model, mean_field, x) for _ in range(8)])
    assert abs(bounds.mean() - EXACT) < 4 * bounds.std() / 8**0.5


def quiet(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 0.5), obs=x)


@pytest.mark.parametrize(
    ("model", "reason"), [(model, "draws random numbers outside sample sites"), (quiet, None)]
)
def test_a_compiled_step_with_such_a_model_runs_as_ever(model, reason):
    result = []
    for wrapped in (lambda elbo: elbo, partial(CompiledELBO, backend="eager")):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        loss = wrapped(TraceSIS_ELBO(2, max_plate_nesting=1))
        svi = SVI(model, mean_field, pyro.optim.Adam({"lr": 0.05}), loss)
        result.append([svi.step(x) for _ in range(6)])
    assert result[0] == result[1]
    assert [reason in said for said in reasons(loss)] == ([True] if reason else [])


def conjugate(count, al=2.0):
    """A Gamma that ConjugateReparam draws aside, from its guess of what is known after the data."""

    def model():
        shape = pyro.param("shape", torch.full((count,), al))
        with pyro.plate("data", count):
            a = pyro.sample("a", dist.LogNormal(0.0, 0.5))
            x = pyro.sample("x", dist.Gamma(shape, a))
            pyro.sample("y", dist.Poisson(x), obs=torch.tensor(3.0))

    def guide():
        with pyro.plate("data", count):
            pyro.sample("a", dist.LogNormal(torch.full((count,), -0.2), 0.5))

    guess = dist.Gamma(torch.full((count,), 3.0), torch.full((count,), 0.9))
    return poutine.reparam(model, {"x": ConjugateReparam(guess)}), guide


@pytest.mark.parametrize(
    "elbo",
    [
        TraceIWAE_ELBO(1),
        TraceIWAE_ELBO(3, vectorize_particles=True),
        TraceSIS_ELBO(3, ULA(0.05)),
        TraceSIS_ELBO(2, coordinates="latent"),
    ],
    ids=["iwae", "in a batch", "sis", "latent"],
)
@pytest.mark.parametrize("is_auto", [False, True], ids=["guide", "AutoNormal"])
def test_draws_that_leave_no_trace_are_noise(elbo, is_auto):
    model, guide = conjugate(4000)
    if is_auto:  # the same guide, which is set up in the first run
        values = {"a": torch.full((4000,), -0.2).exp()}
        guide = AutoNormal(model, init_loc_fn=init_to_value(values=values), init_scale=0.5)
    log_a = torch.linspace(-5, 5, 2001)
    given = dist.GammaPoisson(2.0, log_a.exp()).log_prob(torch.tensor(3.0))
    joint = dist.Normal(0.0, 0.5).log_prob(log_a) + given
    evidence = joint.logsumexp(0) + (log_a[1] - log_a[0]).log()
    weights = (elbo.bounds(model, guide).per_datum - evidence).exp()
    assert_mean(weights, 1.0)


def test_no_estimator_takes_the_gradient_of_such_draws():
    result = []
    for estimator in ("reparam", "vimco"):
        pyro.clear_param_store()
        TraceIWAE_ELBO(3, gradient_estimator=estimator).loss_and_grads(*conjugate(4000))
        result.append(pyro.param("shape").grad)
    error = (result[0].var() + result[1].var()).sqrt() / 4000**0.5
    assert (result[0].mean() - result[1].mean()).abs() < 4.5 * error
    assert result[0].mean().abs() > 10 * error
