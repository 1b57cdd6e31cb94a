"""The mixture of two unbiased gradients is unbiased, and has the least noise that it can have."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import TraceIWAE_ELBO
from pyro_mcvae.elbos.iwae import dreg_coefficient
from tests.estimates import assert_mean, gradients
from tests.models import ConjugateGaussian


class EightSchools:
    """One weight over ten latents, and a guide whose scales are a given multiple of the priors'."""

    def __init__(self, width):
        self.y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
        self.sigma = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
        self.values = {"loc": self.y / 2}
        self.width = width

    def model(self):
        mu = pyro.sample("mu", dist.Normal(4.0, 5.0))
        with pyro.plate("schools", 8):
            theta = pyro.sample("theta", dist.Normal(mu, 5.0))
            pyro.sample("y", dist.Normal(theta, self.sigma), obs=self.y)

    def guide(self):
        loc = pyro.param("loc", self.values["loc"])
        pyro.sample("mu", dist.Normal(4.0, 5.0 * self.width))
        with pyro.plate("schools", 8):
            pyro.sample("theta", dist.Normal(loc, 5.0 * self.width))


def spread(programs, estimator, num_particles, **options):
    elbo = TraceIWAE_ELBO(
        num_particles, gradient_estimator=estimator, vectorize_particles=True, **options
    )
    return {n: g.std(0).square().mean().sqrt() for n, g in gradients(elbo, programs, 40).items()}


def test_too_few_draws_of_one_weight_have_the_plain_gradient():
    schools, result = EightSchools(0.5), []
    for estimator in ("auto", "reparam"):
        elbo = TraceIWAE_ELBO(3, gradient_estimator=estimator, joint=True)
        elbo.loss(schools.model, schools.guide)  # which also finds out about the programs
        pyro.set_rng_seed(0)
        result.append(gradients(elbo, schools, 1)["loc"])
    torch.testing.assert_close(*result)


@pytest.mark.parametrize("num_particles", [pytest.param(2, marks=pytest.mark.slow), 10])
def test_a_guide_that_is_about_right_has_the_doubly_reparameterized_one(num_particles):
    exact = ConjugateGaussian(N=100)
    exact.set_guide(a=0.45, log_s=-0.4)
    result = {e: spread(exact, e, num_particles) for e in ("auto", "reparam", "dreg")}
    for name in exact.values:
        assert result["auto"][name] < 1.35 * result["dreg"][name]
        assert result["auto"][name] < 0.7 * result["reparam"][name]


@pytest.mark.parametrize("plates", [(1,), (2,), (3, 2)])
def test_the_share_of_a_draw_does_not_depend_on_it(plates):
    shape = (8, *plates)
    log_q = torch.randn(shape)
    log_weight = 0.3 * torch.randn(shape) - 0.5 * log_q
    fraction = dreg_coefficient(log_weight, log_q).expand(shape)
    own = torch.zeros(shape, dtype=torch.bool)
    (own if plates == (1,) else own.reshape(8, -1).T)[::2] = True
    changed = dreg_coefficient(
        torch.where(own, torch.randn(shape), log_weight),
        torch.where(own, torch.randn(shape), log_q),
    ).expand(shape)
    assert (changed[own] == fraction[own]).all()
    assert (fraction[own] > 0).all()
    assert (changed[~own] != fraction[~own]).all()


@pytest.mark.parametrize("scale", [0.3, 1.5])
@pytest.mark.parametrize("data", [1, 3])
def test_the_mixture_is_unbiased(scale, data):
    """The gradient of the bound by a Gaussian guide's location, of 40,000 steps at once."""
    steps, num_particles, loc = 40_000, 6, 0.4
    noise = torch.randn(steps, num_particles, data)
    z = loc + scale * noise
    log_q = dist.Normal(loc, scale).log_prob(z)
    log_w = dist.Normal(0.0, 1.0).log_prob(z) - log_q
    weight = log_w.softmax(1)
    fraction = torch.vmap(dreg_coefficient)(log_w, log_q)
    fraction = fraction if data == 1 else fraction.unsqueeze(1)
    assert fraction.std() > 0.01  # or nothing is mixed
    plain, path = -z, noise / scale - z
    mixed = fraction * weight.square() * path
    mixed = mixed + (1 - fraction) * weight * plain
    # The plain and the doubly reparameterized gradient agree in expectation; so has the mixture.
    assert_mean((mixed - weight * plain).sum(1).mean(1), 0.0)


def test_weights_of_zero_and_constant_densities_are_left_to_the_plain_gradient():
    log_weight = torch.full((8, 1), -float("inf"))
    assert (dreg_coefficient(log_weight, torch.randn(8, 1)) == 0).all()
    # Also a constant that is no number of binary digits.
    for constant in (0.0, 0.1, -31.7):
        for shape in ((8, 1), (3, 50)):
            density = torch.full(shape, constant, dtype=torch.float32)
            assert (dreg_coefficient(torch.randn(shape, dtype=torch.float32), density) == 0).all()
