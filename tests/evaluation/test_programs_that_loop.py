"""Evaluators on programs that do not broadcast over draws as they are written."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn

from pyro_mcvae import log_evidence

X = torch.linspace(-1.0, 1.0, 16, dtype=torch.double).reshape(8, 2)
Y = torch.tensor([0.3, -0.1, 0.4, 0.2, 0.9, 0.5, 1.2, 0.8], dtype=torch.double)
NOISE = 0.5


class Regression(PyroModule):
    """A linear layer whose weights are drawn, as Pyro's tutorials write it."""

    def __init__(self):
        super().__init__()
        self.linear = PyroModule[nn.Linear](2, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def forward(self, x, y):
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, NOISE), obs=y)


def guide(x, y):
    pyro.sample("linear.weight", dist.Normal(torch.tensor([[0.2, 0.2]]), 0.6).to_event(2))
    pyro.sample("linear.bias", dist.Normal(torch.tensor([0.5]), 0.25).to_event(1))


def exact():
    design = torch.cat([X, torch.ones(8, 1)], 1)
    covariance = design @ design.T + NOISE**2 * torch.eye(8)
    return dist.MultivariateNormal(torch.zeros(8), covariance).log_prob(Y)


def test_a_layer_whose_weights_are_drawn_has_its_exact_evidence():
    result = log_evidence(Regression(), guide, X, Y, num_particles=4000)
    assert result.standard_error < 0.05
    assert abs(result.log_evidence - exact()) < 4 * result.standard_error


@pytest.mark.slow
def test_a_recurrent_decoder_is_judged():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.out = nn.GRU(1, 3, batch_first=True), nn.Linear(3, 1)

        def forward(self, z):
            inputs = z.reshape(-1, 1, 1).expand(-1, 4, 1).contiguous()
            return self.out(self.gru(inputs)[0]).squeeze(-1)

    decoder, data = Decoder(), torch.randn(3, 4)

    def model(x):
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0))
            pyro.sample("x", dist.Normal(decoder(z), 1.0).to_event(1), obs=x)

    def prior(x):
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(torch.zeros(3), 1.0))

    grid = torch.linspace(-6.0, 6.0, 401)
    with torch.no_grad():
        density = dist.Normal(decoder(grid), 1.0).log_prob(data.unsqueeze(1)).sum(-1)
        log_p = density + dist.Normal(0.0, 1.0).log_prob(grid)
        evidence = log_p.logsumexp(1) + (grid[1] - grid[0]).log()
    result = log_evidence(model, prior, data, num_particles=300)
    assert ((result.log_evidence - evidence).abs() < 4 * result.standard_error + 1e-6).all()
    assert (result.standard_error < 0.1).all()


@pytest.mark.parametrize("asked", [4, 30])
def test_a_warm_up_costs_no_more_than_what_was_asked_for(asked):
    """Of 2,849 runs of a model that reads a value, 50 were for the particles."""
    runs = []

    def model():
        runs.append(1)
        with pyro.plate("data", 5):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            scale = 1.0 if float(z.detach().abs().max()) < 50 else 2.0
            pyro.sample("x", dist.Normal(z, scale), obs=torch.linspace(-1.0, 1.0, 5))

    def guide():
        with pyro.plate("data", 5):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    def count(**options):
        runs.clear()
        log_evidence(model, guide, num_particles=asked, schedule=3, progress=False, **options)
        return len(runs)

    alone = count(warmup=0)
    assert count() < 2.7 * alone + 10  # a warm-up's chains make one transition more
