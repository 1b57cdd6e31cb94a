"""The same model and guide written in two ways: the same losses and gradients, under one seed."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
    log_evidence,
)
from tests.elbos.test_own_distribution import OwnNormal

X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
OBJECTIVES = {
    "sgvb": lambda: TraceSGVB_ELBO(2, analytic_kl=False),
    "reparam": lambda: TraceIWAE_ELBO(10, gradient_estimator="reparam"),
    "rb": lambda: TraceRaoBlackwell_ELBO(num_particles=2),
    "sis": lambda: TraceSIS_ELBO(2, ULA(0.1)),
    "ais": lambda: TraceAIS_ELBO(2, MALA(0.1), num_particles=2),
    "sis reweighted": lambda: TraceSIS_ELBO(2, ULA(0.1), gradient_estimator="reweighted"),
    "dreg": lambda: TraceIWAE_ELBO(3, gradient_estimator="dreg"),
    "dreg looped": lambda: TraceIWAE_ELBO(3, gradient_estimator="dreg", vectorize_particles=False),
    "stl": lambda: TraceIWAE_ELBO(3, gradient_estimator="stl"),
    "renyi": lambda: TraceRenyi_ELBO(0.5, 3, gradient_estimator="dreg"),
    "vimco": lambda: TraceIWAE_ELBO(3, gradient_estimator="vimco"),
    "auto": lambda: TraceIWAE_ELBO(10),  # which measures how much of dreg it takes
}
ALL = tuple(OBJECTIVES)[:-1]
FEW = ("sgvb", "reparam", "rb", "sis", "ais")


# Flows of other libraries, by ``pyro.contrib.zuko``, which keep the density of what they drew.


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


def affine(local, discrete):
    """A flow that is affine is the normal distribution."""

    def pair(fn):
        def model():
            shift = pyro.param("shift", torch.tensor(0.3))
            z = None if local else pyro.sample("z", normal(torch.zeros(2), torch.ones(2)))
            with pyro.plate("data", 3):
                if local:
                    z = pyro.sample("z", normal(torch.zeros(2), torch.ones(2)))
                mean = z.sum(-1) + shift
                if discrete:
                    mean = mean + pyro.sample("k", dist.Bernoulli(0.4))
                pyro.sample("x", dist.Normal(mean, 1.0), obs=X)

        def guide():
            slope = pyro.param("slope", torch.tensor([0.2, -0.4]))
            scale = pyro.param("scale", torch.tensor([0.6, 0.9]))
            z = None if local else pyro.sample("z", fn(slope, scale))
            with pyro.plate("data", 3):
                if local:
                    z = pyro.sample("z", fn(X.unsqueeze(-1) * slope, scale.expand(3, 2)))
                if discrete:
                    pyro.sample("k", dist.Bernoulli(logits=z.sum(-1)))

        return model, guide

    return pair(normal), pair(flow)


def own_distribution():
    def pair(fn):
        def model():
            with pyro.plate("data", 3):
                z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0))
                pyro.sample("x", dist.Normal(z, 1.0), obs=X)

        def guide():
            slope = pyro.param("slope", torch.tensor(0.4))
            with pyro.plate("data", 3):
                pyro.sample("z", fn(slope * X, torch.tensor(0.8)))

        return model, guide

    return pair(dist.Normal), pair(OwnNormal)


def point_mass():
    """The idiom of tutorials before pyro.deterministic; its density is one, or a factor."""

    def pair(is_site):
        def model():
            with pyro.plate("data", 3):
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
                if is_site:
                    y = pyro.sample("y", dist.Delta(2 * z, log_density=-(z**2)))
                else:
                    y = pyro.deterministic("y", 2 * z)
                    pyro.factor("density", -(z**2))
                pyro.sample("x", dist.Normal(y, 0.5), obs=X)

        def guide():
            loc = pyro.param("loc", torch.zeros(3))
            with pyro.plate("data", 3):
                pyro.sample("z", dist.Normal(loc, 0.7))

        return model, guide

    return pair(False), pair(True)


def newton():
    """A guide that takes a Newton step is the one that knows where the step leads."""

    def model():
        loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        with pyro.plate("data", 3):
            pyro.sample("x", dist.Normal(loc, pyro.param("scale", torch.tensor(1.5))), obs=X)

    def guide(by_autograd):
        scale = pyro.param("scale", torch.tensor(1.5))
        mode = X.sum() / scale**2 / (0.01 + 3 / scale**2)
        if by_autograd:
            z = torch.zeros((), requires_grad=True)
            log_p = dist.Normal(0.0, 10.0).log_prob(z) + dist.Normal(z, scale).log_prob(X).sum()
            (slope,) = torch.autograd.grad(log_p, z, create_graph=True)
            (curvature,) = torch.autograd.grad(slope, z, create_graph=True)
            mode = z.detach() - slope / curvature
        pyro.sample("loc", dist.Normal(mode, pyro.param("width", torch.tensor(0.8))))

    return (model, lambda: guide(False)), (model, lambda: guide(True))


# Loops over plates, whose minibatches are the same where they are entered again.
GRID = torch.tensor([[0.3, -1.0, 2.0], [0.5, -0.2, 1.1]])


def once():
    rows, columns = pyro.plate("rows", 2), pyro.plate("columns", 3, 2)
    for i in rows:
        for j in columns:
            z = pyro.sample(f"z_{i}_{j}", dist.Normal(0.0, 1.0))
            pyro.sample(f"x_{i}_{j}", dist.Normal(z, 1.0), obs=GRID[i, j])


def twice():
    rows, columns = pyro.plate("rows", 2), pyro.plate("columns", 3, 2)
    z = {}
    for i in rows:
        for j in columns:
            z[i, j] = pyro.sample(f"z_{i}_{j}", dist.Normal(0.0, 1.0))
    for i in rows:
        for j in columns:
            pyro.sample(f"x_{i}_{j}", dist.Normal(z[i, j], 1.0), obs=GRID[i, j])


def draw(i, j):
    pyro.sample(f"z_{i}_{j}", dist.Normal(GRID[i, j] / 2, 1.6 * math.sqrt(0.5)))


def in_order():
    rows, columns = pyro.plate("rows", 2), pyro.plate("columns", 3, 2)
    for i in rows:
        for j in columns:
            draw(i, j)


def later():
    rows, columns = pyro.plate("rows", 2), pyro.plate("columns", 3, 2)
    for _ in columns:
        pass
    for i in rows:
        for j in columns:
            draw(i, j)


class Case(NamedTuple):
    """
    Two pairs of a model and a guide.

    :ivar objectives: those that take them.
    """

    make: Callable[[], Any]
    objectives: tuple[str, ...]


DRAWN = ("reparam", "rb", "sis", "ais", "sis reweighted", "dreg", "dreg looped", "stl", "renyi")
CASES = {
    "wrapped flow": Case(lambda: affine(True, False), ALL),
    "wrapped flow beside a category": Case(lambda: affine(True, True), DRAWN),
    "wrapped global flow": Case(lambda: affine(False, False), ALL),
    "own distribution": Case(own_distribution, ("sgvb", "reparam", "rb")),
    "point mass of the model": Case(point_mass, FEW),
    "guide that differentiates": Case(newton, FEW),
    "plate that was entered": Case(lambda: ((once, in_order), (once, later)), FEW),
    "plate that is entered again": Case(lambda: ((once, in_order), (twice, in_order)), FEW),
}


def step(objective, model, guide):
    pyro.clear_param_store()
    elbo = OBJECTIVES[objective]()
    elbo.loss_and_grads(model, guide)  # which finds out about the programs
    result = dict(pyro.get_param_store().named_parameters())
    for p in result.values():
        p.grad = None
    pyro.set_rng_seed(0)
    loss = elbo.loss_and_grads(model, guide)
    return loss, {name: p.grad for name, p in result.items()}


@pytest.mark.filterwarnings("ignore:Found vars in model but not guide")  # by Pyro
@pytest.mark.parametrize(
    ("name", "objective"),
    [
        pytest.param(n, o, marks=() if (i + j) % 3 == 0 else pytest.mark.slow)
        for i, n in enumerate(CASES)
        for j, o in enumerate(CASES[n].objectives)
    ],
)
def test_the_same_programs_have_the_same_numbers(name, objective):
    one, other = CASES[name].make()
    expected, slopes = step(objective, *one)
    loss, grads = step(objective, *other)
    assert math.isclose(loss, expected, rel_tol=1e-7)
    torch.testing.assert_close(grads, slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("local", [True, False], ids=["local", "global"])
def test_the_default_gradient_of_a_flow_needs_no_second_density(local):
    pair = affine(local, False)[1]
    torch.testing.assert_close(step("auto", *pair), step("reparam", *pair), rtol=0, atol=0)


def test_the_evidence_under_a_wrapped_flow():
    covariance = torch.eye(3, dtype=torch.float64) * 3
    exact = dist.MultivariateNormal(torch.full((3,), 0.3), covariance).log_prob(X)
    result = log_evidence(*affine(True, False)[1], num_particles=2000)
    assert abs(result.total - exact) < 4 * result.total_standard_error
