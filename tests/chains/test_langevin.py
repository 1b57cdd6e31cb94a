"""ULA, MALA and the learned reverse kernel against the densities of their moves."""

import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import MALA, ULA, GaussianReverse
from pyro_mcvae.chains.annealing import evaluator
from pyro_mcvae.chains.kernel import Target
from tests.chains.densities import bent, correlated, frozen

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


@kernels
@etas
def test_the_ratio_is_antisymmetric(cls, eta, monkeypatch):
    eta = torch.as_tensor(eta)
    start = target().evaluate(torch.randn(8, 2))
    kernel = cls(eta)
    there = kernel.propose(start, target())
    new = there.state.position
    # The noise that leads back.
    back = (start.position - new - eta * gradient(new)) / (2 * eta).sqrt()
    frozen(monkeypatch, back.detach())
    again = kernel.propose(there.state, target())
    assert torch.allclose(again.state.position, start.position)
    assert torch.allclose(again.log_ratio, -there.log_ratio)


class Network(torch.nn.Module):
    """Shift and log scale, of random weights."""

    def __init__(self, scale=0.3, dim=2):
        super().__init__()
        self.linear = torch.nn.Linear(2 * dim + 1, 2 * dim)
        for p in self.parameters():
            p.data.normal_().mul_(scale)

    def forward(self, position, gradient, beta):
        beta = beta.expand(position.shape[:-1] + (1,))
        return self.linear(torch.cat([position, gradient, beta], -1)).chunk(2, -1)


@etas
def test_a_network_of_zeros_is_the_default_reversal(eta):
    start = target().evaluate(torch.randn(8, 2))
    found = []
    for reverse in (None, GaussianReverse(lambda z, g, beta: (torch.zeros(()), torch.zeros(())))):
        torch.manual_seed(2)
        found.append(ULA(eta, reverse).step(start, target()))
    (state, info), (other, learned) = found
    assert torch.equal(state.position, other.position)
    assert torch.allclose(info.log_ratio, learned.log_ratio)
    assert torch.allclose(info.acceptance, learned.acceptance)


@etas
def test_the_learned_reverse_density_by_hand(eta):
    eta = torch.as_tensor(eta)
    network = Network()
    z = torch.randn(8, 2)
    state, info = ULA(eta, GaussianReverse(network)).step(target().evaluate(z), target())
    new = state.position.detach()
    shift, log_scale = network(new, gradient(new), torch.tensor(0.7))
    loc = new + eta * gradient(new) + shift
    backward = dist.Normal(loc, (2 * eta).sqrt() * log_scale.exp()).log_prob(z).sum(-1)
    assert torch.allclose(info.log_ratio, backward - log_density(new, z, eta))


def test_acceptance_is_that_of_the_plain_reversal():
    start = target().evaluate(torch.randn(8, 2))
    found = []
    for reverse in (None, GaussianReverse(Network(1.0))):
        torch.manual_seed(2)
        found.append(ULA(0.3, reverse).step(start, target())[1].acceptance)
    assert torch.equal(*found)


def test_the_learned_reverse_kernel_of_frozen_coordinates():
    """They have no density, whatever the network says of them."""
    network = Network()

    def wide(z):
        return correlated(z[..., :2])

    def narrowed(z, g, beta):
        pad = torch.full(z.shape[:-1] + (1,), 3.0)
        shift, log_scale = network(z[..., :2], g[..., :2], beta)
        return torch.cat([shift, pad], -1), torch.cat([log_scale, pad], -1)

    z, noise = torch.randn(8, 3), torch.randn(8, 3)
    movable = torch.tensor([1.0, 1.0, 0.0])
    with pytest.MonkeyPatch.context() as patch:
        frozen(patch, noise)
        there = target(0.7, movable, wide)
        _, found = ULA(0.3, GaussianReverse(narrowed)).step(there.evaluate(z), there)
    with pytest.MonkeyPatch.context() as patch:
        frozen(patch, noise[:, :2])
        _, expected = ULA(0.3, GaussianReverse(network)).step(target().evaluate(z[:, :2]), target())
    assert torch.allclose(found.log_ratio, expected.log_ratio)


def test_the_reverse_network_is_part_of_the_kernel():
    names = {n for n, _ in ULA(0.3, GaussianReverse(Network())).named_parameters()}
    assert names == {"reverse.network.linear.weight", "reverse.network.linear.bias"}


@kernels
def test_small_steps_are_always_accepted(cls):
    there = target(1.0, density=bent)
    _, info = cls(1e-6).step(there.evaluate(torch.randn(100, 1)), there)
    assert info.acceptance.min() > 0.999
