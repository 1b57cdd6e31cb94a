"""
Programs whose evidence is known, of every kind: handlers and distributions that integrate a latent
or change a site, discrete sites that masks hide, and sums over states.
"""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.forecast import ForecastingModel
from pyro.infer.autoguide import AutoNormal
from pyro.infer.reparam import ConjugateReparam
from pyro.ops.indexing import Vindex

from pyro_mcvae import (
    MALA,
    ULA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    log_evidence,
)
from tests.cases import every
from tests.estimates import assert_mean
from tests.tally import Tally

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


def captures():
    """Cormack, Jolly and Seber: who is alive is seen at recaptures only, and masked before."""
    seen = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0.0]])
    known = seen.flip(1).cumsum(1).flip(1) > 0
    survive, capture = 0.8, 0.5

    def walk(is_model):
        with pyro.plate("animals", 5):
            alive, marked = torch.ones(5), torch.zeros(5, dtype=torch.bool)
            for t in pyro.markov(range(4)):
                with poutine.mask(mask=marked):
                    prob = torch.where(marked, survive * alive, 1.0)
                    if not is_model:
                        prob = torch.where(marked & ~known[:, t], 0.7 * alive, torch.ones(5))
                    alive = pyro.sample(f"z_{t}", dist.Bernoulli(prob))
                    if is_model:
                        pyro.sample(f"y_{t}", dist.Bernoulli(capture * alive), obs=seen[:, t])
                marked = marked | (seen[:, t] > 0)

    total = 0.0
    for row in seen.tolist():
        dead, living = 0.0, 1.0
        for y in row[row.index(1.0) + 1 :]:
            dead, living = dead + (1 - survive) * living, survive * living
            dead, living = (0.0, living * capture) if y else (dead, living * (1 - capture))
        total += math.log(dead + living)
    return lambda: walk(True), lambda: walk(False), total


def topics():
    """Latent Dirichlet allocation of ragged documents, with the words' topics summed."""
    words, lengths = torch.tensor([[0, 2, 1], [0, 1, 2], [0, 2, 2], [1, 1, 0]]), (4, 2, 3)
    mask = torch.arange(4)[:, None] < torch.tensor(lengths)
    prior, weight = torch.full((2, 3), 2.0), torch.full((2,), 1.5)
    counts = torch.tensor([[5.0, 2.0, 3.0], [2.0, 4.0, 4.0]])

    def model():
        with pyro.plate("topics", 2):
            topic = pyro.sample("topic", dist.Dirichlet(prior))
        with pyro.plate("documents", 3):
            fraction = pyro.sample("share", dist.Dirichlet(weight))
            with pyro.plate("words", 4), poutine.mask(mask=mask):
                topic = topic.unsqueeze(-3) if topic.dim() > 2 else topic
                probs = (fraction.unsqueeze(-1) * topic).sum(-2)
                pyro.sample("word", dist.Categorical(probs), obs=words)

    def guide():
        with pyro.plate("topics", 2):
            pyro.sample("topic", dist.Dirichlet(counts))
        with pyro.plate("documents", 3):
            pyro.sample("share", dist.Dirichlet(weight))

    def collapsed(counts, prior):
        beta = (counts + prior).lgamma().sum(-1) - (counts + prior).sum(-1).lgamma()
        return beta + math.lgamma(prior * counts.shape[-1]) - counts.shape[-1] * math.lgamma(prior)

    places = [(w, d) for d in range(3) for w in range(lengths[d])]
    of = torch.tensor(list(itertools.product(range(2), repeat=len(places))))
    which = torch.nn.functional.one_hot(of, 2).double()
    document = torch.tensor([d for _, d in places])
    word = torch.tensor([int(words[place]) for place in places])
    log_joint = sum(collapsed(which[:, document == d].sum(1), 1.5) for d in range(3))
    for t in range(2):
        result = torch.stack([which[:, word == v, t].sum(1) for v in range(3)], -1)
        log_joint = log_joint + collapsed(result, 2.0)
    return model, guide, float(log_joint.logsumexp(0))


MEANS = torch.tensor([-1.0, 1.5], dtype=torch.float64)


PRIOR = torch.tensor([0.3, 0.7], dtype=torch.float64)


SCALE = 0.8


def labelled_mixture():
    """z and a label of each datum: the evidence is that of a mixture of two normals."""
    with pyro.plate("data", 4):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        y = pyro.sample("y", dist.Categorical(PRIOR), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(MEANS[y] + z, SCALE), obs=X)


def labelled_guide():
    with pyro.plate("data", 4):
        pyro.sample("z", dist.Normal(0.3 * X, 0.9))


def evidence_of_each_datum():
    scale = math.sqrt(1 + SCALE**2)
    return (PRIOR.log() + dist.Normal(MEANS, scale).log_prob(X.unsqueeze(-1))).logsumexp(-1)


