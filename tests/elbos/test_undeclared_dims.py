"""Batch dims that lie in no plate, with Pyro's validation off: summed, as those of an event."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    MALA,
    ULA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    log_evidence,
)

X = torch.tensor([[0.3, -1.0, 2.0], [1.1, 0.4, -0.7]], dtype=torch.float64)
EXACT = dist.Normal(0.0, torch.tensor(2.0).double().sqrt()).log_prob(X)
MAKES = {
    "sgvb": lambda: TraceSGVB_ELBO(2),
    "sampled": lambda: TraceSGVB_ELBO(2, analytic_kl=False),
    "iwae": lambda: TraceIWAE_ELBO(3),
    "sis": lambda: TraceSIS_ELBO(2),
    "latent": lambda: TraceSIS_ELBO(2, ULA(0.1), coordinates="latent"),
    "ais": lambda: TraceAIS_ELBO(2, MALA(0.1), num_particles=2),
    "rao-blackwell": TraceRaoBlackwell_ELBO,
}


def event(fn, dims, declared):
    return fn.to_event(dims) if declared else fn


def normal(is_model, exact=True):
    """The prior, or the posterior of x ~ N(z, 1)."""
    scale = 0.5**0.5 if exact else 0.8
    return dist.Normal(torch.zeros(2, 3), 1.0) if is_model else dist.Normal(X / 2, scale)


def no_plate(is_model, declared, exact=True):
    z = pyro.sample("z", event(normal(is_model, exact), 2, declared))
    if is_model:
        pyro.sample("x", event(dist.Normal(z, 1.0), 2, declared), obs=X)


def right_of_a_plate(is_model, declared, exact=True):
    with pyro.plate("data", 2, dim=-1 if declared else -2):
        z = pyro.sample("z", event(normal(is_model, exact), 1, declared))
        if is_model:
            pyro.sample("x", event(dist.Normal(z, 1.0), 1, declared), obs=X)


def left_of_a_plate(is_model, declared, exact=True):
    with pyro.plate("data", 3, dim=-1):
        fn = normal(is_model, exact)
        z = pyro.sample("z", fn if not declared else dist.Normal(fn.loc.T, fn.scale.T).to_event(1))
        if is_model:
            fn = dist.Normal(z, 1.0)
            pyro.sample("x", event(fn, 1, declared), obs=X.T if declared else X)


def in_a_plates_dim(is_model, declared, exact=True):
    """A latent of all data that has as many elements as these."""
    z = pyro.sample("z", event(normal(is_model, exact), 2, declared))
    if is_model:
        with pyro.plate("rows", 2, dim=-2), pyro.plate("columns", 3, dim=-1):
            pyro.sample("x", dist.Normal(z, 1.0), obs=X)


PROGRAMS = [no_plate, right_of_a_plate, left_of_a_plate, in_a_plates_dim]


def pair(program, declared, exact=True):
    return (lambda: program(True, declared, exact)), (lambda: program(False, declared, exact))


@pytest.fixture(autouse=True)
def _unvalidated():
    with pyro.validation_enabled(False):
        yield


@pytest.mark.parametrize("name", ["sampled", "iwae", "rao-blackwell"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_weights_are_exact_at_the_posterior(program, name):
    result = -MAKES[name]().loss(*pair(program, False))
    assert result == pytest.approx(EXACT.sum().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (program, name)
        for i, program in enumerate([no_plate, right_of_a_plate, in_a_plates_dim])
        for j, name in enumerate(["sgvb", "sampled", "sis", "latent", "rao-blackwell"])
        if (i + j) % 2 == 0
    ],
)
def test_a_seed_has_the_number_of_the_declared_program(program, name):
    result = []
    for declared in (True, False):
        elbo = MAKES[name]()
        elbo.num_particles = 1
        pyro.set_rng_seed(0)
        result.append(elbo.loss(*pair(program, declared, exact=False)))
    assert result[1] == pytest.approx(result[0], rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"schedule": 2, "kernel": MALA(0.1)}])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_evidence_of_the_exact_posterior(program, options):
    result = log_evidence(*pair(program, False), num_particles=3, seed=0, **options)
    if "schedule" not in options:
        assert torch.allclose(result.total, EXACT.sum())
    assert abs(result.total - EXACT.sum()) < 5 * result.total_standard_error + 1e-3


def test_the_slots_of_elements_in_no_plate_are_their_combinations():
    def program(is_model):
        y = pyro.sample("y", dist.Bernoulli(torch.full((3,), 0.3 if is_model else 0.4)))
        if is_model:
            pyro.sample("x", dist.Normal(y.sum(-1), 1.0), obs=torch.tensor(1.0))

    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    log_q = dist.Bernoulli(0.4 * torch.ones(3)).log_prob(states).sum(-1)
    log_p = dist.Bernoulli(0.3 * torch.ones(3)).log_prob(states).sum(-1)
    log_p = log_p + dist.Normal(states.sum(-1), 1.0).log_prob(torch.tensor(1.0))
    exact = -(log_q.exp() * (log_p - log_q)).sum()
    result = TraceRaoBlackwell_ELBO(math.inf).loss(lambda: program(True), lambda: program(False))
    assert result == pytest.approx(float(exact))


@pytest.mark.parametrize("moves", [False, True])
def test_observations_in_no_plate_beside_an_enumerated_site(moves):
    """log sum_y p(y) prod_i p(x_i | y); a program that moves the values of y is refused."""

    def model():
        y = pyro.sample("y", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        loc = y.unsqueeze(-1).expand([*y.shape, 3]) if moves else y + torch.zeros(3)
        pyro.sample("x", dist.Normal(loc, 1.0), obs=X[0])

    each = [
        dist.Bernoulli(0.3).log_prob(y) + dist.Normal(y, 1.0).log_prob(X[0]).sum()
        for y in torch.tensor([0.0, 1.0])
    ]
    if moves:
        with pytest.raises((ValueError, RuntimeError), match="site 'x' of the model"):
            TraceSGVB_ELBO().loss(model, lambda: None)
    else:
        exact = torch.stack(each).logsumexp(0).item()
        assert -TraceSGVB_ELBO().loss(model, lambda: None) == pytest.approx(exact)
