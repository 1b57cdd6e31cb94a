"""Densities on tensors alone, whose moments and normalising constants are known."""

import math

import torch

from pyro_mcvae import ScoreNetwork, UnderdampedLangevin
from pyro_mcvae.chains.annealing import evaluator
from pyro_mcvae.chains.kernels import MassMatrix, Target
from pyro_mcvae.chains.score_network import SizedByChain


class Reverse(torch.nn.Module):
    """A network of a GaussianReverse with a moderate shift and log scale."""

    def __init__(self, strength=0.3):
        super().__init__()
        self.strength = torch.nn.Parameter(torch.tensor(strength))

    def forward(self, position, gradient, beta):
        shift = self.strength * torch.tanh(position - 0.1 * gradient + beta)
        return shift, 0.3 * self.strength * torch.sin(position.sum(-1, keepdim=True) - beta)


def standard_normal(z):
    return -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)


def correlated(z):
    """Base N(0, I) in two dimensions; base + log w is a correlated Gaussian times exp(0.7)."""
    precision = torch.tensor([[2.0, -0.8], [-0.8, 1.0]]).to(z)
    delta = z - torch.tensor([0.5, -0.3]).to(z)
    quadratic = ((delta @ precision) * delta).sum(-1)
    log_gamma = -0.5 * quadratic + 0.5 * precision.logdet() - math.log(2 * math.pi) + 0.7
    return standard_normal(z), log_gamma - standard_normal(z)


LOG_EVIDENCE = 0.7  # of ``correlated``


def bent(z):
    """Skewed, with tails of another kind than a normal's; one dimension."""
    x = z[..., 0]
    return standard_normal(z), 0.8 * torch.sin(2 * x) - 0.1 * x**4 + 0.5 * x


GRID = torch.linspace(-5, 5, 20001, dtype=torch.float64).unsqueeze(-1)


def bent_target(beta):
    return Target(evaluator(bent), torch.tensor(beta))


def bent_weights(beta):
    """Probabilities of the grid's points under the annealed density."""
    log_base, log_weight = bent(GRID)
    return (log_base + beta * log_weight).softmax(0)


def bent_draws(count, beta):
    """Exact draws, to the grid's precision (0.0005, evened out by a uniform)."""
    at = torch.multinomial(bent_weights(beta), count, replacement=True)
    return GRID[at] + 0.0005 * (torch.rand(count, 1) - 0.5)


def frozen(monkeypatch, *noises, uniform=None):
    """Let the kernels draw these tensors, in turn."""
    draws = iter(noises)
    monkeypatch.setattr(torch, "randn_like", lambda like: next(draws).expand_as(like))
    if uniform is not None:
        monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, uniform))


def _scrambled(part, scale):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in part.parameters():
            p.add_(torch.empty_like(p).normal_(generator=generator), alpha=scale)


class RandomNetwork(ScoreNetwork):
    """A score network whose drift is not small, and with which weights keep a variance."""

    def _create(self, dim):
        super()._create(dim)
        _scrambled(self, 0.25)


class RandomMass(MassMatrix):
    """A mass matrix far from the identity, and no triangle."""

    def _create(self, dim):
        super()._create(dim)
        _scrambled(self, 0.3)


def create_parts(kernel, position):
    """What an objective does before the first chain."""
    for part in kernel.modules():
        if isinstance(part, SizedByChain):
            part.create(position)


def learned_moves(step_size, momentum, num_transitions=None):
    """Underdamped Langevin with a mass matrix and a reversal far from their first values."""
    reverse = RandomNetwork(num_transitions, width=3)
    kernel = UnderdampedLangevin(step_size, momentum=momentum, reverse=reverse)
    kernel.integrator = RandomMass()
    return kernel
