"""Hamiltonian Monte Carlo; that it leaves its target invariant is in test_kernel.py."""

import math

import pytest
import torch

from pyro_mcvae import HMC, MALA
from pyro_mcvae.chains.annealing import evaluator
from pyro_mcvae.chains.kernels import Target
from tests.chains.densities import correlated, frozen


def target(beta=0.7):
    return Target(evaluator(correlated), torch.tensor(beta))


@pytest.mark.parametrize("eta", [0.05, 0.5, torch.tensor([0.1, 0.6], dtype=torch.float64)])
def test_one_leapfrog_step_is_mala_draw_by_draw(eta):
    eta = torch.as_tensor(eta)
    start = target().evaluate(torch.randn(100, 2))
    result = []
    for kernel in (MALA(eta), HMC((2 * eta).sqrt(), num_leapfrog=1)):
        torch.manual_seed(5)
        state, infos = start, []
        for _ in range(4):
            state, info = kernel.step(state, target())
            infos.append(info)
        result.append((state, infos))
    (a, first), (b, second) = result
    assert torch.allclose(a.position, b.position)
    for i, j in zip(first, second, strict=True):
        assert torch.equal(i.accepted, j.accepted)
        assert torch.allclose(i.acceptance, j.acceptance)
        assert torch.allclose(i.log_prob, j.log_prob)
        assert torch.allclose(i.log_ratio, j.log_ratio)


def test_the_ratio_is_that_of_the_momenta(monkeypatch):
    momentum = torch.randn(10, 2)
    start = target().evaluate(torch.randn(10, 2))
    frozen(monkeypatch, momentum)
    proposal = HMC(0.3, num_leapfrog=4).propose(start, target())
    # The same by a plain loop.
    z, p = start.position, momentum
    for _ in range(4):
        p = p + 0.15 * gradient(z)
        z = z + 0.3 * p
        p = p + 0.15 * gradient(z)
    assert torch.allclose(proposal.state.position, z)
    expected = 0.5 * (momentum.square() - p.square()).sum(-1)
    assert torch.allclose(proposal.log_ratio, expected)


def test_laziness_rejects_a_share_and_bounds_the_score():
    """With the same noise: the same moves, each kept with 1 - laziness."""
    start = target().evaluate(torch.randn(2000, 2))
    result = []
    for laziness in (0.0, 0.2):
        torch.manual_seed(5)
        result.append(HMC(0.4, num_leapfrog=2, laziness=laziness).step(start, target())[1])
    eager, lazy = result
    assert torch.allclose(lazy.acceptance, 0.8 * eager.acceptance)
    assert not (lazy.accepted & ~eager.accepted).any()
    rejected = lazy.log_prob[~lazy.accepted]
    assert (rejected >= math.log(0.2) - 1e-12).all()
    assert (eager.log_prob[~eager.accepted] < math.log(0.2)).any()


def gradient(z, beta=0.7):
    z = z.detach().requires_grad_()
    log_base, log_weight = correlated(z)
    return torch.autograd.grad((log_base + beta * log_weight).sum(), z)[0]


def test_jitter_breaks_orbits_that_close():
    """Ten steps that go once around a normal distribution's orbits lead nowhere."""
    normal = evaluator(lambda z: (-0.5 * z.square().sum(-1), torch.zeros(z.shape[:-1])))
    around = math.sqrt(2 - 2 * math.cos(2 * math.pi / 10))
    for jitter in (0.0, 0.3):
        kernel, to = HMC(around, num_leapfrog=10, jitter=jitter), Target(normal, torch.tensor(1.0))
        state = normal(torch.full((1000, 1), 3.0))
        for _ in range(25):
            state, _ = kernel.step(state, to)
        if not jitter:
            assert torch.allclose(state.position, torch.tensor(3.0))
        else:
            assert abs(state.position.mean()) < 4 / math.sqrt(1000)
            assert abs(state.position.var() - 1) < 4 * math.sqrt(2 / 1000)
