"""Truncated posteriors have a bound of their own; evaluators that draw name it."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoLaplaceApproximation

from pyro_mcvae import TruncatedPosterior, log_evidence, refine, report, sandwich

X = torch.tensor(
    [[0.3, 1.2, -0.4], [2.0, 0.1, 0.7], [-1.0, 0.4, 1.5], [0.2, 0.2, 0.2]], dtype=torch.float64
)
LOADING = torch.tensor(
    [[1.0, 0.2, -0.5], [0.3, 1.1, 0.2], [-0.7, 0.4, 0.9], [0.5, -0.6, 0.1], [0.2, 0.3, 1.0]],
    dtype=torch.float64,
)


def binary(x=X):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(5)).to_event(1))
        pyro.sample("x", dist.Normal(z @ LOADING, 1.0).to_event(1), obs=x)


def exact():
    """By all states."""
    states = []
    for z in itertools.product((0.0, 1.0), repeat=5):
        z = torch.tensor(z)
        states.append(
            dist.Bernoulli(0.3).log_prob(z).sum()
            + dist.Normal(z @ LOADING, 1.0).log_prob(X).sum(-1)
        )
    return torch.stack(states).logsumexp(0)


@pytest.mark.parametrize("evaluator", [log_evidence, report, refine, sandwich])
def test_evaluators_name_the_bound_that_a_truncated_posterior_has(evaluator):
    guide = TruncatedPosterior(binary, num_states=32)
    with pytest.raises(ValueError, match=r"site 'z' is drawn .*guide.posterior\(...\).free_energy"):
        evaluator(binary, guide)
    assert torch.allclose(guide.posterior().free_energy, exact())


@pytest.mark.slow
def test_held_out_data_have_a_guide_of_their_own():
    guide = TruncatedPosterior(binary, num_states=4)
    guide.fit()
    before = {n: v.clone() for n, v in guide.state_dict().items()}
    x = torch.tensor([[1.0, 1.0, -0.2]])
    held = guide.for_data(x, num_steps=3)
    assert not held.training
    assert guide.training
    assert all(torch.equal(v, before[n]) for n, v in guide.state_dict().items())
    assert held.num_states == 4
    assert held.evolution is guide.evolution
    everything = TruncatedPosterior(binary, num_states=32).for_data(x, num_steps=0)
    assert held.posterior(x).free_energy < everything.posterior(x).free_energy
    with pytest.raises(ValueError, match=r"create a guide by guide\.for_data"):
        guide.posterior(x)
    with pytest.raises(ValueError, match=r"create a guide by guide\.for_data"):
        guide.posterior(x.expand(4, 3).clone())


def test_the_search_for_held_out_data_changes_no_statistics():
    norm = torch.nn.BatchNorm1d(3)

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(3)).to_event(1))
            pyro.sample("x", dist.Normal(norm(x) * 0 + z, 1.0).to_event(1), obs=x)

    guide = TruncatedPosterior(model, num_states=2)
    guide.for_data(X, num_steps=1)
    assert int(norm.num_batches_tracked) == 0
    assert norm.training


@pytest.mark.parametrize("evaluator", [log_evidence, report, refine, sandwich])
def test_a_point_mass_alone_is_no_bound_and_is_refused(evaluator):
    def model(x=X[:, 0]):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(w, 1.0), obs=x)

    for guide in (AutoDelta(model), AutoLaplaceApproximation(model)):
        guide(X[:, 0])
        with pytest.raises(ValueError, match=r"not a bound on log p\(x\). Use a guide that draws"):
            evaluator(model, guide, X[:, 0])
    near = guide.laplace_approximation(X[:, 0])
    result = log_evidence(model, near, X[:, 0], num_particles=2000)
    truth = dist.MultivariateNormal(torch.zeros(4), torch.eye(4) + 1.0).log_prob(X[:, 0])
    assert abs(result.total - truth) < 4 * result.total_standard_error + 1e-6
