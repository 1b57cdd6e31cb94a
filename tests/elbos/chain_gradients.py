"""Exact gradients of chains: finite differences at frozen noise, over all accept bits if any."""

import itertools

import pyro
import torch

from pyro_mcvae import LearnedSchedule
from pyro_mcvae.chains.parameters import LearnedStepSize

STEP = 1e-5


def learning(elbo_class, num_steps, kernel, **options):
    """An objective whose schedule and step size have gradients too."""
    kernel.step_size = LearnedStepSize(kernel.step_size())
    schedule = LearnedSchedule(num_steps)
    schedule.logits.data += 0.3 * torch.linspace(-1, 1, num_steps)
    return elbo_class(kernel=kernel, schedule=schedule, **options)


def bound(elbo, example, seed=0):
    """Minus the loss, at frozen noise."""
    pyro.set_rng_seed(seed)
    return -elbo.loss(example.model, example.guide, *example.args)


def gradients(elbo, example, parameters, seed=0):
    """The bound's gradients as the objective leaves them."""
    for p in parameters:
        p.grad = None
    pyro.set_rng_seed(seed)
    elbo.loss_and_grads(example.model, example.guide, *example.args)
    return [torch.zeros_like(p) if p.grad is None else -p.grad for p in parameters]


def parameters_of(elbo, example):
    """Learnable tensors: the programs', made by one run, and the objective's own."""
    bound(elbo, example)
    own = list(elbo.parameters())
    ids = {id(p) for p in own}
    return [p for p in example.parameters() if id(p) not in ids], own


def assert_slopes(groups, grads, value):
    """
    Gradients agree with central differences along a random direction in each group.

    :param groups: lists of parameters.
    :param grads: lists of gradients.
    :param value: a function of nothing.
    """
    generator = torch.Generator().manual_seed(3)
    for parameters, result in zip(groups, grads, strict=True):
        directions = [
            torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters
        ]
        ends = []
        for step in (STEP, -2 * STEP):
            for p, d in zip(parameters, directions, strict=True):
                p.data.add_(d.to(p), alpha=step)
            ends.append(value())
        for p, d in zip(parameters, directions, strict=True):
            p.data.add_(d.to(p), alpha=STEP)
        expected = (ends[0] - ends[1]) / (2 * STEP)
        slope = sum(float((g * d).sum()) for g, d in zip(result, directions, strict=True))
        assert abs(expected) > 1e-4
        assert abs(slope - expected) < 1e-5 * max(1.0, abs(expected)), (slope, expected)


class AcceptPaths:
    """
    Every pattern of accept bits, the same for all data: each datum's bits depend on nothing of
    the others, so that sums over data need no joint patterns.
    """

    def __init__(self, elbo, example, transitions, monkeypatch):
        self.elbo, self.example = elbo, example
        self.particles = elbo.num_particles
        self.paths = list(itertools.product([0.0, 1.0], repeat=self.particles * transitions))
        self.monkeypatch = monkeypatch
        self.log_prob = []
        step = elbo.kernel.step

        def recorded(state, target):
            new, info = step(state, target)
            self.log_prob.append(info.log_prob.detach())
            return new, info

        monkeypatch.setattr(elbo.kernel, "step", recorded, raising=False)

    def _force(self, path):
        bits = torch.tensor(path).reshape(-1, self.particles)
        number = iter(bits)
        self.log_prob.clear()
        self.possible = []

        def rand_like(acceptance):
            row = next(number)
            forced = row.reshape(-1, *[1] * (acceptance.dim() - 1)).expand(acceptance.shape)
            # A move that is certain (of a masked datum, say) cannot be rejected.
            certain = acceptance == 1
            self.possible.append(~(certain & (forced == 1)).any(0))
            return torch.where(certain, 0.0, forced.to(acceptance))

        self.monkeypatch.setattr(torch, "rand_like", rand_like)

    def _probability(self):
        """Of the present pattern, per datum."""
        result = sum(p.sum(0) for p in self.log_prob).exp()
        return torch.where(torch.stack(self.possible).all(0), result, 0.0)

    def mean_bound(self):
        """The expectation over the bits, at frozen noise."""
        total = 0.0
        for path in self.paths:
            self._force(path)
            pyro.set_rng_seed(0)
            result = self.elbo.bounds(self.example.model, self.example.guide, *self.example.args)
            probability = self._probability()
            local = torch.where(probability > 0, probability * result.per_datum, 0.0)
            total += (result.scale * local).sum() + result.shared / len(self.paths)
        return float(total)

    def mean_gradients(self, parameters):
        """The expectation of the gradient estimate over the bits."""

        def weighed(name, weigh):
            method = getattr(type(self.elbo), name)

            def run(*args):
                result = method(self.elbo, *args)
                return torch.where(self._probability() > 0, result, 0.0) * weigh()

            self.monkeypatch.setattr(self.elbo, name, run, raising=False)

        def run(path, weigh):
            self._force(path)
            weighed("_surrogate", weigh)
            weighed("_cost", weigh)
            return gradients(self.elbo, self.example, parameters)

        # What belongs to no datum does not depend on the bits.
        shared = run(self.paths[0], lambda: 0.0)
        total = list(shared)
        for path in self.paths:
            result = run(path, self._probability)
            total = [t + f - s for t, f, s in zip(total, result, shared, strict=True)]
        return total
