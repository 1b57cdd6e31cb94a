"""What every judge says of a truncated posterior, beside sums over all states."""

import math
import re
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoDelta, AutoLaplaceApproximation

from pyro_mcvae import (
    PriorDraws,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    compare,
    log_evidence,
    log_evidence_loader,
    low_dimensional_evidence,
    refine,
    report,
    sandwich,
    to_inference_data,
)
from tests.evaluation.test_truncated_evidence import LOADING, X, binary, exact, mixed

THETA = torch.linspace(-4, 4, 801)


def shifted(x=X[:, 0]):
    """A latent that all data share, which a guide draws, and a discrete one of each."""
    theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.3))
        pyro.sample("x", dist.Normal(theta + 2 * z, 1.0), obs=x)


def shifted_exact(theta, x=X[:, 0]):
    """log p(x_n | theta), a row for each theta."""
    on = math.log(0.3) + dist.Normal(theta[:, None] + 2.0, 1.0).log_prob(x)
    off = math.log(0.7) + dist.Normal(theta[:, None], 1.0).log_prob(x)
    return torch.logaddexp(on, off)


def draws_theta(x=X[:, 0]):
    pyro.sample("theta", dist.Normal(0.2, 0.6))


def holds_theta(x=X[:, 0]):
    pyro.sample("theta", dist.Delta(torch.tensor(0.4)))


def noisy(x=X[:, 0]):
    """A continuous latent of each datum beside the discrete one."""
    with pyro.plate("data", len(x)):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Bernoulli(0.3))
        pyro.sample("x", dist.Normal(w + 2 * z, 1.0), obs=x)


def draws_w(x=X[:, 0]):
    with pyro.plate("data", len(x)):
        pyro.sample("w", dist.Normal(x / 2, 1.2))


def fitted(model, num_states=4, num_steps=3, **options):
    guide = TruncatedPosterior(model, num_states=num_states, **options)
    guide.fit(num_steps=num_steps)
    return guide


@pytest.mark.parametrize("model", [binary, mixed])
def test_refined_draws_follow_the_posterior(model):
    wanted = TruncatedPosterior(model, num_states=32 if model is binary else 12).posterior()
    draws = refine(model, fitted(model), num_samples=800, num_particles=15)
    assert set(draws) == set(wanted.values)
    error = (draws["z"].mean(0) - wanted.marginals()["z"]).abs().max()
    # 20 entries, standard error 0.018 at most, and a bias of about the weights' error over 15.
    assert float(error) < 0.07
    assert draws.plates == ("data",)
    assert draws.log_weight.shape == (800, 4)
    assert draws.log_likelihood["x"].shape == (800, 4)
    state = draws["z"][7]
    if model is binary:
        few = {n: v[:3] for n, v in draws.items()}
        assert Predictive(binary, posterior_samples=few)()["x"].shape == (3, *X.shape)
        again = dist.Normal(state @ LOADING, 1.0).log_prob(X).sum(-1)
        assert torch.allclose(draws.log_likelihood["x"][7], again)


def test_a_single_candidate_is_a_draw_of_q():
    guide = fitted(binary)
    posterior = guide.posterior()
    draws = refine(binary, guide, num_samples=3000, num_particles=1)
    assert torch.allclose(draws.log_weight, posterior.free_energy.expand(3000, -1))
    assert float((draws["z"].mean(0) - posterior.marginals()["z"]).abs().max()) < 0.045
    known = (draws["z"].unsqueeze(1) == posterior.values["z"]).all(-1).any(1)
    assert bool(known.all())
    assert bool(draws.pareto_k.isnan().all())


def test_draws_go_to_arviz():
    pytest.importorskip("arviz")
    data = to_inference_data(refine(binary, fitted(binary), num_samples=40), binary)
    assert data.posterior["z"].dims[2] == "data"


