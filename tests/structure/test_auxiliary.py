"""Auxiliary draws of a guide: part of a latent's density, or averaged over."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal, AutoNormal

from pyro_mcvae import (
    MALA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    log_evidence,
)
from tests.estimates import assert_mean
from tests.params import in_turn

AUXILIARY = {"is_auxiliary": True}
X = (1.0, -0.5, 2.0, 0.3)


def model():
    with pyro.plate("data", 4):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(X))


def mixture():
    with pyro.plate("data", 4):
        k = pyro.sample("k", dist.Categorical(torch.ones(3)), infer=AUXILIARY)
        pyro.sample("z", dist.Normal(torch.tensor(X) / 2 + 0.3 * (k - 1), 0.8))


def continuous_mixture():
    with pyro.plate("data", 4):
        u = pyro.sample("u", dist.Normal(0.0, 0.3), infer=AUXILIARY)
        pyro.sample("z", dist.Normal(torch.tensor(X) / 2 + u, 0.8))


def global_mixture():
    k = pyro.sample("k", dist.Categorical(torch.ones(3)), infer=AUXILIARY)
    with pyro.plate("data", 4):
        pyro.sample("z", dist.Normal(torch.tensor(X) / 2 + 0.3 * (k - 1), 0.8))


def unused():
    pyro.sample("u", dist.Normal(0.0, 1.0), infer=AUXILIARY)
    mean_field()


def mean_field():
    with pyro.plate("data", 4):
        pyro.sample("z", dist.Normal(torch.tensor(X) / 2, 0.8))


def mixture_of_flows():
    """Each a density of z: the label chooses one, and is no part of it."""
    with pyro.plate("data", 4):
        u = pyro.sample("u", dist.Normal(0.0, 1.0), infer=AUXILIARY)
        k = pyro.sample("k", dist.Categorical(torch.ones(3)), infer=AUXILIARY)
        z = torch.tensor(X) / 2 + 0.3 * (k - 1) + 0.8 * u
        pyro.sample("z", dist.Delta(z, log_density=torch.tensor(-math.log(0.8))))


class Shift(torch.autograd.Function):
    """An operator that only autograd can look through."""

    @staticmethod
    def forward(ctx, u):
        return u.as_subclass(torch.Tensor).detach() + 0.1

    @staticmethod
    def backward(ctx, grad):
        return grad


def one_flow():
    with pyro.plate("data", 4):
        u = pyro.sample("u", dist.Normal(0.0, 0.8), infer=AUXILIARY)
        pyro.sample("z", dist.Delta(Shift.apply(u) + torch.tensor(X) / 2))


GUIDES = [
    mixture,
    continuous_mixture,
    global_mixture,
    unused,
    mixture_of_flows,
    one_flow,
]


@pytest.mark.parametrize("guide", GUIDES)
def test_the_evidence_is_that_of_the_model(guide):
    exact = dist.Normal(0.0, 2**0.5).log_prob(torch.tensor(X)).sum()
    result = log_evidence(model, guide, num_particles=5000, seed=1)
    assert result.total_standard_error < 0.06
    assert abs(result.total - exact) < 4.5 * result.total_standard_error


@in_turn(guide=[continuous_mixture, unused, one_flow], coordinates=["noise", "latent"])
def test_the_evidence_of_chains_is_that_of_the_model(guide, coordinates):
    exact = dist.Normal(0.0, 2**0.5).log_prob(torch.tensor(X)).sum()
    result = log_evidence(
        model,
        guide,
        num_particles=2000,
        seed=1,
        schedule=3,
        kernel=MALA(0.1),
        coordinates=coordinates,
    )
    assert result.total_standard_error < 0.05
    assert abs(result.total - exact) < 4.5 * result.total_standard_error


class Bits:
    """One bit, and a guide that mixes two of its distributions: everything can be enumerated."""

    def __init__(self, size):
        self.size = size
        self.start = {"label": torch.tensor(0.7), "bit": torch.tensor([-0.4, 1.1])}

    def model(self):
        with pyro.plate("data", self.size):
            b = pyro.sample("b", dist.Bernoulli(0.3))
            pyro.sample("x", dist.Normal(b, 0.5), obs=torch.tensor(0.8))

    def guide(self):
        label, bit = (pyro.param(name, value) for name, value in self.start.items())
        with pyro.plate("data", self.size):
            k = pyro.sample("k", dist.Bernoulli(logits=label), infer=AUXILIARY)
            pyro.sample("b", dist.Bernoulli(logits=torch.where(k > 0, bit[1], bit[0])))

    def exact(self, num_particles):
        """The bound of a datum and its gradient."""
        params = {n: v.clone().requires_grad_() for n, v in self.start.items()}
        values = torch.tensor([0.0, 1.0])
        k, b = (v.flatten() for v in torch.meshgrid(values, values, indexing="ij"))
        log_k = dist.Bernoulli(logits=params["label"]).log_prob(k)
        log_b = dist.Bernoulli(logits=params["bit"][k.long()]).log_prob(b)
        log_p = dist.Bernoulli(torch.tensor(0.3)).log_prob(b)
        bound = log_p + dist.Normal(b, 0.5).log_prob(torch.tensor(0.8)) - log_b
        q = (log_k + log_b).exp()
        if num_particles == 2:
            bound = torch.logaddexp(bound[:, None], bound) - math.log(2.0)
            q = q[:, None] * q
        value = (q * bound).sum()
        grads = torch.autograd.grad(value, list(params.values()))
        return value.detach(), dict(zip(params, grads, strict=True))


ENUMERATED = {
    "rb": (1, lambda: TraceRaoBlackwell_ELBO(2, num_samples=0)),
    "rb entropy": (1, lambda: TraceRaoBlackwell_ELBO(2, num_samples=0, entropy="exact")),
    "sgvb": (1, lambda: TraceSGVB_ELBO()),
    "iwae 1": (1, lambda: TraceIWAE_ELBO(1)),
    "iwae 2": (2, lambda: TraceIWAE_ELBO(2, vectorize_particles=True)),
}


@pytest.mark.parametrize("name", ENUMERATED)
def test_bounds_and_gradients_average_over_labels(name):
    particles, make = ENUMERATED[name]
    exact_sum = name.startswith("rb")
    programs, elbo = Bits(1 if exact_sum else 500), make()
    values, grads = [], []
    for _ in range(1 if exact_sum else 30):
        values.append(-elbo.loss_and_grads(programs.model, programs.guide) / programs.size)
        params = dict(pyro.get_param_store().named_parameters())
        grads.append({n: -params[n].grad / programs.size for n in programs.start})
        for p in params.values():
            p.grad = None
    value, exact = programs.exact(particles)
    if exact_sum:
        assert math.isclose(values[0], value, rel_tol=1e-9)
        assert all(torch.allclose(grads[0][n], exact[n], rtol=1e-9) for n in exact)
        return
    assert_mean(torch.tensor(values), value)
    for name, grad in exact.items():
        assert_mean(torch.stack([g[name] for g in grads]), grad)


def listed(model):
    """An AutoGuide with a custom part, whose draw is not one of the latents."""
    guide = AutoGuideList(model)
    guide.append(AutoNormal(pyro.poutine.block(model, expose=["z"])))
    return guide


@pytest.mark.parametrize("make", [AutoNormal, AutoMultivariateNormal, listed])
def test_autoguides_count_as_in_pyro(make):
    guide = make(model)
    guide()
    losses = []
    for elbo in (Trace_ELBO(), TraceSGVB_ELBO(), TraceIWAE_ELBO(1)):
        pyro.set_rng_seed(0)
        losses.append(elbo.loss(model, guide))
    assert max(losses) - min(losses) < 1e-9


def test_chains_of_autoguides_keep_their_evidence():
    """At the posterior no weight varies, for any moves."""
    guide = AutoNormal(model, init_loc_fn=lambda site: torch.tensor(X) / 2, init_scale=0.5**0.5)
    exact = dist.Normal(0.0, 2**0.5).log_prob(torch.tensor(X))
    result = TraceAIS_ELBO(3, MALA(0.1)).bounds(model, guide)
    assert torch.allclose(result.per_datum, exact, atol=1e-9)
