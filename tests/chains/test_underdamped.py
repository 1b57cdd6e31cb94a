"""Underdamped Langevin dynamics: refreshment, momentum, and its limit without momentum."""

import math

import pytest
import torch

from pyro_mcvae import ULA, UnderdampedLangevin
from pyro_mcvae.chains.annealing import evaluator
from pyro_mcvae.chains.kernels import Target, leapfrog, log_momentum_ratio
from tests.chains.densities import correlated, frozen


def target(beta=0.7, movable=None):
    return Target(evaluator(correlated), torch.tensor(beta), movable)


@pytest.mark.parametrize("eta", [0.05, 0.5, torch.tensor([0.1, 0.6], dtype=torch.float64)])
def test_without_momentum_it_is_ula_draw_by_draw(eta):
    eta = torch.as_tensor(eta)
    start = target().evaluate(torch.randn(20, 2))
    result = []
    for kernel in (ULA(eta), UnderdampedLangevin((2 * eta).sqrt(), momentum=0.0)):
        torch.manual_seed(5)
        state, infos = start, []
        for k in range(4):
            state, info = kernel.step(state, target(k / 4))
            infos.append(info)
        result.append((state, infos))
    (a, first), (b, second) = result
    assert torch.allclose(a.position, b.position)
    for i, j in zip(first, second, strict=True):
        assert torch.allclose(i.log_ratio, j.log_ratio)
        assert torch.allclose(i.acceptance, j.acceptance)


def test_the_momentum_is_refreshed_in_part(monkeypatch):
    mu, noises = 0.8, torch.randn(3, 6, 2)
    kernel = UnderdampedLangevin(0.4, momentum=mu)
    state = target().evaluate(torch.randn(6, 2))
    frozen(monkeypatch, *noises)
    momentum = noises[0]
    for k in range(3):
        if k:
            momentum = mu * momentum + math.sqrt(1 - mu**2) * noises[k]
        expected, end = leapfrog(state, momentum, target(), torch.tensor(0.4))
        state, info = kernel.step(state, target())
        assert torch.allclose(state.position, expected.position)
        assert torch.allclose(state.momentum, end)
        assert torch.allclose(info.log_ratio, log_momentum_ratio(end, momentum))
        momentum = end


def test_momentum_makes_chains_go_further():
    def distance(mu):
        torch.manual_seed(0)
        flat = evaluator(lambda z: (torch.zeros(z.shape[:-1]), torch.zeros(z.shape[:-1])))
        there = Target(flat, torch.tensor(1.0))
        state = there.evaluate(torch.zeros(2000, 1))
        for _ in range(20):
            state, _ = UnderdampedLangevin(0.1, momentum=mu).step(state, there)
        return state.position.square().mean()

    # On a flat density the variance is that of a sum of correlated normals.
    for mu in (0.0, 0.9):
        steps = torch.arange(20)
        exact = 0.01 * (mu ** (steps[:, None] - steps).abs()).sum()
        assert distance(mu).item() == pytest.approx(exact.item(), rel=0.15)
