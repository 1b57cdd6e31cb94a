"""ULA and MALA against the densities of their moves."""

import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import MALA, ULA, GaussianReverse
from pyro_mcvae.chains.annealing import evaluator
from pyro_mcvae.chains.kernels import Target
from tests.chains.densities import Reverse, correlated, frozen

ETAS = [0.05, 0.4, torch.tensor([0.1, 0.6], dtype=torch.float64)]
etas = pytest.mark.parametrize("eta", ETAS, ids=["small", "large", "per-coordinate"])
kernels = pytest.mark.parametrize("cls", [ULA, MALA])


def target(beta=0.7, movable=None, density=correlated):
    return Target(evaluator(density), torch.tensor(beta), movable)


def gradient(z, beta=0.7):
    z = z.detach().requires_grad_()
    log_base, log_weight = correlated(z)
    return torch.autograd.grad((log_base + beta * log_weight).sum(), z)[0]


def log_density(new, old, eta):
    """log m(old -> new), with its constant."""
    return dist.Normal(old + eta * gradient(old), (2 * eta) ** 0.5).log_prob(new).sum(-1)


@kernels
@etas
def test_proposal_and_ratio_by_their_densities(cls, eta, monkeypatch):
    eta = torch.as_tensor(eta)
    noise, z = torch.randn(8, 2), torch.randn(8, 2)
    frozen(monkeypatch, noise)
    proposal = cls(eta).propose(target().evaluate(z), target())
    new = proposal.state.position.detach()
    assert torch.allclose(new, z + eta * gradient(z) + (2 * eta).sqrt() * noise)
    expected = log_density(z, new, eta) - log_density(new, z, eta)
    assert torch.allclose(proposal.log_ratio, expected)


@etas
def test_a_learned_reversal_by_its_density(eta, monkeypatch):
    eta, network = torch.as_tensor(eta), Reverse(0.8)
    noise, z = torch.randn(8, 2), torch.randn(8, 2)
    frozen(monkeypatch, noise)
    proposal = ULA(eta, reverse=GaussianReverse(network)).propose(target().evaluate(z), target())
    new = proposal.state.position.detach()
    shift, log_scale = network(new, gradient(new), torch.tensor(0.7))
    scale = (2 * eta).sqrt()
    loc = new + eta * gradient(new) + scale * shift
    reverse = dist.Normal(loc, scale * log_scale.exp()).log_prob(z).sum(-1)
    assert torch.allclose(proposal.log_ratio, reverse - log_density(new, z, eta))


def test_a_reversal_of_zero_is_that_of_ula(monkeypatch):
    """Also where a coordinate does not move, whatever the network returns for it."""
    noise, z = torch.randn(8, 2), torch.randn(8, 2)
    frozen(monkeypatch, noise, noise, noise)
    at = target().evaluate(z)
    own = ULA(0.2).propose(at, target())
    zero = ULA(0.2, reverse=GaussianReverse(Reverse(0.0))).propose(at, target())
    assert torch.allclose(zero.log_ratio, own.log_ratio)
    fixed = target(movable=torch.tensor([0.0, 0.0]))
    still = ULA(0.2, reverse=GaussianReverse(Reverse(0.8))).propose(at, fixed)
    assert torch.equal(still.state.position, z)
    assert torch.allclose(still.log_ratio, torch.zeros(8))


def test_a_network_of_another_shape_is_refused():
    class Scalar(torch.nn.Module):
        def forward(self, position, gradient, beta):
            return position.sum(-1)

    kernel = ULA(0.2, reverse=GaussianReverse(Scalar()))
    with pytest.raises(ValueError, match="must return a shift and a log scale of shape \\(8, 2\\)"):
        kernel.propose(target().evaluate(torch.randn(8, 2)), target())
    with pytest.raises(ValueError, match="network must be a module"):
        GaussianReverse(lambda *_: None)
    with pytest.raises(ValueError, match=r"reverse must be a GaussianReverse\(network\)"):
        ULA(0.2, reverse=Scalar())
