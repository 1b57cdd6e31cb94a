"""Draws by their logarithms have the moments of their distribution, beyond the least number."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import ExpTransform, SigmoidTransform

from pyro_mcvae.coordinates.coordinate import coordinate_of, logarithmic_draw
from pyro_mcvae.coordinates.log_weight import GradientMode, LogWeight
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.log_values import at_logs, leaf_of, logs_of, pushed
from pyro_mcvae.programs.run import Programs
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


@pytest.mark.parametrize(
    ("name", "concentration"),
    # Weibull draws are powers of exponential ones by PyTorch, and underflow.
    [(n, c) for n in MEANS for c in (0.05, 0.7, 1e4) if (n, c) != ("Weibull", 0.05)],
)
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


FAMILIES = {
    "Gamma": lambda c: dist.Gamma(c, 2.0),
    "Beta": lambda c: dist.Beta(c, 2 * c),
    "Dirichlet": lambda c: dist.Dirichlet(c.unsqueeze(-1).expand(-1, 3)),
    "RelaxedBernoulli": lambda c: dist.RelaxedBernoulli(c[0].detach(), logits=10 * c),
    "RelaxedOneHotCategorical": lambda c: dist.RelaxedOneHotCategorical(
        c[0].detach(), logits=c.unsqueeze(-1) * torch.tensor([1.0, 2.0, 0.0])
    ),
    "InverseGamma": lambda c: dist.InverseGamma(c, 2.0),
    "LogNormal": lambda c: dist.LogNormal(2.0, 1 / c),
    "logit normal": lambda c: dist.TransformedDistribution(
        dist.Normal(2.0, 1 / c), [dist.transforms.SigmoidTransform()]
    ),
    "Exponential": lambda c: dist.Exponential(c),
}


@pytest.mark.parametrize("mode", [GradientMode.NONE, GradientMode.FIRST, GradientMode.CHAIN])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_weight_is_one_where_the_guide_is_the_prior(name, mode):
    """Where values are rounded to a boundary, too: both densities belong to the same draw."""
    c = torch.full((COUNT // 10,), 0.05, dtype=torch.float32)

    def model():
        with pyro.plate("data", len(c)):
            pyro.sample("z", FAMILIES[name](c))

    def guide():
        with pyro.plate("data", len(c)):
            pyro.sample("z", FAMILIES[name](pyro.param("c", c.clone())))

    sampler = ParticleSampler(1, True, max_plate_nesting=1)
    log_weight = LogWeight(sampler, Programs(model, guide, (), {}), gradient=mode)
    at = log_weight.coordinates.detach()
    for result in (log_weight.first, log_weight(1.1 * at + 0.3)):
        assert result.log_weight.abs().max() < 1e-3
        assert result.log_base.isfinite().all()
    value = log_weight.first.sample.runs[0].guide_trace.nodes["z"]["value"]
    assert (
        name == "Exponential"
        or (value <= torch.finfo(torch.float32).tiny).any()
        or (1 - value < 1e-7).any()
    )


def test_gradients_at_detached_draws_are_those_of_the_density():
    """Draws that the model gets as leaves have the gradient of their density, also rounded ones."""
    u = torch.tensor([-120.0, -60.0, -1.0, 2.0], dtype=torch.float32)
    for fn, transform in (
        (dist.Gamma(0.3, 2.0), ExpTransform()),
        (dist.Beta(0.3, 2.0), SigmoidTransform()),
    ):
        value = pushed(transform, u)
        leaf = leaf_of(value)
        density = at_logs(fn, leaf).log_prob(leaf)
        assert torch.equal(density, at_logs(fn, value).log_prob(value))
        (slope,) = torch.autograd.grad(density.sum(), leaf)
        plain = value.double().requires_grad_()
        (exact,) = torch.autograd.grad(fn.log_prob(plain).sum(), plain)
        assert torch.allclose(slope.double(), exact, rtol=1e-5)
