"""White coordinates: the map, its inverse, its determinant, and a density that it leaves whole."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae.coordinates.chain_density import ChainDensity, WhitenedDensity, Whitening
from pyro_mcvae.coordinates.log_weight import GradientMode, LogWeight
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.run import Programs

MOVABLE = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])


def fitted(dense, movable=None, count=200_000):
    """Of draws of two correlated normal distributions in three dimensions, and their moments."""
    torch.manual_seed(0)
    factor = torch.randn(2, 3, 3).tril() + 2 * torch.eye(3)
    mean = torch.randn(2, 3)
    draws = mean + torch.einsum("nij,knj->kni", factor, torch.randn(count, 2, 3))
    return Whitening.none(draws, movable, dense).refined(draws), mean, draws


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("movable", [None, MOVABLE])
def test_the_map_its_inverse_its_determinant_and_its_gradient(dense, movable):
    result, *_ = fitted(dense, movable, count=50)
    u = torch.randn(4, 2, 3, requires_grad=True)
    z = result.position(u)
    assert torch.allclose(result.white(z), u, atol=1e-5)
    jacobian = torch.autograd.functional.jacobian(result.position, u[:1].detach())[0, :, :, 0]
    for n in range(2):
        assert torch.allclose(jacobian[n, :, n].logdet(), result.log_det[n], atol=1e-5)
    (expected,) = torch.autograd.grad(z.sin().sum(), u)
    assert torch.allclose(result.pulled(z.cos()), expected, atol=1e-5)


@pytest.mark.parametrize("dense", [True, False])
def test_draws_are_white_in_the_coordinates_that_they_show(dense):
    result, mean, draws = fitted(dense)
    white = result.white(draws)
    assert torch.allclose(result.mean, mean, atol=0.05)
    assert torch.allclose(white.mean(0), torch.zeros(2, 3), atol=0.01)
    covariance = torch.einsum("kni,knj->nij", white, white) / len(white)
    if dense:
        assert torch.allclose(covariance, torch.eye(3).expand(2, 3, 3), atol=0.01)
    else:
        assert torch.allclose(covariance.diagonal(dim1=1, dim2=2), torch.ones(2, 3), atol=0.01)


def model(x):
    with pyro.plate("data", 2):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z.exp(), 0.5), obs=x)


def guide(x):
    with pyro.plate("data", 2):
        pyro.sample("z", dist.Normal(x / 3, 0.4))


def test_the_evidence_is_the_same_whatever_the_map():
    """By quadrature over one latent of each of two data, and gradients that are the density's."""
    torch.manual_seed(0)
    x, grid = torch.tensor([0.5, 3.0], dtype=torch.double), torch.linspace(-60, 60, 6_001)
    grid = grid.double()
    with torch.enable_grad():
        log_weight = LogWeight(
            ParticleSampler(len(grid), True, math.inf, joint=False),
            Programs(model, guide, (x,), {}),
            gradient=GradientMode.COORDINATES,
        )
    plain = ChainDensity(log_weight)
    mean, factor = torch.tensor([[0.7], [-2.0]]).double(), torch.tensor([[0.7], [3.0]]).double()
    prior = dist.Normal(0.0, 1.0).log_prob(grid)
    likelihood = dist.Normal(grid.exp(), 0.5).log_prob(x[:, None])
    exact = (prior + likelihood).logsumexp(-1) + math.log(grid[1] - grid[0])
    for each in (factor, factor.unsqueeze(-1)):
        density = WhitenedDensity(plain, Whitening(mean, each))
        u = grid[:, None, None].expand(-1, 2, 1)
        state = density(u)
        total = state.log_base + state.log_weight
        result = total.logsumexp(0) + math.log(grid[1] - grid[0])
        assert torch.allclose(result, exact, atol=1e-6), (result, exact)
        base = state.log_base.logsumexp(0) + math.log(grid[1] - grid[0])
        assert torch.allclose(base, torch.zeros(2).double(), atol=1e-6)
        near = (u[1:-1, :, 0].abs() < 0.5) & (total[1:-1] > -50)
        slope = (total[2:] - total[:-2]) / (grid[2] - grid[0])
        gradient = (state.grad_base + state.grad_weight)[1:-1, :, 0]
        assert torch.allclose(slope[near], gradient[near], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dense", [True, False])
def test_what_does_not_move_stays_as_it_is(dense):
    result, *_ = fitted(dense, MOVABLE, count=50)
    u = torch.randn(4, 2, 3)
    assert torch.equal(result.position(u)[:, 1, 1], u[:, 1, 1])
    changed = u.clone()
    changed[:, 1, 1] += 1.0
    assert torch.equal(result.log_normal(changed), result.log_normal(u))
    others = [0, 2]
    assert torch.equal(result.position(changed)[..., others], result.position(u)[..., others])
