"""The evidence of truncated posteriors: exact on their states, unbiased over all others."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    EvolutionaryUpdate,
    TruncatedPosterior,
    compare_models,
    log_evidence,
    refine,
    report,
)
from pyro_mcvae.evaluation.state_weights import draw_steps, log_step

X = torch.tensor(
    [[0.3, 1.2, -0.4], [2.0, 0.1, 0.7], [-1.0, 0.4, 1.5], [0.2, 0.2, 0.2]], dtype=torch.float64
)
LOADING = torch.tensor(
    [[1.0, 0.2, -0.5], [0.3, 1.1, 0.2], [-0.7, 0.4, 0.9], [0.5, -0.6, 0.1], [0.2, 0.3, 1.0]],
    dtype=torch.float64,
)


COUNTED = torch.tensor([2.0, 5.0, 0.0])


def binary(x=X):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(5)).to_event(1))
        pyro.sample("x", dist.Normal(z @ LOADING, 1.0).to_event(1), obs=x)


def mixed(x=X):
    with pyro.plate("data", len(x)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.5, 0.3, 0.2])))
        z = pyro.sample("z", dist.Bernoulli(0.4 * torch.ones(2)).to_event(1))
        loc = LOADING[:3][k] + z @ LOADING[3:]
        pyro.sample("x", dist.Normal(loc, 1.0).to_event(1), obs=x)


def exact(model):
    """By all states."""
    states = []
    if model is binary:
        for z in itertools.product((0.0, 1.0), repeat=5):
            z = torch.tensor(z)
            states.append(
                dist.Bernoulli(0.3).log_prob(z).sum()
                + dist.Normal(z @ LOADING, 1.0).log_prob(X).sum(-1)
            )
    else:
        for k, *z in itertools.product(range(3), (0.0, 1.0), (0.0, 1.0)):
            z, prior = torch.tensor(z), torch.tensor([0.5, 0.3, 0.2])[k].log()
            loc = LOADING[k] + z @ LOADING[3:]
            states.append(
                prior
                + dist.Bernoulli(0.4).log_prob(z).sum()
                + dist.Normal(loc, 1.0).log_prob(X).sum(-1)
            )
    return torch.stack(states).logsumexp(0)


@pytest.mark.parametrize("model", [binary, mixed])
@pytest.mark.parametrize("num_states", [1, 4])
def test_the_evidence_is_that_of_all_states(model, num_states):
    guide = TruncatedPosterior(model, num_states=num_states)
    guide.fit(num_steps=2)
    found = log_evidence(model, guide, num_particles=2000, chunk_size=1500)
    difference = found.log_evidence - exact(model)
    assert bool((difference.abs() < 4.5 * found.standard_error).all())
    assert float(found.standard_error.max()) < 0.05
    assert torch.equal(found.bound, guide.posterior().free_energy)
    assert bool((found.bound < exact(model)).all())
    assert bool((found.log_evidence > found.bound).all())
    assert found.plates == ("data",)
    assert float(found.total - exact(model).sum()) == pytest.approx(0.0, abs=0.2)


def test_all_states_leave_nothing_to_draw():
    guide = TruncatedPosterior(mixed, num_states=12)
    found = log_evidence(mixed, guide, num_particles=50)
    assert torch.allclose(found.log_evidence, exact(mixed))
    assert torch.allclose(found.log_evidence, found.bound)
    assert found.pareto_k.max() == -math.inf


def counts(x=COUNTED):
    with pyro.plate("data", len(x)):
        n = pyro.sample("n", dist.Poisson(4.0))
        b = pyro.sample("b", dist.Binomial(3, 0.4))
        pyro.sample("x", dist.Normal(n + b, 2.0), obs=x)


def test_counts_without_an_upper_bound_are_proposed_near_those_that_are_kept():
    n, b = torch.arange(60.0)[:, None], torch.arange(4.0)[:, None, None]
    near = dist.Normal(n + b, 2.0).log_prob(COUNTED)
    joint = near + dist.Poisson(4.0).log_prob(n) + dist.Binomial(3, 0.4).log_prob(b)
    evidence = joint.flatten(0, 1).logsumexp(0)
    guide = TruncatedPosterior(counts, num_states=4)
    guide.fit(num_steps=20)
    found = log_evidence(counts, guide, num_particles=10_000)
    # Of 65,536 values a uniform proposal saw none that counts, and knew no error of that.
    assert float((evidence - found.bound).min()) > 0.3
    assert float(found.standard_error.min()) > 0.002
    assert float(found.standard_error.max()) < 0.05
    assert bool(((found.log_evidence - evidence).abs() < 4 * found.standard_error).all())


@pytest.mark.parametrize("ordinal", [True, False])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_steps_have_the_probability_that_they_are_weighed_by(size, ordinal):
    reached, count = torch.arange(size), 40_000
    for begun in range(size):
        values = torch.full((count, 1), begun)
        drawn = draw_steps(values, torch.tensor([size]), torch.tensor([ordinal])).flatten()
        chance = torch.as_tensor(log_step(torch.tensor(begun), reached, size, ordinal)).exp()
        chance = chance.expand(size).masked_fill(reached == begun, 0.0)
        assert float(chance.sum()) == pytest.approx(1.0, abs=1e-6)
        often = torch.bincount(drawn, minlength=size) / count
        error = (chance * (1 - chance) / count).sqrt()
        assert bool(((often - chance).abs() <= 4.5 * error).all())


def test_models_with_truncated_posteriors_compare():
    guides = {m.__name__: (m, TruncatedPosterior(m, num_states=4)) for m in (binary, mixed)}
    found = compare_models(guides, num_particles=2000)
    value, error = found.difference("binary", "mixed")
    assert abs(value - float((exact(binary) - exact(mixed)).sum())) < 4 * error


def test_what_cannot_be_estimated_is_refused():
    guide = TruncatedPosterior(binary, num_states=2)
    with pytest.raises(ValueError, match="no chain moves them: leave out schedule and kernel"):
        log_evidence(binary, guide, schedule=3)
    with pytest.raises(ValueError, match="is of another model than the one that is judged"):
        log_evidence(mixed, guide)


def test_what_belongs_to_no_datum_is_shared():
    def outside(x=X):
        binary(x)
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.zeros(()))

    found = log_evidence(outside, TruncatedPosterior(outside, num_states=32), num_particles=20)
    assert torch.allclose(found.log_evidence, exact(binary))
    assert torch.allclose(
        found.total - exact(binary).sum(), dist.Normal(0.0, 1.0).log_prob(torch.zeros(()))
    )


def test_draws_that_find_nothing_among_many_values_leave_doubt():
    """Two of 3,000 clusters lie at the datum, and states hold one of them."""
    centres = torch.full((3000,), 100.0)
    centres[[5, 2005]] = 0.0

    def model():
        with pyro.plate("data", 1):
            k = pyro.sample("k", dist.Categorical(torch.ones(3000)))
            pyro.sample("x", dist.Normal(centres[k], 0.1), obs=torch.zeros(1))

    def start(*args):
        return {"k": torch.tensor([[5], [6], [7]])}

    guide = TruncatedPosterior(model, 3, EvolutionaryUpdate(num_generations=0), proposals=start)
    guide.fit()
    found = log_evidence(model, guide, num_particles=50, seed=0)
    assert found.standard_error == 0  # it has missed the other one
    assert found.pareto_k.isnan()
    assert found.doubtful.all()
    told = report(model, guide, num_particles=50, seed=0, look=False)
    assert not told.trusted
    assert "hold nearly all" not in told.advice


def test_draws_of_states_are_not_told_to_take_chains():
    guide = TruncatedPosterior(counts, num_states=2)
    with pytest.warns(UserWarning, match=r"num_states="):
        refine(counts, guide, num_samples=20, num_particles=20, seed=0)
