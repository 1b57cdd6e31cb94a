"""Plates whose elements depend on each other's latents: seen, and weighed together."""

import logging
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_mcvae import (
    ULA,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.structure.marked import marked_run
from tests.structure.pairs import coupled_pair
from tests.tally import Tally

X = (3.0, 3.5, 2.5, 4.0)


@pytest.fixture(autouse=True)
def expected_warning(caplog):
    caplog.set_level(logging.ERROR)


def walk(size=None):
    with pyro.plate("time", 4, size) as i:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z.cumsum(-1), 0.5), obs=torch.tensor(X)[i])


def walk_guide(size=None):
    with pyro.plate("time", 4, size) as i:
        loc = torch.tensor([1.7, 0.9, 0.0, 0.5])[i]
        pyro.sample("z", dist.Normal(pyro.param("shift", torch.tensor(0.1)) + loc, 0.6))


def walk_evidence():
    steps = torch.ones(4, 4).tril()
    covariance = steps @ steps.T + 0.25 * torch.eye(4)
    return dist.MultivariateNormal(torch.zeros(4), covariance).log_prob(torch.tensor(X))


@pytest.mark.parametrize("vectorize", [False, True], ids=["looped", "vectorized"])
def test_a_random_walk_in_a_plate_has_one_weight(vectorize):
    # A weight per step reported bounds 2.3 nats above this evidence.
    exact = walk_evidence()
    particles, count = (300, 12) if vectorize else (5, 6)
    for elbo in (
        TraceIWAE_ELBO(particles, vectorize_particles=vectorize),
        TraceSIS_ELBO(
            4,
            ULA(0.05),
            num_particles=particles,
            multi_sample=True,
            vectorize_particles=vectorize,
        ),
    ):
        assert elbo.bounds(walk, walk_guide).plates == ()
        bounds = torch.tensor([-elbo.loss(walk, walk_guide) for _ in range(count)])
        error = bounds.std() / count**0.5
        assert bounds.mean() < exact + 4 * error
        assert bounds.mean() > exact - 4 * error - (0.2 if vectorize else 9.0)


def test_coupled_elements_of_a_minibatch_are_not_weighed():
    # N/B would stand inside the logarithm: the plain ELBO of all particles instead.
    torch.manual_seed(0)
    elbo = TraceIWAE_ELBO(3, vectorize_particles=True)
    assert elbo.bounds(walk, walk_guide, 3).per_datum.numel() == 0


@pytest.mark.parametrize(
    "flow",
    [lambda: dist.transforms.planar(2), lambda: dist.transforms.neural_autoregressive(2, [4])],
    ids=["KeyError", "NotImplementedError"],
)
def test_the_elements_meet_also_where_the_guides_flow_has_no_inverse(flow):
    # The two errors by which flows say so; with one of them nothing was looked at, and the bound
    # was 3.0 nats above this evidence.
    torch.manual_seed(0)
    flow, x = flow(), torch.tensor([1.0, -1.5, 1.0, -1.5])

    def model():
        with pyro.plate("time", 4):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z[..., 0].cumsum(-1), 0.5), obs=x)

    def guide():
        pyro.module("flow", flow)
        with pyro.plate("time", 4):
            noise = dist.Normal(torch.zeros(4, 2), 1.0).to_event(1)
            pyro.sample("z", dist.TransformedDistribution(noise, [flow]))

    steps = torch.ones(4, 4).tril()
    covariance = steps @ steps.T + 0.25 * torch.eye(4)
    exact = dist.MultivariateNormal(torch.zeros(4), covariance).log_prob(x)
    elbo = TraceIWAE_ELBO(2000)
    assert elbo.bounds(model, guide).plates == ()
    bounds = torch.tensor([-elbo.loss(model, guide) for _ in range(8)])
    assert bounds.mean() < exact + 4 * bounds.std() / 8**0.5
    with pytest.raises(ValueError, match="A flow without an inverse"):
        TraceIWAE_ELBO(2, gradient_estimator="dreg").loss_and_grads(model, guide)


def coupled(model, guide, **subsamples):
    result = marked_run(Programs(model, guide, (), {}), subsamples).coupled
    return {(key.program, key.name): {p.name for p in plates} for key, plates in result.items()}


def neighbours(drawn, combine):
    def model():
        with pyro.plate("data", 2, dim=-2), pyro.plate("time", 3, dim=-1):
            z = pyro.sample("z", drawn())
            pyro.sample("x", dist.Normal(combine(z.double()), 1.0), obs=torch.zeros(2, 3))

    def guide():
        with pyro.plate("data", 2, dim=-2), pyro.plate("time", 3, dim=-1):
            pyro.sample("z", drawn())

    return model, guide


@pytest.mark.parametrize(
    "drawn",
    [lambda: dist.Normal(0.0, 1.0), lambda: dist.Categorical(torch.ones(50))],
    ids=["continuous", "discrete"],
)
@pytest.mark.parametrize(
    ("combine", "plates"),
    [
        (lambda z: z.cumsum(-1), {"time"}),
        (lambda z: z.flip(-1).cumsum(-1), {"time"}),
        (lambda z: (z / 50).softmax(-2), {"data"}),
        (lambda z: z - z.mean(), {"data", "time"}),
        (lambda z: z.sin(), set()),
    ],
    ids=["cumsum", "reversed", "softmax", "mean", "elementwise"],
)
def test_which_plate_is_coupled(drawn, combine, plates):
    torch.manual_seed(0)
    result = coupled(*neighbours(drawn, combine))
    assert result == ({("model", "x"): plates} if plates else {})


