"""Arguments and programs that are wrong, or that Pyro takes: what is said, and what is accepted."""

import logging
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_mcvae import (
    CompiledELBO,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    log_evidence,
)

LOSSES = [TraceSGVB_ELBO, TraceIWAE_ELBO, TraceRaoBlackwell_ELBO, TraceSIS_ELBO, TraceAIS_ELBO]


def model(name="data", size=4):
    with pyro.plate(name, 4, subsample=torch.arange(size)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.ones(size))


def guide(name="data", size=4, infer=None):
    with pyro.plate("data", 4, subsample=torch.arange(size)):
        pyro.sample("z", dist.Normal(0.5, 0.5**0.5), infer=infer or {})


@pytest.mark.parametrize("loss", LOSSES)
def test_a_class_is_no_loss(loss):
    svi = SVI(model, guide, pyro.optim.Adam({}), loss=loss)
    with pytest.raises(ValueError, match=rf"pass an object, loss={loss.__name__}\(\)"):
        svi.step()


@pytest.mark.parametrize("make", [np.int64, torch.tensor, int])
def test_counts_are_whole_numbers_of_any_library(make):
    for elbo in (TraceIWAE_ELBO(make(3)), TraceSIS_ELBO(make(3)), TraceSGVB_ELBO(make(3))):
        assert elbo.loss(model, guide) > 0
    assert type(TraceIWAE_ELBO(make(3)).num_particles) is int
    options = TraceRaoBlackwell_ELBO(make(2), make(1))._site_options
    assert (type(options.num_categories), options.num_categories) == (int, 2)


@pytest.mark.parametrize(
    ("loss", "wrap"),
    [
        *((loss, lambda elbo: elbo) for loss in LOSSES),
        (TraceIWAE_ELBO, partial(CompiledELBO, backend="eager")),
    ],
)
def test_particles_that_are_assigned_are_those_of_an_objective_made_with_them(loss, wrap):
    def learned():
        loc = pyro.param("loc", torch.tensor(0.3))
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(loc, 0.5**0.5))

    result = []
    for given, assigned in ((2, 5), (5, 5)):
        elbo = wrap(loss(num_particles=given))
        elbo.num_particles = assigned
        assert elbo.num_particles == assigned
        pyro.set_rng_seed(0)
        value = elbo.loss_and_grads(model, learned)
        gradient = pyro.param("loc").grad.clone()
        pyro.param("loc").grad.zero_()
        result.append((value, gradient.item()))
    assert result[0] == result[1]


def test_a_budget_stands_alone_at_a_site():
    def bit():
        with pyro.plate("data", 4):
            pyro.sample("b", dist.Bernoulli(0.4), infer={"mcvae": {"budget": 3, "num_samples": 1}})

    with pytest.raises(ValueError, match=r"site 'b', infer=.*: budget=3 is the number"):
        TraceRaoBlackwell_ELBO().loss(bit, bit)


@pytest.mark.parametrize("loss", LOSSES)
def test_model_and_guide_in_each_others_place(loss):
    with pytest.raises(ValueError, match="pass the model first and the guide second"):
        loss().loss(guide, model)


def test_baselines_of_tracegraph_are_told_of(caplog):
    elbo = TraceSGVB_ELBO()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            elbo.loss(model, lambda: guide(infer={"baseline": {"use_decaying_avg_baseline": True}}))
    assert caplog.text.count("is for pyro.infer.TraceGraph_ELBO") == 1


def three(batch, event):
    """Three latents with a datum each: in a plate, or as one event."""
    with pyro.plate_stack("plates", batch):
        z = pyro.sample("z", dist.Normal(torch.zeros(*batch, *event), 1.0).to_event(len(event)))
        pyro.sample("x", dist.Normal(z, 1.0).to_event(len(event)), obs=torch.arange(3.0))


def one(shape, num_events):
    pyro.sample("z", dist.Normal(torch.full(shape, 0.5), 1.0).to_event(num_events))


FEWER = [  # no plate, one in the plate, an event of one, and no event
    (((3,), ()), ((), 0)),
    (((3,), ()), ((1,), 0)),
    (((), (3,)), ((1,), 1)),
    (((), (3,)), ((3,), 0)),
]


@pytest.mark.parametrize(
    ("wanted", "drawn", "evaluator", "validate"),
    [
        (*FEWER[(i + k) % 4], evaluator, bool(i % 2))
        for i, evaluator in enumerate([*(loss().loss for loss in LOSSES), log_evidence])
        for k in (0, 1)
    ],
)
def test_a_draw_is_not_broadcast_over_the_latents_of_the_model(wanted, drawn, evaluator, validate):
    # One draw would be scored as three latents, with one density of its own.
    with pyro.validation_enabled(validate), pytest.raises(ValueError, match="disagree at site 'z'"):
        evaluator(lambda: three(*wanted), lambda: one(*drawn))


def test_a_subsampled_plate_inside_of_the_data_is_named():
    def replicated():
        with pyro.plate("data", 5, dim=-1):
            a = pyro.sample("a", dist.Bernoulli(0.5))
            with pyro.plate("rep", 4, subsample=torch.tensor([0, 2]), dim=-2):
                pyro.sample("x", dist.Normal(a, 0.8), obs=torch.zeros(2, 5))

    with pytest.raises(ValueError, match=r"site 'a'.*in the subsampled plate 'rep' \(2 of 4\)"):
        TraceTruncated_ELBO().loss(replicated, TruncatedPosterior(replicated, 2))