def switching():
    """A hidden Markov model with two means that are alike but for their sign."""
    mean = pyro.sample("mean", dist.Normal(0.5, 1.0))
    transit, y = torch.tensor([[0.7, 0.3], [0.2, 0.8]]), 0
    for t in pyro.markov(range(4)):
        y = pyro.sample(
            f"y_{t}", dist.Categorical(Vindex(transit)[y, :]), infer={"enumerate": "parallel"}
        )
        pyro.sample(f"x_{t}", dist.Normal(mean * (2 * y - 1), SCALE), obs=X[t])


def switching_guide():
    pyro.sample("mean", dist.Normal(0.7, 0.6))


def evidence_of_switching():
    """The forward algorithm at each mean of a grid."""
    transit = torch.tensor([[0.7, 0.3], [0.2, 0.8]])
    forward = torch.tensor([1.0, 0.0]).log()
    for x in X:
        forward = (forward.unsqueeze(-1) + transit.log()).logsumexp(-2)
        means = GRID.unsqueeze(-1) * torch.tensor([-1.0, 1.0])
        forward = forward + dist.Normal(means, SCALE).log_prob(x)
    joint = forward.logsumexp(-1) + dist.Normal(0.5, 1.0).log_prob(GRID)
    return (joint.logsumexp(0) + (GRID[1] - GRID[0]).log()).reshape(1)


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
    "captures": captures,
    "topics": topics,
    "enumerated mixture": lambda: (
        labelled_mixture,
        labelled_guide,
        evidence_of_each_datum().sum(),
    ),
    "enumerated chain": lambda: (switching, switching_guide, evidence_of_switching().sum()),
}


NOT_MOVED = ("captures", "topics")  # discrete, or too far from the posterior for short chains


@pytest.mark.parametrize("name", every(2, CASES))
def test_mean_weights_are_the_evidence(name):
    """Of all data together."""
    model, guide, exact = CASES[name]()
    result = log_evidence(model, guide, num_particles=3000, max_plate_nesting=2)
    assert abs(result.total - exact) < 4.5 * result.total_standard_error + 1e-3
    assert result.total_standard_error < 0.1
    if name in NOT_MOVED:
        return
    for elbo in (
        TraceSIS_ELBO(2, ULA(0.02), joint=True, num_particles=1000),
        TraceAIS_ELBO(2, MALA(0.05), joint=True, num_particles=1000),
    ):
        with torch.no_grad():
            elbo.loss(model, guide)
        assert_mean((elbo.last_step.log_weight - exact).exp(), torch.ones(()))


def test_an_intervention_leaves_a_site_that_has_to_be_hidden():
    model = poutine.do(normals, {"mu": torch.tensor(0.7)})
    with pytest.raises(ValueError, match=r"pass poutine.block\(model, hide=\['mu'\]\)"):
        TraceIWAE_ELBO(2).loss(model, local_guide)


def test_a_hidden_prediction_changes_nothing():
    """Pyro adds the log density of a latent that the guide leaves out."""

    def model(x):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        pyro.sample("y", dist.Normal(z, 0.1))

    def guide(x):
        pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))

    x = torch.tensor(0.8)
    exact = dist.Normal(0.0, 2**0.5).log_prob(x)
    hidden = poutine.block(model, hide=["y"])
    plain = TraceSGVB_ELBO(analytic_kl=False)
    for elbo in (plain, TraceIWAE_ELBO(3), TraceSIS_ELBO(2), TraceAIS_ELBO(2)):
        assert elbo.bounds(hidden, guide, x).total.item() == pytest.approx(exact.item(), abs=2e-3)
    assert log_evidence(hidden, guide, x).total.item() == pytest.approx(exact.item(), abs=2e-3)


class Trend(ForecastingModel):
    """Pyro's tutorial: its data have a dim of time that no plate declares."""

    runs = Tally()

    def model(self, zero_data, covariates):
        self.runs.add()
        num_series = zero_data.size(-1)
        level = pyro.sample("level", dist.Normal(0.0, 2.0).expand([num_series]).to_event(1))
        slope = pyro.sample("slope", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        scale = pyro.sample("scale", dist.LogNormal(-1.0, 0.5).expand([num_series]).to_event(1))
        self.predict(dist.Normal(0, scale), level + (slope * covariates).sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("elbo", "looped", "runs"),
    [(TraceIWAE_ELBO, False, 1), (TraceIWAE_ELBO, True, 3), (TraceSIS_ELBO, False, 4)],
)
def test_a_forecast_runs_its_particles_at_once(elbo, looped, runs):
    """As Pyro's Forecaster has it; here the dim of time is found, and none has to be declared."""
    data, time = torch.randn(6, 2).cumsum(0), torch.linspace(0.0, 1.0, 6).unsqueeze(-1)
    model = Trend()
    guide = AutoNormal(model, init_scale=0.3)
    guide(data, time)
    loss = elbo(3, vectorize_particles=False if looped else None)
    with torch.no_grad():
        for _ in range(2):  # the first two uses analyze the programs
            loss.loss(model, guide, data, time)
        model.runs.take()
        loss.loss(model, guide, data, time)
    assert model.runs.take()["run"] == runs


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
