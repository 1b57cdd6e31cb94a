"""Reentrant checkpoints train like programs without them."""

import threading

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint, checkpoint_sequential

from pyro_mcvae import (
    MonteCarloEM,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    WakeSleep,
)
from pyro_mcvae.programs.messengers import NonReentrant
from tests.params import in_turn

OBJECTIVES = {
    "sgvb": TraceSGVB_ELBO,
    "iwae": lambda: TraceIWAE_ELBO(3),
    "vimco": lambda: TraceIWAE_ELBO(3, gradient_estimator="vimco"),
    "sis": lambda: TraceSIS_ELBO(2),
    "ais": lambda: TraceAIS_ELBO(2),
    "reweighted": lambda: TraceSIS_ELBO(2, gradient_estimator="reweighted"),
    "em": MonteCarloEM,
    "wake-sleep": WakeSleep,
}
WAYS = {
    "function": lambda net, z: checkpoint(net, z, use_reentrant=True),
    "sequence": lambda net, z: checkpoint_sequential(net, 2, z, use_reentrant=True),
}


def gradients(objective, way):
    """Of a decoder, and of an encoder, under one seed."""
    pyro.set_rng_seed(0)
    decoder = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh())
    encoder = nn.Linear(3, 4)
    x = (torch.rand(5, 3) > 0.5).to(torch.get_default_dtype())

    def model(x):
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=way(decoder, z)).to_event(1), obs=x)

    def guide(x):
        pyro.module("encoder", encoder)
        h = encoder(x)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(h[..., :2], h[..., 2:].exp()).to_event(1))

    OBJECTIVES[objective]().loss_and_grads(model, guide, x)
    return [p.grad for module in (decoder, encoder) for p in module.parameters()]


@in_turn(objective=OBJECTIVES, way=WAYS)
def test_gradients_are_those_without_checkpoints(objective, way):
    expected = gradients(objective, lambda net, z: net(z))
    for a, b in zip(gradients(objective, WAYS[way]), expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "make", [lambda: TraceIWAE_ELBO(3), TraceRaoBlackwell_ELBO], ids=["vimco", "rb"]
)
def test_of_integers_that_have_no_gradient(make):
    """Not even a leaf among the inputs would help."""
    table = nn.Parameter(torch.randn(3))
    logits = nn.Parameter(torch.zeros(3))

    def model(x):
        pyro.param("table", table)
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.Categorical(torch.ones(3) / 3))
            loc = checkpoint(lambda y: table[y], y, use_reentrant=True)
            pyro.sample("x", dist.Normal(loc, 1.0), obs=x)

    def guide(x):
        pyro.param("logits", logits)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=logits))

    make().loss_and_grads(model, guide, torch.randn(20))
    result = pyro.get_param_store()._params["table"].grad
    assert result is not None
    assert (result != 0).all()


def test_nothing_is_left_behind():
    gradients("iwae", WAYS["function"])
    assert "apply" not in vars(CheckpointFunction)
    with pytest.raises(ZeroDivisionError):
        gradients("iwae", lambda net, z: 1 / 0)
    assert "apply" not in vars(CheckpointFunction)


def is_reentrant():
    """Whether the input's gradient flag is that of a reentrant checkpoint: no graph inside."""
    seen = []

    def inner(x):
        seen.append(torch.is_grad_enabled())
        return x.exp()

    checkpoint(inner, torch.ones(2, requires_grad=True), use_reentrant=True).sum().backward()
    return not seen[0]


def test_overlapping_contexts_of_threads_leave_nothing_behind():
    first, second = NonReentrant(), NonReentrant()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not is_reentrant()
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(is_reentrant()))
    thread.start()
    thread.join()
    assert elsewhere == [True]
    second.__exit__(None, None, None)
    assert "apply" not in vars(CheckpointFunction)
    assert is_reentrant()