def test_the_gap_is_what_lies_outside_of_the_states():
    guide = fitted(binary)
    found = report(binary, guide, num_particles=1000)
    kl = exact(binary) - guide.posterior().free_energy
    assert bool(((found.gap - kl).abs() < 4.5 * found.evidence.standard_error).all())
    assert found.states == 4
    assert "search on" in found.advice
    assert re.search(r"states of a datum +4\n", str(found))
    assert abs(found.prior.total - exact(binary).sum()) < 4 * found.prior.total_standard_error
    assert not found.misses
    heavy = replace(found.guide, pareto_k=torch.full_like(found.guide.pareto_k, 0.9))
    near = replace(heavy, bound=heavy.log_evidence - 1e-3)
    unsure = replace(found, guide=near, evidence=near)
    assert "search on" in unsure.advice
    enough = report(binary, TruncatedPosterior(binary, num_states=32), loss=TraceTruncated_ELBO())
    assert "The 32 states of a datum hold nearly all of its posterior." in enough.advice
    assert enough.trained.bound == pytest.approx(float(exact(binary).mean()))
    with pytest.raises(ValueError, match="leave out schedule and kernel"):
        report(binary, guide, schedule=3)


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
    found = report(twins, guide)
    assert found.misses
    assert "proposals=PriorDraws()" in found.advice
    assert not report(twins, guide, look=False).misses


def test_both_bounds_hold_on_simulated_data():
    seen = []

    def model(x):
        seen.append(x)
        binary(x)

    found = sandwich(
        model,
        TruncatedPosterior(model, num_states=3),
        torch.zeros(500, 3),
        num_particles=4,
        num_search_steps=1,
    )
    states = torch.cartesian_prod(*[torch.arange(2.0)] * 5)
    prior = dist.Bernoulli(0.3).log_prob(states).sum(-1)
    x = seen[-1].unsqueeze(1)
    evidence = (prior + dist.Normal(states @ LOADING, 1.0).log_prob(x).sum(-1)).logsumexp(-1)
    assert float(x.std()) > 0.5
    for below, above in ((found.lower[0], evidence), (evidence, found.upper[0])):
        gain = above - below
        assert float(gain.mean()) > -3 * float(gain.std()) / math.sqrt(500)
    assert 0 < float(found.mean_gap) < 0.5
    assert "4 weights each way" in str(found)
    all_states = sandwich(
        model, TruncatedPosterior(model, num_states=32), torch.zeros(4, 3), num_search_steps=0
    )
    assert torch.allclose(all_states.lower, all_states.upper)
    with pytest.raises(ValueError, match="has a guide that draws other latents"):
        sandwich(noisy, TruncatedPosterior(noisy, 1, guide=draws_w), X[:, 0])


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
    found = log_evidence(binary, held, x, num_particles=4000)
    everything = TruncatedPosterior(binary, num_states=32).for_data(x, num_steps=0)
    assert torch.allclose(
        everything.posterior(x).free_energy, log_evidence(binary, everything, x).total
    )
    difference = found.total - everything.posterior(x).free_energy.sum()
    assert abs(difference) < 4 * found.total_standard_error
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


def test_latents_that_all_data_share_are_weighed_with_them():
    guide = fitted(shifted, num_states=1, num_steps=1, guide=draws_theta)
    found = log_evidence(shifted, guide, num_particles=150)
    log_prior = dist.Normal(0.0, 1.0).log_prob(THETA)
    truth = (log_prior + shifted_exact(THETA).sum(-1)).logsumexp(0) + math.log(0.01)
    assert found.log_evidence.shape == ()
    assert abs(found.total - truth) < 4 * found.total_standard_error
    assert float(found.total_standard_error) < 0.2
    assert float(found.bound) < float(truth)
    held = log_evidence(shifted, guide, num_particles=50, joint=False)
    assert held.given == ("theta",)
    assert held.log_evidence.shape == (4,)
    draws = refine(shifted, guide, num_samples=8, num_particles=40)
    assert draws["theta"].shape == (8,)
    assert len(draws["theta"].unique()) == 8


