"""Discrete sites of guides with networks: M2 and a sigmoid belief net against enumeration."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_mcvae import (
    MALA,
    ULA,
    SummedMean,
    TraceAIS_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSIS_ELBO,
)
from tests.elbos.chain_gradients import assert_slopes, bound, gradients
from tests.elbos.discrete_programs import Discrete, randn
from tests.elbos.exhaustive import exhaustive

ALL = math.inf


def layers(name, *sizes):
    """A perceptron whose parameters are the same each time."""
    parts = [nn.Linear(a, b).double() for a, b in itertools.pairwise(sizes)]
    for i, p in enumerate(q for part in parts for q in part.parameters()):
        p.data.copy_(0.9 * randn(*p.shape, seed=i + sum(map(ord, name))))
    net = nn.Sequential(*[m for part in parts for m in (part, nn.Tanh())][:-1])
    pyro.module(name, net)
    return net


class M2:
    """The semi-supervised autoencoder of Kingma et al. (2014): q(y | x) q(z | x, y)."""

    args = ()

    def __init__(self):
        self.decoder, self.prior = layers("decoder", 4, 4, 2), torch.zeros(3)
        self.classifier, self.encoder = layers("classifier", 2, 4, 3), layers("encoder", 5, 4, 2)

    def model(self, x, y=None):
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.OneHotCategorical(logits=self.prior), obs=y)
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            loc = self.decoder(torch.cat([y, z.unsqueeze(-1)], -1))
            pyro.sample("x", dist.Normal(loc, 0.7).to_event(1), obs=x)

    def guide(self, x, y=None):
        with pyro.plate("data", len(x)):
            if y is None:
                y = pyro.sample("y", dist.OneHotCategorical(logits=self.classifier(x)))
            both = torch.cat([x.expand(*y.shape[:-1], 2), y], -1)
            loc, scale = self.encoder(both).unbind(-1)
            pyro.sample("z", dist.Normal(loc, scale.exp()))

    def parameters(self):
        nets = self.decoder, self.classifier, self.encoder
        return [p for net in nets for p in net.parameters()]


KERNELS = {
    "sis": lambda **k: TraceSIS_ELBO(2, ULA(0.1), **k),
    "ais": lambda **k: TraceAIS_ELBO(2, MALA(0.2), **k),
}


@pytest.mark.parametrize(
    ("chain", "options"),
    [
        ("sis", {"num_categories": ALL}),
        pytest.param("ais", {"baseline": SummedMean()}, marks=pytest.mark.slow),
    ],
    ids=["sis-all", "ais-k1"],
)
def test_labels_of_m2_are_summed_as_those_of_labelled_chains(chain, options):
    """sum_y q(y | x) (W_y - log q(y | x)), W_y a chain with that label; value and gradient."""
    program, x, means = M2(), 1.5 * randn(2, 2, seed=5), []
    parameters = program.parameters()
    batch = {"num_particles": 60, "vectorize_particles": True}

    def slots():
        return KERNELS[chain](**batch, **options).differentiable_loss(
            program.model, program.guide, x
        )

    labelled = KERNELS[chain](**batch)

    def enumerated():
        loss, log_q = torch.zeros(()), program.classifier(x).log_softmax(-1)
        for i in range(2):
            for k, y in enumerate(torch.eye(3)):
                given = labelled.differentiable_loss(
                    program.model, program.guide, x[i : i + 1], y.unsqueeze(0)
                )
                loss = loss + log_q[i, k].exp() * (given + log_q[i, k])
        return loss

    for value in (slots, enumerated):
        runs = []
        for i in range(5):
            with pyro.validation_enabled(i == 0):
                loss = value()
            grads = torch.autograd.grad(loss, parameters)
            runs.append(torch.cat([loss.detach().reshape(1), *(g.flatten() for g in grads)]))
        means.append((torch.stack(runs).mean(0), torch.stack(runs).var(0) / len(runs)))
    (result, variance), (exact, variance_exact) = means
    # Five runs say little of their spread: Student's t has wide tails.
    assert ((result - exact).abs() < 9 * (variance + variance_exact).sqrt() + 1e-9).all()
    assert (result[0] - exact[0]).abs() < 0.05 * exact[0].abs()


def test_the_gradient_of_m2_is_its_slope():
    program, x = M2(), 1.5 * randn(2, 2, seed=5)
    program.args = (x,)
    elbo = KERNELS["sis"](num_categories=ALL)
    groups = [[*net.parameters()] for net in (program.decoder, program.classifier, program.encoder)]
    result = [gradients(elbo, program, group) for group in groups]
    assert_slopes(groups, result, lambda: bound(elbo, program))


def belief_net():
    """Two layers of Bernoullis; the guide draws them from the data upwards."""
    x = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    down, up = layers("down", 1, 2), layers("up", 2, 1)
    decoder, encoder = layers("x", 2, 4, 3), layers("q", 3, 4, 2)

    def bits(name, logits, **options):
        return pyro.sample(name, dist.Bernoulli(logits=logits).to_event(1), **options)

    def model():
        with pyro.plate("data", 2):
            top = bits("top", torch.tensor([0.4]))
            bits("x", decoder(bits("h", down(top))), obs=x)

    def guide():
        with pyro.plate("data", 2):
            bits("top", up(bits("h", encoder(x))))

    return Discrete(model, guide)


@pytest.mark.parametrize(
    "make",
    [
        KERNELS["sis"],
        pytest.param(KERNELS["ais"], marks=pytest.mark.slow),
        TraceRaoBlackwell_ELBO,
    ],
    ids=[*KERNELS, "rao-blackwell"],
)
def test_a_sigmoid_belief_net_is_the_sum_over_all_its_states(make):
    program = belief_net()
    loss, exact = exhaustive(program.model, program.guide)
    elbo = make(num_categories=ALL)
    assert elbo.loss_and_grads(program.model, program.guide) == pytest.approx(loss)
    result = program.take_gradients()
    for key, value in exact.items():
        torch.testing.assert_close(result[key], value)
    elbo, runs = make(num_categories=1), []
    for i in range(40):
        with pyro.validation_enabled(i == 0):
            runs.append([torch.tensor([elbo.loss_and_grads(program.model, program.guide)])])
        runs[-1] += [v.flatten() for v in program.take_gradients().values()]
    steps = torch.stack([torch.cat(r) for r in runs])
    truth = torch.cat([torch.tensor([loss]), *(v.flatten() for v in exact.values())])
    assert ((steps.mean(0) - truth).abs() < 5.5 * steps.std(0) / 40**0.5 + 1e-9).all()
