"""Draws by their logarithms have the moments of their distribution, beyond the least number."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae.coordinates.coordinate import coordinate_of, logarithmic_draw
from pyro_mcvae.programs.log_values import logs_of
from tests.estimates import assert_mean

COUNT = 20_000
# The mean of the coordinate is a difference of digamma functions.
MEANS = {
    "Gamma": (lambda a: dist.Gamma(a, 3.0), lambda a: a.digamma() - torch.tensor(3.0).log()),
    "Chi2": (lambda a: dist.Chi2(2 * a), lambda a: a.digamma() + torch.tensor(2.0).log()),
    "InverseGamma": (lambda a: dist.InverseGamma(a, torch.ones_like(a)), lambda a: -a.digamma()),
    "Beta": (lambda a: dist.Beta(a, 2 * a), lambda a: a.digamma() - (2 * a).digamma()),
    "Weibull": (
        lambda a: dist.Weibull(torch.ones_like(a), a),
        lambda a: torch.ones_like(a).digamma() / a,
    ),
}


@pytest.mark.parametrize("concentration", [0.05, 0.7, 1e4])
@pytest.mark.parametrize("name", MEANS)
def test_mean_of_the_logarithm_and_its_gradient(name, concentration):
    make, mean = MEANS[name]
    a = torch.full((COUNT,), concentration, dtype=torch.float32, requires_grad=True)
    coordinate = coordinate_of(make(a), "latent")
    at = coordinate.draw()
    assert at.dtype == torch.float32
    exact = mean(torch.tensor(concentration, dtype=torch.float64, requires_grad=True))
    assert_mean(at.detach().double(), exact.detach(), sigmas=5)
    (slope,) = torch.autograd.grad(at.sum(), a)
    (result,) = torch.autograd.grad(mean(b := a.detach().double()[:1].requires_grad_()).sum(), b)
    # PyTorch's derivative of a quantile of Gamma is an approximation to about 1e-3.
    error = 5 * slope.double().std() / COUNT**0.5 + 2e-3 * result.abs()
    assert (slope.double().mean() - result).abs() < error


def test_parts_of_a_dirichlet_draw():
    a = torch.tensor([0.05, 0.3, 2.0], dtype=torch.float32)
    log = logs_of(logarithmic_draw(dist.Dirichlet(a.expand(COUNT, 3)))).log
    assert_mean(log.double(), (a.digamma() - a.sum().digamma()).double(), sigmas=5)


def test_values_lie_inside_of_the_support():
    pyro.set_rng_seed(0)
    for fn in (dist.Gamma, dist.Beta, dist.InverseGamma, dist.Weibull):
        coordinate = coordinate_of(fn(*torch.full((2, COUNT), 0.05, dtype=torch.float32)), "latent")
        value = coordinate.value(coordinate.draw())
        assert (value > 0).all()
        assert value.isfinite().all()
        assert fn is not dist.Beta or (value < 1).all()
