"""Draws of rejection samplers have a path gradient and a score, however they are wrapped."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from pyro_mcvae import (
    HMC,
    ULA,
    MonteCarloEM,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    log_evidence,
)
from tests.estimates import assert_mean
from tests.params import in_turn

COUNT = 2000


class Rejected(dist.Rejector):
    """Normal(0, sigma) with 1 / sigma^2 = 1 / s^2 + 3, from proposals of Normal(0, s)."""

    support = constraints.real

    def __init__(self, s):
        self.s = s
        log_scale = -0.5 * torch.log1p(3 * s * s)
        propose = dist.Normal(torch.zeros_like(s), s)
        super().__init__(propose, lambda x: -1.5 * x * x, log_scale)

    def expand(self, batch_shape, _instance=None):
        return Rejected(self.s.expand(batch_shape))


def sigma(s):
    return (1 / s**2 + 3) ** -0.5


# Each of the law of Rejected(s), batch-shaped.
WAYS = {
    "as it is": lambda s: Rejected(s),
    "expanded": lambda s: Rejected(s[:1]).expand(s.shape),
    "to_event": lambda s: Rejected(s.unsqueeze(-1)).to_event(1),
    "transformed": lambda s: dist.TransformedDistribution(
        Rejected(s), [dist.transforms.AffineTransform(1.0, 2.0), dist.transforms.ExpTransform()]
    ),
    "both": lambda s: dist.TransformedDistribution(
        Rejected(s.unsqueeze(-1)), [dist.transforms.AffineTransform(0.0, -1.0)]
    ).to_event(1),
}


def programs(way):
    """Many data with one latent each, of the same posterior."""
    prior = WAYS[way](torch.ones(COUNT))

    def model():
        with pyro.plate("data", COUNT):
            z = pyro.sample("z", prior)
            r = (z.log() - 1) / 2 if way == "transformed" else z.reshape(COUNT)
            pyro.sample("x", dist.Normal(r**2, 1.0), obs=torch.tensor(0.5))

    def guide():
        s = pyro.param("s", 0.7 * torch.ones(COUNT), constraint=constraints.positive)
        with pyro.plate("data", COUNT):
            pyro.sample("z", WAYS[way](s))

    return model, guide


def gradients(loss, model, guide):
    """Of each datum in its own log s."""
    pyro.clear_param_store()
    loss.loss_and_grads(model, guide)
    (s,) = (p for _, p in pyro.get_param_store().named_parameters())
    return s.grad


Z = torch.linspace(-6, 6, 20_001, dtype=torch.float64)


def joint():
    """log p(x, z), on the grid, of what is transformed."""
    prior = dist.Normal(0.0, sigma(torch.ones(()))).log_prob(Z)
    return prior + dist.Normal(Z**2, 1.0).log_prob(torch.tensor(0.5))


def exact_gradient():
    """Of minus the ELBO in log s, by quadrature."""
    log_s = torch.tensor(math.log(0.7), requires_grad=True)
    q = dist.Normal(0.0, sigma(log_s.exp())).log_prob(Z)
    elbo = (q.exp() * (joint() - q)).sum() * (Z[1] - Z[0])
    return -torch.autograd.grad(elbo, log_s)[0]


@in_turn(way=WAYS, loss=[TraceSGVB_ELBO, TraceRaoBlackwell_ELBO])
def test_gradient_is_the_closed_form(way, loss):
    assert_mean(gradients(loss(), *programs(way)), exact_gradient())


def test_particles_of_one_logarithm_have_the_path_and_the_score():
    result = gradients(TraceIWAE_ELBO(1), *programs("to_event"))
    assert_mean(result, exact_gradient())


@in_turn(
    loss=[TraceSIS_ELBO(2), TraceSIS_ELBO(2, gradient_estimator="reweighted"), TraceAIS_ELBO(2)],
    way=["as it is", "both"],
)
def test_chains_cannot_train_what_was_rejected(loss, way):
    match = r"guide's site 'z' is not reparameterized \((Rejected|Transf).*without rejections"
    with pytest.raises(ValueError, match=match):
        loss.loss_and_grads(*programs(way))


def test_nor_can_monte_carlo_em():
    with pytest.raises(ValueError, match="'z' is not reparameterized"):
        MonteCarloEM(1).loss_and_grads(*programs("as it is"))


@pytest.mark.parametrize(
    ("kernel", "way"),
    [(ULA(0.02), "as it is"), (HMC(0.2, num_leapfrog=2), "both")],
    ids=["sis", "ais"],
)
def test_chains_weigh_and_judge_it(way, kernel):
    model, guide = programs(way)
    make = TraceSIS_ELBO if isinstance(kernel, ULA) else TraceAIS_ELBO
    evidence = joint().logsumexp(0) + (Z[1] - Z[0]).log()
    weights = (make(3, kernel).bounds(model, guide).per_datum - evidence).exp()
    assert_mean(weights, 1.0)
    evaluated = log_evidence(model, guide, num_particles=1).log_evidence
    assert_mean((evaluated - evidence).exp(), 1.0)
