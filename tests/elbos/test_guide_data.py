"""What a guide observes (as pyro.contrib.cevae's does): in averaged losses, in no weight."""

import logging
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO

from pyro_mcvae import (
    MALA,
    ULA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    log_evidence,
)
from tests.estimates import assert_mean

OBJECTIVES = {
    "sgvb": lambda: TraceSGVB_ELBO(analytic_kl=False),
    "sgvb 3": lambda: TraceSGVB_ELBO(3, analytic_kl=False, vectorize_particles=True),
    "iwae 1": lambda: TraceIWAE_ELBO(1),
    "iwae 3": lambda: TraceIWAE_ELBO(3),
    "iwae 3 vectorised": lambda: TraceIWAE_ELBO(3, vectorize_particles=True),
    "rb": lambda: TraceRaoBlackwell_ELBO(),
    "sis": lambda: TraceSIS_ELBO(2, ULA(0.05)),
    "sis reweighted": lambda: TraceSIS_ELBO(2, ULA(0.05), gradient_estimator="reweighted"),
    "ais": lambda: TraceAIS_ELBO(2, MALA(0.1), vectorize_particles=True),
}
AUXILIARY = {"is_auxiliary": True}
X = torch.tensor([1.0, -0.5, 2.0, 0.3], dtype=torch.float64)
T = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)


def model(index):
    with pyro.plate("data", 4, subsample=index):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=X[index])


def guide(index):
    """The exact posterior, beside a classifier."""
    logit = pyro.param("logit", torch.tensor(0.4))
    with pyro.plate("data", 4, subsample=index):
        pyro.sample("t", dist.Bernoulli(logits=logit), obs=T[index], infer=AUXILIARY)
        pyro.sample("z", dist.Normal(X[index] / 2, 0.5**0.5))


def one_gradient(name, elbo, *args):
    """Of the loss."""
    elbo.loss_and_grads(*args)
    param = dict(pyro.get_param_store().named_parameters())[name]
    result, param.grad = param.grad, None
    return result


def exact(index):
    return dist.Normal(0.0, 2**0.5).log_prob(X[index])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_value_is_that_of_trace_elbo_and_the_gradient_is_its_own(name):
    index = torch.tensor([1, 2])
    elbo, scale = OBJECTIVES[name](), 4 / len(index)
    expected = Trace_ELBO().loss(model, guide, index)
    if "sis" not in name:  # unadjusted moves leave the posterior
        assert math.isclose(elbo.loss(model, guide, index), expected, rel_tol=1e-12)
        assert math.isclose(elbo.loss_and_grads(model, guide, index), expected, rel_tol=1e-12)
    else:
        elbo.loss_and_grads(model, guide, index)
    if "sis" not in name:
        bounds = elbo.bounds(model, guide, index)
        assert torch.allclose(bounds.per_datum, exact(index), rtol=1e-12)
        assert math.isclose(bounds.total, -expected, rel_tol=1e-12)
    logit = pyro.param("logit")
    assert torch.allclose(logit.grad, scale * (T[index] - logit.sigmoid()).sum(), rtol=1e-12)


def test_no_evidence_contains_it():
    index = torch.arange(4)
    result = log_evidence(model, guide, index, num_particles=50)
    assert torch.allclose(result.log_evidence, exact(index), rtol=1e-12)
    chains = log_evidence(model, guide, index, num_particles=5, kernel=MALA(0.1), schedule=3)
    assert torch.allclose(chains.log_evidence, exact(index), rtol=1e-12)


@pytest.mark.parametrize("estimator", ["reparam", "stl", "dreg", "vimco"])
def test_gradients_through_draws_reach_it_with_no_weight(estimator):
    """E log q(y | z) in closed form, of which a weight would leave a third."""
    size = 1000

    def observing(index):
        loc = pyro.param("loc", torch.tensor(0.5))
        with pyro.plate("data", size):
            z = pyro.sample("z", dist.Normal(loc, 0.5**0.5))
            pyro.sample("y", dist.Normal(z, 1.0), obs=torch.tensor(3.0), infer=AUXILIARY)

    def same(index):
        with pyro.plate("data", size):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(1.0))

    elbo = TraceIWAE_ELBO(3, gradient_estimator=estimator, vectorize_particles=True)
    grads = [one_gradient("loc", elbo, same, observing, None) / size for _ in range(30)]
    assert_mean(torch.stack(grads), torch.tensor(3.0 - 0.5))


DISCRETE = {
    "sgvb": lambda: TraceSGVB_ELBO(),
    "iwae 1": lambda: TraceIWAE_ELBO(1),
    "iwae 2": lambda: TraceIWAE_ELBO(2),
    "rb sampled": lambda: TraceRaoBlackwell_ELBO(0, num_samples=1),
    "rb": lambda: TraceRaoBlackwell_ELBO(2, num_samples=0),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_draws_score_it(name):
    """A guide that is the posterior, so that every weight is the same."""
    size = 1000

    def mixture():
        with pyro.plate("data", size):
            k = pyro.sample("k", dist.Bernoulli(0.3))
            pyro.sample("x", dist.Normal(k, 1.0), obs=torch.tensor(0.8))

    start = math.log(0.3 / 0.7) + 0.3

    def observing():
        logit = pyro.param("logit", torch.tensor(start))
        with pyro.plate("data", size):
            k = pyro.sample("k", dist.Bernoulli(logits=logit))
            pyro.sample("y", dist.Normal(2 * k, 1.0), obs=torch.tensor(1.5), infer=AUXILIARY)

    steps = 1 if name == "rb" else 40
    elbo = DISCRETE[name]()
    result = [one_gradient("logit", elbo, mixture, observing) / size for _ in range(steps)]
    q = torch.tensor(start).sigmoid()
    # Of the loss: d/dlogit of q log N(1.5; 2, 1) + (1 - q) log N(1.5; 0, 1).
    expected = q * (1 - q) * 0.5 * (1.5**2 - 0.5**2)
    if name == "rb":
        assert torch.allclose(result[0], expected, rtol=1e-9)
    else:
        assert_mean(torch.stack(result), expected)


def test_it_is_told_once(caplog):
    elbo = TraceSGVB_ELBO()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            elbo.loss(model, guide, torch.arange(4))
    assert [r.message.startswith("site 't' of the guide is observed") for r in caplog.records] == [
        True
    ]


def test_a_truncated_posterior_refuses_it():
    def bits(index):
        with pyro.plate("data", 4):
            b = pyro.sample("b", dist.Bernoulli(0.5))
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z + b, 1.0), obs=X)

    posterior = TruncatedPosterior(bits, 2, guide=guide)
    with pytest.raises(ValueError, match="site 't' of guide= is observed"):
        TraceTruncated_ELBO().loss(bits, posterior, torch.arange(4))
