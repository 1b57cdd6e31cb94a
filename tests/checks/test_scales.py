"""A poutine.scale around latents inside the weights: no bound on the evidence."""

import logging
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_mcvae import (
    MALA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    log_evidence,
)

X = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
TOLD = "poutine.scale multiplies the log density of latent 'z'"
CHAINS = [lambda: TraceSIS_ELBO(3), lambda: TraceAIS_ELBO(3, MALA(0.1))]
WEIGH = [lambda: TraceIWAE_ELBO(3), *CHAINS]


def programs(of_model, of_guide, of_data=1.0, plated=True):
    """The scales of z in the model and in the guide, and of x."""

    def model():
        with pyro.plate("data", 3):
            with poutine.scale(scale=of_model):
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
            with poutine.scale(scale=of_data):
                pyro.sample("x", dist.Normal(z, 0.7), obs=X)

    def guide():
        with pyro.plate("data", 3), poutine.scale(scale=of_guide):
            pyro.sample("z", dist.Normal(X / 2, 0.6))

    return model, guide


def logged(caplog, elbo, pair, steps=1):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(steps):
            elbo.loss(*pair)
    return [r.getMessage() for r in caplog.records if TOLD in r.getMessage()]


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), torch.tensor([0.2, 0.5, 1.0])])
def test_annealing_runs_with_one_warning_that_says_what_the_number_is(scale, caplog):
    for make in WEIGH:
        (message,) = logged(caplog, make(), programs(scale, scale), steps=5)
        assert "not a bound on the log evidence" in message
        assert "integral of p(x | z) p(z)^0." in message


@pytest.mark.parametrize(("of_model", "of_guide"), [(0.5, 1.0), (1.0, 0.5), (2.0, 1.0)])
def test_scales_of_one_program_are_told_too(of_model, of_guide, caplog):
    for make in WEIGH:
        (message,) = logged(caplog, make(), programs(of_model, of_guide), steps=3)
        assert f"by {of_model:g} in the model and {of_guide:g} in the guide" in message


def test_the_number_is_the_bound_that_the_warning_says():
    """The integral of p(x | z) p(z)^b q(z)^(1 - b), by its closed form."""
    b, q = 0.5, dist.Normal(X / 2, 0.6)
    z = torch.linspace(-12, 12, 4001).unsqueeze(-1)
    log_density = dist.Normal(z, 0.7).log_prob(X) + b * dist.Normal(0.0, 1.0).log_prob(z)
    exact = ((log_density + (1 - b) * q.log_prob(z)).logsumexp(0) + math.log(24 / 4000)).sum()
    result = TraceIWAE_ELBO(20_000, vectorize_particles=True).bounds(*programs(b, b)).total
    assert abs(result - exact) < 0.05  # about four standard errors


def test_above_one_it_is_told_again(caplog):
    elbo = TraceIWAE_ELBO(3)
    assert len(logged(caplog, elbo, programs(0.5, 0.5))) == 1
    (message,) = logged(caplog, elbo, programs(4.0, 4.0))
    assert "exists for few models only" in message


@pytest.mark.parametrize("scale", [4.0, torch.tensor(4.0)])
def test_chains_that_would_run_away_are_refused(scale):
    for make in CHAINS:
        with pytest.raises(ValueError, match=r"site 'z' is scaled by poutine.scale \(4 in the g"):
            make().loss_and_grads(*programs(scale, scale))


def test_chains_are_refused_at_the_step_whose_scale_is_above_one():
    scale = [0.5]

    def of(which):
        return lambda: programs(scale[0], scale[0])[which]()

    for make in CHAINS:
        scale[0], elbo, pair = 0.5, make(), (of(0), of(1))
        for _ in range(3):
            elbo.loss(*pair)
        scale[0] = 1.5
        with pytest.raises(ValueError, match="site 'z' is scaled"):
            elbo.loss(*pair)


def test_tempered_data_are_left_alone(caplog):
    for make in WEIGH:
        for scale in (0.3, 5.0):
            assert not logged(caplog, make(), programs(1.0, 1.0, scale))


def test_averages_are_left_alone(caplog):
    for make in (TraceSGVB_ELBO, lambda: TraceIWAE_ELBO(1), TraceRaoBlackwell_ELBO):
        assert not logged(caplog, make(), programs(4.0, 4.0))


def test_the_elbo_of_a_beta_vae():
    exact = dist.Normal(X / 2, 0.7).log_prob(X) - 0.5 * (0.6 / 0.7) ** 2
    divergence = torch.distributions.kl_divergence(dist.Normal(X / 2, 0.6), dist.Normal(0.0, 1.0))
    result = [-TraceSGVB_ELBO(1000).loss(*programs(4.0, 4.0)) for _ in range(5)]
    assert abs(sum(result) / 5 - (exact - 4 * divergence).sum()) < 0.15  # five standard errors


def test_global_latents_stay_outside_of_the_weights(caplog):
    def program(is_model):
        with poutine.scale(scale=0.1):
            w = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3, subsample=torch.arange(2)) as i:
            u = pyro.sample("u", dist.Normal(w, 1.0))
            if is_model:
                pyro.sample("x", dist.Normal(u, 1.0), obs=X[i])

    pair = (lambda: program(True)), (lambda: program(False))
    for make in WEIGH:
        assert not logged(caplog, make(), pair)


def test_no_plate_is_one_weight(caplog):
    def program(is_model):
        with poutine.scale(scale=0.1):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
        if is_model:
            pyro.sample("x", dist.Normal(z, 1.0), obs=X[0])

    pair = (lambda: program(True)), (lambda: program(False))
    assert len(logged(caplog, TraceIWAE_ELBO(3), pair)) == 1


def test_an_evidence_with_a_scaled_prior_is_refused():
    with pytest.raises(ValueError, match=r"site 'z' of the guide is scaled"):
        log_evidence(*programs(0.5, 0.5), num_particles=5)
    with pytest.raises(ValueError, match=r"site 'z' of the model is scaled .*not a density"):
        log_evidence(*programs(0.5, 1.0), num_particles=5)
