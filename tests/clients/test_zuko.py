"""Zuko's flows as guides."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.zuko import ZukoToPyro

from pyro_mcvae import HMC, TraceIWAE_ELBO, log_evidence
from tests.clients.losses import LOSSES

pytestmark = pytest.mark.clients
X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
FLOWS = {
    "MAF": {"transforms": 2, "hidden_features": (8,)},
    "NSF": {"transforms": 1, "hidden_features": (8,)},
    "NICE": {"transforms": 2, "hidden_features": (8,)},
}


@pytest.fixture(params=FLOWS)
def flow(request, client):
    # Its import switches the validation of all distributions off.
    before = torch.distributions.Distribution._validate_args
    zuko = client("zuko")
    torch.distributions.Distribution.set_default_validate_args(before)
    torch.manual_seed(0)
    return getattr(zuko.flows, request.param)(2, context=1, **FLOWS[request.param])


class Forgetful(ZukoToPyro):
    """Keeps no density of what it draws."""

    def __call__(self, shape=()):
        return self.dist.rsample(shape)

    def expand(self, *args, **kwargs):
        return Forgetful(self.dist.expand(*args, **kwargs))


def programs(flow, wrap=ZukoToPyro):
    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x)

    def guide(x):
        pyro.module("flow", flow)
        with pyro.plate("data", len(x)):
            pyro.sample("z", wrap(flow(x.unsqueeze(-1))))

    return model, guide


def gradient(elbo, flow, wrap):
    pair = programs(flow, wrap)
    elbo.loss(*pair, X)
    flow.zero_grad()
    pyro.set_rng_seed(1)
    elbo.loss_and_grads(*pair, X)
    return torch.cat([p.grad.flatten() for p in flow.parameters() if p.grad is not None])


@pytest.mark.parametrize("loss", ["sgvb", "rb", "reparam", "stl", "dreg", "auto", "vimco"])
def test_gradients_are_those_without_the_kept_density(flow, loss):
    def make():
        return LOSSES[loss]() if loss in LOSSES else TraceIWAE_ELBO(3, gradient_estimator=loss)

    expected = gradient(make(), flow, Forgetful)
    assert bool((expected != 0).any())
    torch.testing.assert_close(gradient(make(), flow, ZukoToPyro), expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_train_them(flow, loss):
    svi = pyro.infer.SVI(*programs(flow), pyro.optim.Adam({"lr": 3e-2}), LOSSES[loss]())

    def mean_loss():
        pyro.set_rng_seed(0)
        return sum(svi.evaluate_loss(X) for _ in range(60)) / 60

    before = mean_loss()
    for _ in range(100):
        svi.step(X)
    assert mean_loss() < before


def test_chains_under_them_have_the_evidence(flow):
    exact = dist.Normal(0.0, 3**0.5).log_prob(X)
    options = {"schedule": 5, "kernel": HMC(0.2)}
    result = log_evidence(*programs(flow), X, num_particles=300, **options)
    assert bool(((result.log_evidence - exact).abs() < 4.5 * result.standard_error).all())
