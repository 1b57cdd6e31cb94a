"""Starts of AutoGuides from a Laplace approximation: exact for Gaussian posteriors."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from pyro_mcvae import laplace_init

COVARIANCE = torch.tensor([[4.0, 1.9e-3], [1.9e-3, 1e-6]])
MEAN = torch.tensor([300.0, -2.0])


def correlated():
    """A Gaussian posterior with standard deviations 2 and 0.001, correlated by 0.95."""
    z = pyro.sample("z", dist.ImproperUniform(dist.constraints.real, (), (2,)))
    normal = dist.MultivariateNormal(MEAN, COVARIANCE)
    pyro.factor("f", normal.log_prob(z))


def test_start_of_a_gaussian_posterior():
    """The mean, and the smallest standard deviation of a coordinate given the others."""
    start = laplace_init(correlated, seed=0)
    smallest = torch.linalg.inv(COVARIANCE).diagonal().rsqrt().min()
    assert start["init_scale"] == pytest.approx(float(smallest), rel=1e-3)
    for kind in (AutoNormal, AutoMultivariateNormal):
        pyro.clear_param_store()
        guide = kind(correlated, **start)
        guide()
        error = (guide.median()["z"] - MEAN) / COVARIANCE.diagonal().sqrt()
        assert float(error.abs().max()) < 1e-3


@pytest.mark.parametrize("form", ["improper", "mask", "context"])
def test_flat_priors_have_a_start(form):
    def model():
        if form == "improper":
            s = pyro.sample("s", dist.ImproperUniform(dist.constraints.positive, (), ()))
        elif form == "mask":
            s = pyro.sample("s", dist.LogNormal(0.0, 1.0).mask(False))
        else:
            with poutine.mask(mask=False):
                s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
        pyro.factor("f", dist.Gamma(50.0, 2.0).log_prob(s))

    # Of the density over log s, which has a factor s.
    start = laplace_init(model, seed=0)
    guide = AutoNormal(model, **start)
    guide()
    assert float(guide.median()["s"]) == pytest.approx(25.0, rel=1e-3)
    assert start["init_scale"] == pytest.approx(50**-0.5, rel=1e-2)


def test_a_density_that_is_not_bounded_starts_where_its_mass_is():
    """A funnel: the density rises without bound where the scale falls to zero."""

    def model():
        scale = pyro.sample("scale", dist.HalfCauchy(5.0))
        z = pyro.sample("z", dist.Normal(0.0, scale).expand([8]).to_event(1))
        pyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=torch.linspace(-6.0, 6.0, 8))

    start = laplace_init(model, seed=0)
    guide = AutoNormal(model, **start)
    guide()
    assert 1.0 < float(guide.median()["scale"]) < 20.0
    assert 0.1 < start["init_scale"] < 2.0


def test_the_mode_with_more_mass_is_chosen():
    """A narrow mode with a higher density and a wide one with 0.9 of the mass."""

    def model():
        a = pyro.sample("a", dist.ImproperUniform(dist.constraints.real, (), ()))
        narrow, wide = dist.Normal(-5.0, 0.01), dist.Normal(5.0, 1.0)
        parts = narrow.log_prob(a) + math.log(0.1), wide.log_prob(a) + math.log(0.9)
        pyro.factor("f", torch.logaddexp(*parts))

    start = laplace_init(model, seed=0)
    guide = AutoNormal(model, **start)
    guide()
    assert float(guide.median()["a"]) == pytest.approx(5.0, abs=0.01)
    assert start["init_scale"] == pytest.approx(1.0, rel=1e-2)


def test_nothing_is_changed():
    network = torch.nn.Linear(1, 1)

    def model(x):
        pyro.module("network", network)
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(network(x[:, None]).squeeze(-1) + w, 1.0), obs=x)

    x = torch.linspace(-1.0, 1.0, 5)
    model(x)
    before = {n: v.clone() for n, v in pyro.get_param_store().items()}
    state = torch.get_rng_state()
    laplace_init(model, x, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    after = dict(pyro.get_param_store().items())
    assert before.keys() == after.keys()
    assert all(torch.equal(after[n], v) for n, v in before.items())
    assert network.training
