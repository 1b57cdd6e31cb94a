"""The random walk; that it leaves its target invariant is in test_base.py."""

import torch

from pyro_mcvae import RandomWalk
from pyro_mcvae.chains.kernels import State, Target
from tests.chains.densities import correlated, frozen


def evaluate(position):
    """Without gradients."""
    with torch.no_grad():
        return State(position, *correlated(position))


def test_a_symmetric_proposal_without_gradients(monkeypatch):
    target = Target(evaluate, torch.tensor(0.7))
    z, noise = torch.randn(6, 2), torch.randn(6, 2)
    sigma = torch.tensor([0.5, 2.0])
    frozen(monkeypatch, noise)
    proposal = RandomWalk(sigma).propose(evaluate(z), target)
    assert torch.equal(proposal.state.position, z + sigma * noise)
    assert torch.equal(proposal.log_ratio, torch.zeros(6))
    assert not RandomWalk.needs_gradient


def test_uphill_is_always_accepted():
    target = Target(evaluate, torch.tensor(0.7))
    state = evaluate(torch.randn(2000, 2))
    moved, info = RandomWalk(0.8).step(state, target)
    uphill = info.acceptance == 1
    assert 0 < uphill.sum() < 2000
    assert info.accepted[uphill].all()
    assert (target.log_density(moved) >= target.log_density(state))[uphill].all()
