"""Transforms of torch.func around a loss."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_mcvae import MALA, ULA, TraceAIS_ELBO, TraceIWAE_ELBO, TraceSGVB_ELBO, TraceSIS_ELBO


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)

    def forward(self, x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            loc = self.net(z.unsqueeze(-1)).squeeze(-1)
            pyro.sample("x", dist.Normal(loc, 0.7), obs=x)


class Guide(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 2)

    def forward(self, x):
        loc, scale = self.net(x.unsqueeze(-1)).unbind(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(loc, scale.exp()))


def func_grad(elbo, x):
    parameters = {k: v.detach().clone() for k, v in elbo.named_parameters()}
    pyro.set_rng_seed(0)
    call = lambda p: torch.func.functional_call(elbo, p, (x,))  # noqa: E731
    return torch.func.grad(call)(parameters)


@pytest.mark.parametrize("calls_before", [0, 1, 7])
@pytest.mark.parametrize("make", [TraceSGVB_ELBO, lambda: TraceIWAE_ELBO(3)])
def test_the_gradient_is_that_of_backward(make, calls_before):
    """Also where programs are analyzed: at calls 1, 2, 4, 8."""
    x = torch.randn(3, dtype=torch.float64)
    elbo = make()(Model(), Guide())
    for _ in range(calls_before):
        elbo(x)
    result = func_grad(elbo, x)
    pyro.set_rng_seed(0)
    elbo(x).backward()
    for name, parameter in elbo.named_parameters():
        assert torch.allclose(result[name], parameter.grad), name


@pytest.mark.parametrize("loss", [TraceSIS_ELBO(2, ULA(0.05)), TraceAIS_ELBO(2, MALA(0.05))])
def test_chains_name_the_remedy(loss):
    with pytest.raises(NotImplementedError, match=r"use loss.backward\(\)"):
        func_grad(loss(Model(), Guide()), torch.randn(3, dtype=torch.float64))