def test_many_elements_cost_one_run():
    runs = Tally()

    def count(z):
        runs.add()
        return z

    assert coupled(*coupled_pair(count, 500)) == {}
    assert runs.take()["run"] == 1


def test_the_other_plates_keep_their_weights():
    elbo = TraceIWAE_ELBO(3, vectorize_particles=True)
    pair = neighbours(lambda: dist.Normal(0.0, 1.0), lambda z: z.cumsum(-1))
    assert elbo.bounds(*pair).plates == ("data",)


def test_a_guide_that_couples_is_seen():
    def model():
        with pyro.plate("time", 3):
            pyro.sample("a", dist.Normal(0.0, 1.0))
            pyro.sample("b", dist.Normal(0.0, 1.0))

    def guide():
        with pyro.plate("time", 3):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            pyro.sample("b", dist.Normal(a.roll(1, -1), 1.0))

    assert coupled(model, guide) == {("guide", "b"): {"time"}}


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def model(self):
        with pyro.plate("data", 5):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.layers(z), 1.0).to_event(1), obs=torch.zeros(5, 4))

    def guide(self):
        with pyro.plate("data", 5):
            pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def test_batch_statistics_couple_data_and_a_marked_run_does_not_change_them():
    torch.manual_seed(0)
    decoder = Decoder()
    before = {n: b.clone() for n, b in decoder.layers[1].named_buffers() if "running" in n}
    random = torch.get_rng_state()
    assert coupled(decoder.model, decoder.guide) == {("model", "x"): {"data"}}
    assert torch.equal(torch.get_rng_state(), random)
    for name, buffer in before.items():
        assert torch.equal(decoder.layers[1].get_buffer(name), buffer)
    decoder.layers[1].eval()
    assert coupled(decoder.model, decoder.guide) == {}


def test_elements_that_meet_beside_noise_of_the_program_are_seen():
    pair = coupled_pair(lambda z: z.cumsum(-1) + torch.rand(()), 5)
    assert coupled(*pair) == {("model", "x"): {"data"}}


def counts():
    with pyro.plate("time", 2):
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.sample("x", dist.Normal(z.cumsum(-1), 0.7), obs=torch.tensor([1.0, 2.0]))


def counts_guide():
    with pyro.plate("time", 2):
        pyro.sample("z", dist.Bernoulli(logits=pyro.param("logits", torch.tensor([0.3, -0.5]))))


def counts_gradient():
    """Of the ELBO, by enumeration."""
    logits = torch.tensor([0.3, -0.5], requires_grad=True)
    states = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    log_q = dist.Bernoulli(logits=logits).log_prob(states).sum(-1)
    x = dist.Normal(states.cumsum(-1), 0.7).log_prob(torch.tensor([1.0, 2.0])).sum(-1)
    log_p = dist.Bernoulli(0.4).log_prob(states).sum(-1) + x
    return torch.autograd.grad((log_q.exp() * (log_p - log_q)).sum(), logits)[0]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: TraceSGVB_ELBO(num_particles=20, vectorize_particles=True),
            marks=pytest.mark.slow,
        ),
        lambda: TraceIWAE_ELBO(1),
        pytest.param(TraceRaoBlackwell_ELBO, marks=pytest.mark.slow),
        lambda: TraceRaoBlackwell_ELBO(0),
        lambda: TraceRaoBlackwell_ELBO(math.inf),
    ],
    ids=["vectorized", "iwae", "k1", "k0", "all"],
)
def test_the_score_of_one_element_multiplies_the_costs_of_others(make):
    # Trace_ELBO's plate-wise Rao-Blackwellization leaves them out, and is biased here.
    elbo, result = make(), []
    for _ in range(60):
        elbo.loss_and_grads(counts, counts_guide)
        parameter = pyro.get_param_store()["logits"].unconstrained()
        result.append(-parameter.grad)
        parameter.grad = None
    result = torch.stack(result)
    error = result.std(0) / 60**0.5
    assert ((result.mean(0) - counts_gradient()).abs() < 4.5 * error + 1e-9).all()


def test_noise_of_another_generator_is_no_coupling():
    """Data that a program augments again in each run differ at the same latents, too."""
    other = torch.Generator().manual_seed(0)
    assert coupled(*coupled_pair(lambda z: z + torch.randn(4, generator=other))) == {}


@pytest.mark.parametrize("relaxed", ["bernoulli", "categorical"])
@pytest.mark.parametrize("vectorize", [False, True])
def test_straight_through_draws_do_not_couple(relaxed, vectorize):
    """What they were before rounding goes with them when draws are exchanged."""

    def draw():
        if relaxed == "bernoulli":
            return dist.RelaxedBernoulliStraightThrough(torch.tensor(0.6), 0.4)
        probs = torch.tensor([0.2, 0.5, 0.3])
        return dist.RelaxedOneHotCategoricalStraightThrough(torch.tensor(0.6), probs)

    pair = coupled_pair(lambda z: z if relaxed == "bernoulli" else z[..., 0], draw=draw)
    elbo = TraceIWAE_ELBO(5, vectorize_particles=vectorize)
    assert elbo.bounds(*pair).per_datum.shape == (4,)


def test_it_is_said_once(caplog):
    """Though the programs are looked at again."""
    caplog.set_level(logging.WARNING)
    elbo, pair = TraceIWAE_ELBO(2), coupled_pair(lambda z: z.cumsum(-1), 3)
    for _ in range(40):
        elbo.loss(*pair)
    assert caplog.text.count("share one weight") == 1
