"""Handlers and distributions that integrate a latent or change a site, against exact values."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.forecast import ForecastingModel
from pyro.infer.autoguide import AutoNormal
from pyro.infer.reparam import ConjugateReparam

from pyro_mcvae import TraceIWAE_ELBO, TraceSIS_ELBO, log_evidence

X = torch.tensor([-1.2, 0.3, 2.1, -0.5], dtype=torch.float64)
GRID = torch.linspace(-8.0, 8.0, 401, dtype=torch.float64)


def normals():
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 4):
        z = pyro.sample("z", dist.Normal(mu, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=X)


def parameterized():
    mu = pyro.param("mu", torch.tensor(0.0))
    with pyro.plate("data", 4):
        z = pyro.sample("z", dist.Normal(mu, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=X)


def local_guide():
    with pyro.plate("data", 4):
        pyro.sample("z", dist.Normal(X / 2, 0.8))


def both_guide():
    pyro.sample("mu", dist.Normal(0.1, 0.7))
    local_guide()


def mean_guide():
    pyro.sample("mu", dist.Normal(0.0, 0.8))


def field():
    covariances = torch.tensor([[[1.0, 0.6], [0.6, 1.0]], [[1.0, 0.5], [0.5, 2.0]]])
    return dist.GaussianMRF(
        dist.MultivariateNormal(torch.zeros(1), torch.eye(1)),
        *(dist.MultivariateNormal(torch.zeros(2), c) for c in covariances),
    )


def markov_field():
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    pyro.sample("y", field(), obs=(X - mu.unsqueeze(-1)).unsqueeze(-1))


def beta_binomial():
    p = pyro.sample("p", dist.Beta(2.0, 3.0))
    pyro.sample("k", dist.Binomial(10, p), obs=torch.tensor(4.0))


def over_the_mean(log_likelihood):
    log_p = torch.stack([log_likelihood(u) for u in GRID]) + dist.Normal(0.0, 1.0).log_prob(GRID)
    return log_p.logsumexp(0) + (GRID[1] - GRID[0]).log()


def all_normals():
    return dist.MultivariateNormal(torch.zeros(4), 2 * torch.eye(4) + 1).log_prob(X)


# The model, the guide, the log evidence.
CASES = {
    "do": lambda: (
        poutine.block(poutine.do(normals, {"mu": torch.tensor(0.7)}), hide=["mu"]),
        local_guide,
        dist.Normal(0.7, math.sqrt(2)).log_prob(X).sum(),
    ),
    "uncondition": lambda: (
        poutine.condition(poutine.uncondition(normals), {"x": X}),
        both_guide,
        all_normals(),
    ),
    "lift": lambda: (
        poutine.lift(parameterized, prior={"mu": dist.Normal(0.0, 1.0)}),
        both_guide,
        all_normals(),
    ),
    "markov field": lambda: (
        markov_field,
        mean_guide,
        over_the_mean(lambda u: field().log_prob((X - u).unsqueeze(-1))),
    ),
    "conjugate": lambda: (
        poutine.reparam(beta_binomial, {"p": ConjugateReparam(lambda: dist.Beta(5.0, 7.0))}),
        lambda: pyro.sample("p_updated", dist.Beta(5.0, 8.0)),
        dist.BetaBinomial(2.0, 3.0, 10).log_prob(torch.tensor(4.0)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_mean_weights_are_the_evidence(name):
    model, guide, exact = CASES[name]()
    result = log_evidence(model, guide, num_particles=1000, max_plate_nesting=1)
    assert abs(result.total - exact) < 4.5 * result.total_standard_error
    chains = {"num_particles": 100, "vectorize_particles": True, "max_plate_nesting": 1}
    for elbo in (
        TraceIWAE_ELBO(100, joint=True, vectorize_particles=True, max_plate_nesting=1),
        TraceSIS_ELBO(2, multi_sample=True, joint=True, **chains),
    ):
        with torch.no_grad():
            weights = torch.stack([-torch.tensor(elbo.loss(model, guide)) for _ in range(10)])
        ratio = (weights - exact).exp()
        assert abs(ratio.mean() - 1) < 5 * ratio.std() / 10**0.5


def test_an_intervention_leaves_a_site_that_has_to_be_hidden():
    model = poutine.do(normals, {"mu": torch.tensor(0.7)})
    with pytest.raises(ValueError, match="site 'mu' of the model is neither observed nor drawn"):
        TraceIWAE_ELBO(2).loss(model, local_guide)


class Trend(ForecastingModel):
    """Pyro's tutorial: its data have a dim of time that no plate declares."""

    num_runs = 0

    def model(self, zero_data, covariates):
        self.num_runs += 1
        num_series = zero_data.size(-1)
        level = pyro.sample("level", dist.Normal(0.0, 2.0).expand([num_series]).to_event(1))
        slope = pyro.sample("slope", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        scale = pyro.sample("scale", dist.LogNormal(-1.0, 0.5).expand([num_series]).to_event(1))
        self.predict(dist.Normal(0, scale), level + (slope * covariates).sum(-1, keepdim=True))


RUNS = {TraceIWAE_ELBO: (1, 3), TraceSIS_ELBO: (4, 4)}  # three particles, or transitions


@pytest.mark.parametrize(
    "elbo", [TraceIWAE_ELBO, pytest.param(TraceSIS_ELBO, marks=pytest.mark.slow)]
)
def test_a_forecast_runs_its_particles_at_once(elbo):
    pyro.set_rng_seed(0)
    data, time = torch.randn(6, 2).cumsum(0), torch.linspace(0.0, 1.0, 6).unsqueeze(-1)
    model = Trend()
    guide = AutoNormal(model, init_scale=0.3)
    guide(data, time)
    means = []
    for looped in (False, True):
        # As Pyro's Forecaster has it; here the dim of time is found, and none has to be declared.
        bounds = elbo(3, vectorize_particles=False if looped else None)
        with torch.no_grad():
            bounds.loss(model, guide, data, time)
            model.num_runs = 0
            bounds.loss(model, guide, data, time)
            assert model.num_runs == RUNS[elbo][looped]
            result = torch.tensor([bounds.loss(model, guide, data, time) for _ in range(12)])
        means.append((result.mean(), result.var() / 12))
    (at_once, first), (one_by_one, second) = means
    assert abs(at_once - one_by_one) < 4 * (first + second).sqrt()


def shared_rate(size=None, own=False):
    """A conjugate rate of all data, from a rough guess, and a latent of each datum's own."""

    def model():
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", 3, size) as i:
            if own:
                rate = rate * pyro.sample("z", dist.LogNormal(0.0, 0.5))
            pyro.sample("x", dist.Poisson(rate), obs=COUNTS[i])

    def guide():
        if own:
            with pyro.plate("data", 3, size):
                pyro.sample("z", dist.LogNormal(0.05, 0.5))

    return poutine.reparam(model, {"rate": ConjugateReparam(dist.Gamma(3.0, 3.0))}), guide


COUNTS = torch.tensor([1.0, 2.0, 0.0])


def evidence_with_own_latents():
    z = dist.LogNormal(0.0, 0.5).sample((3, 200_000))
    total = 1 + z.sum(0)
    weight = math.log(24 / 2) - 5 * total.log() + (COUNTS[:, None] * z.log()).sum(0)
    return float(weight.logsumexp(0) - math.log(200_000))


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_data_that_share_an_untraced_draw_share_a_weight(own):
    # A weight for each datum had -1.74 ± 0.03 where nothing else is latent.
    model, guide = shared_rate(own=own)
    exact = math.log(24 / 4**5 / 2)  # Gamma(5) / Gamma(2) / (1! 2! 0!), and 1 + 3 to the minus 5
    if own:
        exact = evidence_with_own_latents()
    result = log_evidence(model, guide, num_particles=400, joint=False)
    assert abs(result.total - exact) < 4 * result.total_standard_error + 0.01
    bounds = TraceIWAE_ELBO(400).bounds(model, guide)
    assert bounds.plates == ()
    assert abs(bounds.total - exact) < 0.3
    if own:
        assert TraceSIS_ELBO(2, num_particles=2).bounds(model, guide).plates == ()


@pytest.mark.slow
def test_chains_of_such_data_have_their_evidence():
    model, guide = shared_rate(own=True)
    bounds = TraceSIS_ELBO(2, num_particles=500, multi_sample=True).bounds(model, guide)
    assert abs(bounds.total - evidence_with_own_latents()) < 0.3
