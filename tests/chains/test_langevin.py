"""ULA and MALA against the densities of their moves."""

import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import MALA, ULA
from pyro_mcvae.chains.annealing import evaluator
from pyro_mcvae.chains.kernels import Target
from tests.chains.densities import correlated, frozen

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