def test_point_masses_that_all_data_share_are_given():
    guide = fitted(shifted, num_states=1, num_steps=1, guide=holds_theta)
    found = log_evidence(shifted, guide, num_particles=4000)
    theta = torch.tensor([0.4])
    truth = shifted_exact(theta)[0]
    assert found.given == ("theta",)
    assert bool(((found.log_evidence - truth).abs() < 4.5 * found.standard_error).all())
    assert torch.allclose(found.shared, dist.Normal(0.0, 1.0).log_prob(theta))


def test_latents_of_each_datum_are_weighed_with_it():
    guide = fitted(noisy, num_states=1, num_steps=1, guide=draws_w)
    found = log_evidence(noisy, guide, num_particles=60)
    parts = [
        math.log(p) + dist.Normal(z, math.sqrt(2.0)).log_prob(X[:, 0])
        for p, z in ((0.3, 2.0), (0.7, 0.0))
    ]
    truth = torch.logaddexp(*parts)
    assert bool(((found.log_evidence - truth).abs() < 4.5 * found.standard_error).all())
    assert found.plates == ("data",)


def test_data_without_discrete_latents_are_weighed_with_all():
    """What the states' own guide draws in other plates is shared by all states."""
    y = torch.tensor([0.5, -1.0])

    def model(x=X[:, 0]):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Bernoulli(0.3))
            pyro.sample("x", dist.Normal(2 * z, 1.0), obs=x)
        with pyro.plate("others", 2):
            v = pyro.sample("v", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(v, 1.0), obs=y)

    def other(x=X[:, 0]):
        with pyro.plate("others", 2):
            pyro.sample("v", dist.Normal(y / 2, math.sqrt(0.5)))

    found = log_evidence(model, TruncatedPosterior(model, 2, guide=other), num_particles=3)
    truth = shifted_exact(torch.zeros(1)).sum() + dist.Normal(0.0, math.sqrt(2.0)).log_prob(y).sum()
    assert torch.allclose(found.total, truth)


def test_batches_lie_side_by_side():
    def model(x, index):
        with pyro.plate("data", 4, subsample=index):
            z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(5)).to_event(1))
            pyro.sample("x", dist.Normal(z @ LOADING, 1.0).to_event(1), obs=x)

    guide = TruncatedPosterior(model, num_states=32)
    batches = [(X[i], i) for i in torch.arange(4).split(3)]
    found = log_evidence_loader(model, guide, batches, num_particles=20, progress=False)
    assert torch.allclose(found.log_evidence, exact(binary))


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
    found = compare(
        model, guide, X, losses=losses, optim=adam, num_steps=3, num_checks=1, num_particles=50
    )
    for copy in found.values():
        assert not copy.failed
        assert len(copy.bounds) == 3
        assert float(copy.evidence.mean) >= float(copy.evidence.bound.mean())


def test_what_moves_draws_refuses_states():
    with pytest.raises(ValueError, match="here they would be moved: judge it by log_evidence"):
        low_dimensional_evidence(binary, fitted(binary))
    with pytest.raises(ValueError, match="no chain moves them: leave out schedule and kernel"):
        refine(binary, fitted(binary), schedule=3)
    with pytest.raises(ValueError, match="no chain moves them: leave out schedule and kernel"):
        sandwich(binary, fitted(binary), X, schedule=3)


def test_states_inside_of_another_guide_are_refused():
    inner = fitted(binary)

    def guide(x=X):
        inner(x)

    with pytest.raises(ValueError, match="site 'z' is drawn from a TruncatedPosterior inside of"):
        log_evidence(binary, guide, X)


JUDGES = {
    "log_evidence": log_evidence,
    "report": report,
    "refine": refine,
    "sandwich": sandwich,
}


@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES)
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
    found = log_evidence(model, near, X[:, 0], num_particles=2000)
    truth = dist.MultivariateNormal(torch.zeros(4), torch.eye(4) + 1.0).log_prob(X[:, 0])
    assert abs(found.total - truth) < 4 * found.total_standard_error + 1e-6
