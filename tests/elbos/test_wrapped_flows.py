"""Flows of other libraries, by ``pyro.contrib.zuko``, which keep the density of what they drew."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.zuko import ZukoToPyro
from torch.distributions import AffineTransform

from pyro_mcvae import (
    MALA,
    ULA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceRenyi_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    WakeSleep,
    log_evidence,
)
from tests.cases import every

X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


class NormalizingFlow(torch.distributions.Distribution):
    """As Zuko's: its transform goes from the value to the base."""

    has_rsample = True

    def __init__(self, transform, base):
        self.transform, self.base = transform, base
        super().__init__(base.batch_shape, base.event_shape, validate_args=False)

    def expand(self, batch_shape, new=None):
        return NormalizingFlow(self.transform, self.base.expand(batch_shape))

    def log_prob(self, value):
        noise = self.transform(value)
        log_det = self.transform.log_abs_det_jacobian(value, noise)
        return self.base.log_prob(noise) + log_det.expand(value.shape).sum(-1)

    def rsample(self, sample_shape=()):
        return self.transform.inv(self.base.rsample(sample_shape))

    def rsample_and_log_prob(self, sample_shape=()):
        noise = self.base.rsample(sample_shape)
        value = self.transform.inv(noise)
        log_det = self.transform.log_abs_det_jacobian(value, noise)
        return value, self.base.log_prob(noise) + log_det.expand(value.shape).sum(-1)


class DiagNormal(dist.Independent):
    """As Zuko's: one of torch's by inheritance."""

    def __init__(self, loc, scale):
        super().__init__(dist.Normal(loc, scale), 1)

    def expand(self, batch_shape, _instance=None):
        return dist.Independent(self.base_dist.expand(torch.Size([*batch_shape, 2])), 1)


def flow(loc, scale):
    base = DiagNormal(torch.zeros_like(loc), torch.ones_like(loc))
    return ZukoToPyro(NormalizingFlow(AffineTransform(-loc / scale, 1 / scale), base))


def normal(loc, scale):
    return dist.Normal(loc, scale).to_event(1)


def programs(fn, local, discrete=False):
    def model(x):
        shift = pyro.param("shift", torch.tensor(0.3))
        z = None if local else pyro.sample("z", normal(torch.zeros(2), torch.ones(2)))
        with pyro.plate("data", 3):
            if local:
                z = pyro.sample("z", normal(torch.zeros(2), torch.ones(2)))
            mean = z.sum(-1) + shift
            if discrete:
                mean = mean + pyro.sample("k", dist.Bernoulli(0.4))
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    def guide(x):
        slope = pyro.param("slope", torch.tensor([0.2, -0.4]))
        scale = pyro.param("scale", torch.tensor([0.6, 0.9]))
        z = None if local else pyro.sample("z", fn(slope, scale))
        with pyro.plate("data", 3):
            if local:
                z = pyro.sample("z", fn(x.unsqueeze(-1) * slope, scale.expand(3, 2)))
            if discrete:
                pyro.sample("k", dist.Bernoulli(logits=z.sum(-1)))

    return model, guide


OBJECTIVES = {
    "sgvb": lambda: TraceSGVB_ELBO(2, analytic_kl=False),
    "sgvb one": lambda: TraceSGVB_ELBO(analytic_kl=False),
    "reparam": lambda: TraceIWAE_ELBO(10, gradient_estimator="reparam"),
    "stl": lambda: TraceIWAE_ELBO(3, gradient_estimator="stl"),
    "dreg": lambda: TraceIWAE_ELBO(3, gradient_estimator="dreg"),
    "dreg looped": lambda: TraceIWAE_ELBO(3, gradient_estimator="dreg", vectorize_particles=False),
    "auto": lambda: TraceIWAE_ELBO(10),
    "vimco": lambda: TraceIWAE_ELBO(3, gradient_estimator="vimco"),
    "renyi": lambda: TraceRenyi_ELBO(0.5, 3, gradient_estimator="dreg"),
    "rb": lambda: TraceRaoBlackwell_ELBO(num_particles=2),
    "sis": lambda: TraceSIS_ELBO(2, ULA(0.1)),
    "sis reweighted": lambda: TraceSIS_ELBO(2, ULA(0.1), gradient_estimator="reweighted"),
    "ais": lambda: TraceAIS_ELBO(2, MALA(0.1), num_particles=2),
    "wake-sleep": lambda: WakeSleep(3),
}


NO_SLOTS = ("sgvb", "sgvb one", "wake-sleep", "vimco")


def step(objective, *pair):
    pyro.clear_param_store()
    elbo = OBJECTIVES[objective]()
    elbo.loss(*pair, X)
    pyro.set_rng_seed(0)
    loss = elbo.loss_and_grads(*pair, X)
    result = dict(pyro.get_param_store().named_parameters())
    return loss, {name: p.grad for name, p in result.items()}


@pytest.mark.parametrize(
    ("objective", "local", "discrete"),
    every(
        2,
        # Without slots no objective has a discrete site; without data there is nothing to dream of.
        [
            (o, bool(i % 3) or o == "wake-sleep", bool(i // 2 % 2) and o not in NO_SLOTS)
            for i, o in enumerate(OBJECTIVES)
            if o != "auto"  # measures how much of dreg it takes
        ],
    ),
)
def test_a_flow_that_is_affine_is_the_normal_distribution(objective, local, discrete):
    expected, slopes = step(objective, *programs(normal, local, discrete))
    loss, grads = step(objective, *programs(flow, local, discrete))
    assert math.isclose(loss, expected, rel_tol=1e-9)
    assert grads.keys() == slopes.keys()
    for name, grad in grads.items():
        assert torch.allclose(grad, slopes[name], rtol=1e-7, atol=1e-9), name


@pytest.mark.parametrize("local", [True, False], ids=["local", "global"])
def test_the_default_gradient_of_a_flow_needs_no_second_density(local):
    loss, grads = step("auto", *programs(flow, local))
    expected, slopes = step("reparam", *programs(flow, local))
    assert loss == expected
    for name, grad in grads.items():
        assert torch.equal(grad, slopes[name]), name


def test_the_evidence_under_such_a_guide():
    covariance = torch.eye(3, dtype=torch.float64) * 3
    exact = dist.MultivariateNormal(torch.full((3,), 0.3), covariance).log_prob(X)
    result = log_evidence(*programs(flow, True), X, num_particles=2000)
    assert abs(result.total - exact) < 4 * result.total_standard_error
