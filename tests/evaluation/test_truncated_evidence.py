"""Truncated posteriors in the evaluators: exact on their states, a lower bound otherwise."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoLaplaceApproximation

from pyro_mcvae import (
    PriorDraws,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    compare,
    compare_models,
    log_evidence,
    log_evidence_loader,
    refine,
    report,
    sandwich,
)

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


def shifted(x=X[:, 0]):
    """A latent that all data share, and a discrete one of each."""
    theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.3))
        pyro.sample("x", dist.Normal(theta + 2 * z, 1.0), obs=x)


def draws_theta(x=X[:, 0]):
    pyro.sample("theta", dist.Normal(0.2, 0.6))


def holds_theta(x=X[:, 0]):
    pyro.sample("theta", dist.Delta(torch.tensor(0.4)))


def fitted(model, num_states=4, num_steps=1, **options):
    guide = TruncatedPosterior(model, num_states=num_states, **options)
    guide.fit(num_steps=num_steps)
    return guide


@pytest.mark.parametrize("model", [binary, mixed])
def test_the_evidence_is_that_of_the_states(model):
    guide = fitted(model)
    result = log_evidence(model, guide)
    assert torch.equal(result.bound, guide.posterior().free_energy)
    assert torch.allclose(result.log_evidence, result.bound)
    assert bool((result.log_evidence < exact(model)).all())
    assert bool(result.pareto_k.isnan().all())
    assert bool(result.doubtful.all())
    assert result.plates == ("data",)
    everything = TruncatedPosterior(model, num_states=32 if model is binary else 12)
    result = log_evidence(model, everything)
    assert torch.allclose(result.log_evidence, exact(model))
    assert result.pareto_k.max() == -math.inf
    assert not bool(result.doubtful.any())


def test_models_with_truncated_posteriors_compare():
    pairs = {"binary": (binary, 32), "mixed": (mixed, 12), "few": (mixed, 4)}
    result = compare_models(
        {n: (m, TruncatedPosterior(m, count)) for n, (m, count) in pairs.items()}
    )
    value, _ = result.difference("binary", "mixed")
    assert value == pytest.approx(float((exact(binary) - exact(mixed)).sum()))
    assert result.doubtful == ["few"]


def test_what_cannot_be_estimated_is_refused():
    guide = TruncatedPosterior(binary, num_states=2)
    for judge in (log_evidence, report, refine, sandwich):
        with pytest.raises(ValueError, match="no chain moves them: leave out schedule and kernel"):
            judge(binary, guide, schedule=3)
    with pytest.raises(ValueError, match="chains would move them: evaluate it by log_evidence"):
        refine(binary, guide)
    with pytest.raises(ValueError, match="is of another model than the one that is evaluated"):
        log_evidence(mixed, guide)
    drawn = TruncatedPosterior(shifted, num_states=1, guide=draws_theta)
    with pytest.raises(ValueError, match="draws site 'theta', and the evaluators take only its"):
        log_evidence(shifted, drawn)
    inner = fitted(binary)

    def outer(x=X):
        inner(x)

    with pytest.raises(ValueError, match="site 'z' is drawn from a TruncatedPosterior inside"):
        log_evidence(binary, outer, X)


def test_what_belongs_to_no_datum_is_shared():
    def outside(x=X):
        binary(x)
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.zeros(()))

    result = log_evidence(outside, TruncatedPosterior(outside, num_states=32))
    assert torch.allclose(result.log_evidence, exact(binary))
    assert torch.allclose(result.shared, dist.Normal(0.0, 1.0).log_prob(torch.zeros(())))


def test_a_report_of_states():
    guide = fitted(binary)
    result = report(binary, guide, num_particles=1000)
    assert result.states == 4
    assert "continue the search" in result.advice
    assert not result.trusted
    assert abs(result.prior.total - exact(binary).sum()) < 4 * result.prior.total_standard_error
    assert result.misses == bool(result.prior.total - result.guide.total > 0.1)
    enough = report(binary, TruncatedPosterior(binary, num_states=32))
    assert "The 32 states of each datum cover its posterior." in enough.advice
    assert enough.trusted
    assert not enough.misses


def test_a_mode_that_the_search_misses_is_found_from_the_prior():
    def twins():
        with pyro.plate("data", 3):
            side = pyro.sample("side", dist.Bernoulli(0.5))
            probs = (0.002 + 0.996 * side).unsqueeze(-1).expand(*side.shape, 30)
            pyro.sample("z", dist.Bernoulli(probs).to_event(1))
            pyro.sample("x", dist.Normal(0.0 * side, 1.0), obs=torch.zeros(3))

    guide = TruncatedPosterior(twins, num_states=1)
    guide.posterior()
    guide.load_state_dict({n: torch.zeros_like(v) for n, v in guide.state_dict().items()})
    result = report(twins, guide)
    assert result.misses
    assert "proposals=PriorDraws()" in result.advice
    assert not report(twins, guide, check_modes=False).misses


def test_held_out_data_have_a_guide_of_their_own():
    guide = fitted(binary, num_states=4)
    before = {n: v.clone() for n, v in guide.state_dict().items()}
    x = torch.tensor([[1.0, 1.0, -0.2]])
    held = guide.for_data(x, num_steps=3)
    assert not held.training
    assert guide.training
    assert all(torch.equal(v, before[n]) for n, v in guide.state_dict().items())
    assert held.num_states == 4
    assert held.evolution is guide.evolution
    result = log_evidence(binary, held, x)
    everything = TruncatedPosterior(binary, num_states=32).for_data(x, num_steps=0)
    assert result.total < log_evidence(binary, everything, x).total
    with pytest.raises(ValueError, match=r"make their guide by guide\.for_data"):
        log_evidence(binary, guide, x)
    other = x.expand(4, 3).clone()
    with pytest.raises(ValueError, match=r"make their guide by guide\.for_data"):
        log_evidence(binary, guide, other)


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


def test_an_evaluation_leaves_no_states_behind():
    guide = TruncatedPosterior(binary, num_states=3)
    log_evidence(binary, guide, X[:2], num_particles=50)
    assert not guide.has_states
    guide.fit(X)


def test_point_masses_that_all_data_share_are_given():
    guide = fitted(shifted, num_states=2, guide=holds_theta)
    result = log_evidence(shifted, guide)
    on = math.log(0.3) + dist.Normal(2.4, 1.0).log_prob(X[:, 0])
    off = math.log(0.7) + dist.Normal(0.4, 1.0).log_prob(X[:, 0])
    assert result.fixed_latents == ("theta",)
    assert torch.allclose(result.log_evidence, torch.logaddexp(on, off))
    assert torch.allclose(result.shared, dist.Normal(0.0, 1.0).log_prob(torch.tensor(0.4)))


def test_batches_lie_side_by_side():
    def model(x, index):
        with pyro.plate("data", 4, subsample=index):
            z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(5)).to_event(1))
            pyro.sample("x", dist.Normal(z @ LOADING, 1.0).to_event(1), obs=x)

    guide = TruncatedPosterior(model, num_states=32)
    batches = [(X[i], i) for i in torch.arange(4).split(3)]
    result = log_evidence_loader(model, guide, batches, num_particles=20, progress=False)
    assert torch.allclose(result.log_evidence, exact(binary))


def test_losses_of_states_compare():
    weight = torch.nn.Parameter(0.1 * LOADING)

    def model(x):
        pyro.param("weight", weight)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(5)).to_event(1))
            pyro.sample("x", dist.Normal(z @ weight, 1.0).to_event(1), obs=x)

    losses = {"all": TraceTruncated_ELBO(), "two": TraceTruncated_ELBO(num_gradient_states=2)}
    guide = TruncatedPosterior(model, num_states=4, proposals=PriorDraws(2))
    adam = pyro.optim.Adam({"lr": 0.05})
    result = compare(
        model, guide, X, losses=losses, optim=adam, num_steps=3, num_checks=1, num_particles=50
    )
    for copy in result.values():
        assert not copy.failed
        assert len(copy.bounds) == 3
        assert float(copy.evidence.mean) >= float(copy.evidence.bound.mean())


@pytest.mark.parametrize("judge", [log_evidence, report, refine, sandwich])
def test_a_point_mass_alone_is_no_bound_and_is_refused(judge):
    def model(x=X[:, 0]):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(w, 1.0), obs=x)

    for guide in (AutoDelta(model), AutoLaplaceApproximation(model)):
        guide(X[:, 0])
        with pytest.raises(ValueError, match=r"no bound on log p\(x\). Use a guide that draws"):
            judge(model, guide, X[:, 0])
    near = guide.laplace_approximation(X[:, 0])
    result = log_evidence(model, near, X[:, 0], num_particles=2000)
    truth = dist.MultivariateNormal(torch.zeros(4), torch.eye(4) + 1.0).log_prob(X[:, 0])
    assert abs(result.total - truth) < 4 * result.total_standard_error + 1e-6
