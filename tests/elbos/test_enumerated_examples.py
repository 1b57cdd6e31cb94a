"""Programs of Pyro's examples that TraceEnum_ELBO enumerates: the same value, the same gradient."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate
from torch.distributions import constraints

from pyro_mcvae import TraceRaoBlackwell_ELBO

OBJECTS, FRAMES, DETECTIONS = 2, 3, 2


def tracking():
    """tracking_1d: objects that may not exist, and detections that may be spurious."""
    observed = torch.linspace(-1.0, 1.5, FRAMES * DETECTIONS).reshape(FRAMES, DETECTIONS)
    dynamics = torch.stack([torch.ones(FRAMES), torch.linspace(0.0, 1.0, FRAMES)], -1)

    def model():
        with pyro.plate("objects", OBJECTS):
            exists = pyro.sample("exists", dist.Bernoulli(0.6))
            with poutine.mask(mask=exists.bool()):
                states = pyro.sample("states", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
                positions = dynamics.mm(states.t())
        with pyro.plate("detections", DETECTIONS), pyro.plate("time", FRAMES):
            assign = pyro.sample("assign", dist.Categorical(torch.ones(OBJECTS + 1)))
            spurious = assign == OBJECTS
            pyro.sample("is_spurious", dist.Bernoulli(0.3), obs=spurious.to(observed))
            with poutine.mask(mask=~spurious):
                positions = torch.cat([positions, torch.zeros(FRAMES, 1)], -1)
                loc = positions[torch.arange(FRAMES)[:, None], assign]
                pyro.sample("real", dist.Normal(loc, 0.5), obs=observed)
            with poutine.mask(mask=spurious):
                pyro.sample("spurious", dist.Normal(0.0, 2.0), obs=observed)

    def guide():
        loc = pyro.param("loc", torch.full((OBJECTS, 2), 0.3))
        scale = pyro.param("scale", torch.full((OBJECTS, 2), 0.2), constraint=constraints.positive)
        exists = pyro.param("exists_logits", torch.tensor([0.3, -0.2]))
        assign = pyro.param("assign_logits", torch.linspace(-0.5, 0.5, 18).reshape(3, 2, 3))
        with pyro.plate("objects", OBJECTS):
            drawn = pyro.sample("exists", dist.Bernoulli(logits=exists))
            with poutine.mask(mask=drawn.bool()):
                pyro.sample("states", dist.Normal(loc, scale).to_event(1))
        with pyro.plate("detections", DETECTIONS), pyro.plate("time", FRAMES):
            pyro.sample("assign", dist.Categorical(logits=assign))

    return model, config_enumerate(guide), 2


def semi_supervised():
    """scanvi: labels that are concatenated, and so must be expanded."""
    x, decoder = torch.linspace(-1.0, 1.0, 10).reshape(5, 2), torch.linspace(-1, 1, 10).view(5, 2)

    def model():
        with pyro.plate("batch", 5):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            y = pyro.sample("y", dist.OneHotCategorical(logits=torch.zeros(3)))
            loc = torch.cat([z.expand(y.shape[:-1] + (2,)), y], -1) @ decoder
            pyro.sample("x", dist.Normal(loc, 1.0).to_event(1), obs=x)

    def guide():
        logits = pyro.param("logits", torch.linspace(-0.5, 0.5, 15).reshape(5, 3))
        with pyro.plate("batch", 5):
            y = pyro.sample("y", dist.OneHotCategorical(logits=logits))
            pyro.sample("z", dist.Normal(x + y[..., :2], 1.0).to_event(1))

    return model, config_enumerate(guide, "parallel", expand=True), 1


@pytest.mark.parametrize("example", [tracking, semi_supervised])
def test_the_sum_is_that_of_trace_enum(example):
    model, guide, nesting = example()
    losses, grads = [], []
    for elbo in (TraceEnum_ELBO(max_plate_nesting=nesting), TraceRaoBlackwell_ELBO()):
        pyro.set_rng_seed(0)
        losses.append(elbo.loss_and_grads(model, guide))
        params = dict(pyro.get_param_store().named_parameters())
        grads.append({n: p.grad for n, p in params.items()})
        for p in params.values():
            p.grad = None
    assert math.isclose(*losses, rel_tol=1e-9)
    for name, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][name], rtol=1e-9)
        assert grad.abs().max() > 0.01
