"""Data that see the guide's parameters and none of its draws."""

import math

import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample
from torch import nn

from pyro_mcvae import (
    MonteCarloEM,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    log_evidence,
)
from tests.params import in_turn

WEIGHING = {
    "iwae": lambda: TraceIWAE_ELBO(3),
    "vectorized": lambda: TraceIWAE_ELBO(3, vectorize_particles=True),
    "sis": lambda: TraceSIS_ELBO(1),
    "ais": lambda: TraceAIS_ELBO(1),
    "mcem": lambda: MonteCarloEM(1),
}
AVERAGING = {
    "sgvb": lambda: TraceSGVB_ELBO(analytic_kl=False),
    "iwae": lambda: TraceIWAE_ELBO(1),
    "rb": lambda: TraceRaoBlackwell_ELBO(),
}


def process(kind):
    x = torch.linspace(-1, 1, 7)
    kernel, likelihood = gp.kernels.RBF(1), gp.likelihoods.Gaussian()
    if kind == "sparse":
        return gp.models.VariationalSparseGP(
            x, torch.sin(3 * x), kernel, Xu=x[::2].clone(), likelihood=likelihood
        )
    return gp.models.VariationalGP(x, torch.sin(3 * x), kernel, likelihood=likelihood)


@in_turn(objective=WEIGHING, kind=["sparse", "full"])
def test_a_latent_that_is_integrated_in_closed_form_is_not_weighed(kind, objective):
    # The bound of 8 particles of a trained sparse process was 2.3 nats above its evidence.
    result = process(kind)
    with pytest.raises(ValueError, match=r"'likelihood.y' of the model uses the parameters"):
        WEIGHING[objective]().loss(result.model, result.guide)
    with pytest.raises(ValueError, match=r"use a model that uses its latent, as in x = f"):
        log_evidence(result.model, result.guide, num_particles=5)


@in_turn(likelihood=[gp.likelihoods.Gaussian, gp.likelihoods.Binary], whiten=[False, True])
def test_nor_where_the_data_see_another_draw(whiten, likelihood):
    # With whitening the data depend on the kernel's draw: 2.8 nats above the evidence.
    x = torch.linspace(-1, 1, 7)
    kernel = gp.kernels.RBF(1)
    kernel.lengthscale = PyroSample(dist.LogNormal(-0.5, 0.2))
    kernel.autoguide("lengthscale", dist.Normal)
    y = (torch.sin(3 * x) > 0).to(x.dtype)
    result = gp.models.VariationalGP(x, y, kernel, likelihood=likelihood(), whiten=whiten)
    # One after the other: these programs have no leading dims.
    for name in WEIGHING.keys() - {"vectorized"}:
        with pytest.raises(ValueError, match=r"parameters of the guide's site 'f', and"):
            WEIGHING[name]().loss(result.model, result.guide)
    with pytest.raises(ValueError, match=r"parameters of the guide's site 'f', and"):
        log_evidence(result.model, result.guide, num_particles=5)


@pytest.mark.parametrize("objective", AVERAGING)
def test_the_plain_elbo_of_it_is_right(objective):
    result = process("sparse")
    exact = -TraceSGVB_ELBO().loss(result.model, result.guide)  # the divergence in closed form
    bounds = torch.tensor(
        [-AVERAGING[objective]().loss(result.model, result.guide) for _ in range(15)]
    )
    assert abs(bounds.mean() - exact) < 4.5 * bounds.std() / 15**0.5


def test_a_network_that_both_programs_share_is_weighed():
    # An auxiliary loss of the guide's classifier, and tied weights of encoder and decoder.
    net, x = nn.Linear(2, 2), torch.ones(2)

    def model():
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z @ net.weight, 1.0).to_event(1), obs=x)
        pyro.sample("label", dist.Categorical(logits=net(x)), obs=torch.tensor(1))

    def guide():
        pyro.module("net", net)
        pyro.sample("z", dist.Normal(net(x), 1.0).to_event(1))

    for make in WEIGHING.values():
        assert math.isfinite(make().loss(model, guide))


def test_latents_that_reach_data_through_others_are_weighed():
    w = pyro.param("w", torch.tensor(0.3))

    def model():
        top = pyro.sample("top", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(top, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(1.0))
        pyro.sample("y", dist.Normal(w, 1.0), obs=torch.tensor(1.0))

    def guide():
        pyro.sample("top", dist.Normal(w, 1.0))
        pyro.sample("z", dist.Normal(w, 1.0))

    for make in WEIGHING.values():
        assert math.isfinite(make().loss(model, guide))


def test_judges_run_particles_as_a_loop_would():
    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            loc = z.softmax(1)
            pyro.sample("x", dist.Normal(loc, 1.0).to_event(1), obs=torch.ones(3, 2))

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    for vectorize in (None, True):
        result = log_evidence(model, guide, num_particles=20_000, vectorize_particles=vectorize)
        grid = torch.linspace(-9.0, 9.0, 721)  # of z_0 - z_1, with variance 2
        fraction = torch.stack([grid, -grid], -1).sigmoid()
        density = dist.Normal(fraction, 1.0).log_prob(torch.ones(2)).sum(-1)
        log_p = density + dist.Normal(0.0, 2**0.5).log_prob(grid)
        exact = log_p.logsumexp(0) + (grid[1] - grid[0]).log()
        assert ((result.log_evidence - exact).abs() < 4.5 * result.standard_error).all()


def test_data_that_select_another_latent_are_not_collapsed():
    """Draws of a guide without parameters have a gradient, too, and are no parameters."""

    def model(x, labels):
        shared = pyro.sample("shared", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            own = pyro.sample("own", dist.Normal(0.0, 1.0))
            both = torch.stack([own, shared.expand(own.shape)], -1)
            loc = both.gather(-1, labels.expand(own.shape)[..., None])[..., 0]
            pyro.sample("x", dist.Normal(loc, 1.0), obs=x)

    def guide(x, labels):
        pyro.sample("shared", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("own", dist.Normal(0.0, 1.0))

    x, ones = torch.zeros(3), torch.ones(3, dtype=torch.long)
    exact = dist.MultivariateNormal(torch.zeros(3), torch.eye(3) + 1).log_prob(x)
    assert TraceIWAE_ELBO(20_000, joint=True).loss(model, guide, x, ones) == pytest.approx(
        -exact.item(), abs=0.05
    )


@in_turn(objective=WEIGHING)
def test_masked_data_are_not_collapsed(objective):
    """Data of which a mask leaves no entry depend on no draw, and on no parameter."""

    def model(seen):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3), pyro.poutine.mask(mask=seen):
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.ones(3))

    def guide(seen):
        loc = pyro.param("loc", torch.tensor(0.0))
        pyro.sample("z", dist.Normal(loc, 1.0))

    WEIGHING[objective]().loss(model, guide, torch.tensor(False))
    result = log_evidence(model, guide, torch.tensor([False] * 3), num_particles=5)
    assert result.log_evidence == pytest.approx(0.0, abs=1e-6)
