"""A custom distribution without a support and an expand method."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    TraceSIS_ELBO,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    log_evidence,
    refine,
    report,
)

X = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)


class OwnNormal(dist.TorchDistribution):
    """No support, no constraints of its arguments, no expand."""

    has_rsample = True

    def __init__(self, loc, scale):
        self.base = dist.Normal(loc, scale)
        super().__init__(self.base.batch_shape, validate_args=False)

    def rsample(self, sample_shape=()):
        return self.base.rsample(sample_shape)

    def log_prob(self, value):
        return self.base.log_prob(value)


def pair(fn):
    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X)

    def guide():
        slope = pyro.param("slope", torch.tensor(0.4))
        with pyro.plate("data", 3):
            pyro.sample("z", fn(slope * X, torch.tensor(0.8)))

    return model, guide


def test_judges_take_it_and_chains_say_what_they_need():
    model, guide = pair(OwnNormal)
    options = {"vectorize_particles": False, "num_particles": 100}
    result = log_evidence(model, guide, **options)
    exact = dist.Normal(0.0, math.sqrt(2)).log_prob(X)
    assert ((result.log_evidence - exact).abs() < 4.5 * result.standard_error).all()
    assert "data" in str(report(model, guide, vectorize_particles=False, num_particles=30))
    with pytest.raises(
        ValueError, match=r"\(OwnNormal\) has .* \(it does not define its support\)"
    ):
        TraceSIS_ELBO(2).loss(model, guide)
    with pytest.raises(ValueError, match="register_noise"):
        refine(model, guide, num_samples=3, schedule=2, vectorize_particles=False)


def test_draws_that_nothing_moves_need_no_coordinate():
    options = {"num_samples": 10, "num_particles": 4, "vectorize_particles": False}
    result = []
    for fn in (dist.Normal, OwnNormal):
        pyro.clear_param_store()
        result.append(refine(*pair(fn), seed=0, **options)["z"])
    torch.testing.assert_close(result[1], result[0])


class OwnBernoulli(OwnNormal):
    has_rsample = False

    def __init__(self, probs):
        self.base = dist.Bernoulli(probs)
        dist.TorchDistribution.__init__(self, self.base.batch_shape, validate_args=False)

    def sample(self, sample_shape=()):
        return self.base.sample(sample_shape)


def test_a_searched_site_has_to_say_its_support():
    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", OwnBernoulli(torch.full((3,), 0.4)))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X)

    with pytest.raises(
        ValueError, match=r"site 'z' \(OwnBernoulli\) .*does not define its support"
    ):
        TraceTruncated_ELBO().loss(model, TruncatedPosterior(model, 2))
