"""The verdict on a guide: its numbers, its advice, its figure."""

import math
import re
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_mcvae import HMC, log_evidence, refine, report
from pyro_mcvae.evaluation.evidence import LogEvidence
from pyro_mcvae.evaluation.report import Report
from pyro_mcvae.ops.weights import pareto_k
from tests.models import (
    ConjugateGaussian,
    DiscreteMixture,
    HierarchicalGaussian,
    NestedGaussian,
)


@pytest.mark.parametrize("options", [{}, {"schedule": 4}])
def test_numbers_are_those_of_the_exact_model(options):
    exact = ConjugateGaussian(N=20)
    result = report(exact.model, exact.guide, num_particles=1000, check_modes=False, **options)
    error = result.evidence.standard_error
    difference = result.evidence.log_evidence - exact.log_evidence_per_datum()
    assert bool((difference.abs() < 4 * error).all())
    assert result.trusted
    kl = exact.log_evidence_per_datum() - exact.elbo_per_datum()
    assert torch.allclose(result.gap, kl, atol=0.2)
    assert (result.evidence is result.guide) == (not options)


def test_the_worst_served_data_are_found():
    exact = NestedGaussian()
    result = report(exact.model, exact.guide, check_modes=False, run_chains=False)
    index, gaps = zip(*result.worst(3), strict=True)
    assert list(gaps) == sorted(gaps, reverse=True)
    assert all(len(i) == 1 and 0 <= i[0] < 4 for i in index)

    x = torch.zeros(3, 4)
    x[1, 2] = 6.0

    def model():
        with pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 4, dim=-1):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide():
        with pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 4, dim=-1):
            pyro.sample("z", dist.Normal(0.0, torch.ones(3, 4)))

    assert report(model, guide, check_modes=False, run_chains=False).worst(1)[0][0] == (1, 2)


def advice(exact, **options):
    options = {"num_particles": 2000, "check_modes": False, "run_chains": False, **options}
    return report(exact.model, exact.guide, **options).advice


def test_advice():
    exact = ConjugateGaussian(N=20)
    exact.set_guide("exact")
    assert "tight enough" in advice(exact)
    exact.set_guide("exact", log_s=0.5)
    assert "TraceIWAE_ELBO" in advice(exact)
    exact.set_guide("exact", log_s=-2.5)
    assert "TraceSIS_ELBO" in advice(exact)
    assert "TraceRaoBlackwell_ELBO" in advice(DiscreteMixture())


@pytest.mark.parametrize("cls", [ConjugateGaussian, HierarchicalGaussian])
def test_it_prints(cls):
    exact = cls()
    result = report(
        exact.model, exact.guide, num_particles=200, check_modes=False, run_chains=False
    )
    text = str(result)
    for part in ("ELBO", "log evidence", "gap", "Pareto k", "ESS"):
        assert part in text
    assert ("largest gaps" in text) == (result.gap.numel() > 1)


@pytest.mark.slow
def test_chains_look_at_the_same_minibatch():
    exact = ConjugateGaussian(subsample_size=5)
    result = report(exact.model, exact.guide, num_particles=4000, schedule=5, check_modes=False)
    difference = result.evidence.log_evidence - result.guide.log_evidence
    error = torch.hypot(result.evidence.standard_error, result.guide.standard_error)
    assert bool((difference.abs() < 5 * error).all())


@pytest.mark.parametrize(("size", "where"), [(5, "(data, one minibatch)"), (None, "(data)")])
def test_it_says_that_its_weights_are_those_of_one_minibatch(size, where):
    exact = ConjugateGaussian(subsample_size=size)
    result = report(exact.model, exact.guide, check_modes=False, run_chains=False)
    assert where in str(result).splitlines()[0]
    assert f"in {where[1:-1]}; " in str(result.guide)


def test_a_tail_may_be_missing():
    exact = ConjugateGaussian(N=5)
    exact.set_guide("exact")
    result = report(exact.model, exact.guide, check_modes=False)
    assert "-inf" in str(result)
    assert float(result.guide.pareto_k.max()) == -math.inf


def two_modes():
    """The posterior of a magnitude: two modes of the same weight, far from each other."""
    x = torch.full((3,), 3.0)

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z.abs(), 0.5), obs=x)

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(0.8 * x, math.sqrt(0.2)))

    return model, guide, dist.Normal(0.0, math.sqrt(1.25)).log_prob(x) + math.log(2)


@pytest.mark.parametrize("options", [{}, {"schedule": 2, "num_particles": 60}])
def test_a_mode_that_is_never_drawn_is_found_from_the_prior(options):
    model, guide, exact = two_modes()
    blind = report(model, guide, check_modes=False, **options)
    assert torch.allclose(exact - blind.evidence.log_evidence, torch.tensor(math.log(2.0)))
    assert float(blind.guide.pareto_k.max()) == -math.inf
    assert not blind.misses
    assert "Modes that the guide misses would not be detected" in str(blind)
    result = report(model, guide, **options)
    error = result.prior.total_standard_error
    assert abs(result.prior.total - exact.sum()) < 4 * error
    assert result.misses
    assert not result.trusted
    assert "The guide misses a part" in str(result)
    assert "train from other initial values" in result.advice


def test_a_discrete_value_that_is_never_drawn_is_found_from_the_prior():
    x = torch.full((4,), 2.0)

    def model():
        with pyro.plate("data", 4):
            k = pyro.sample("k", dist.Categorical(torch.ones(3)))
            pyro.sample("x", dist.Normal(torch.tensor([1.1, 0.0, 1.0])[k], 0.5), obs=x)

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("k", dist.Categorical(torch.tensor([1e-12, 0.02, 1.0]).expand(4, 3)))

    result = report(model, guide)
    assert result.misses
    assert bool(result.missed.all())
    assert not report(model, guide, check_modes=False).misses


@pytest.mark.parametrize("cls", [ConjugateGaussian, DiscreteMixture])
def test_the_look_finds_no_more_than_there_is(cls):
    exact = cls(N=5)
    exact.set_guide("exact")
    result = report(exact.model, exact.guide)
    assert not result.misses
    assert result.prior.total < exact.log_evidence() + 4 * result.prior.total_standard_error


def test_the_look_costs_what_it_says():
    """Runs of the model: four warm-ups and the chains, of 20 gradients each, and their records."""
    exact, calls = ConjugateGaussian(N=5), []

    def model():
        calls.append(1)
        return exact.model()

    report(model, exact.guide, check_modes=False, vectorize_particles=True)
    plain = len(calls)
    report(model, exact.guide, vectorize_particles=True)
    assert len(calls) - 2 * plain < 150


def test_what_cannot_be_looked_at_is_said():
    exact = HierarchicalGaussian(N=5)
    held = report(exact.model, exact.guide, joint=False)
    assert "theta are fixed" in held.prior
    assert "no chains from the prior: see prior" in str(held)
    looped = report(exact.model, exact.guide, vectorize_particles=False, num_particles=30)
    assert "check_modes=True" in looped.prior
    assert looped.no_chains == "particles run one by one: run_chains=True runs them"
    with pytest.raises(ValueError, match="check_modes must be True, False or None, got 'no'"):
        report(exact.model, exact.guide, check_modes="no")
    with pytest.raises(ValueError, match="run_chains must be True, False or None, got 'no'"):
        report(exact.model, exact.guide, run_chains="no")


def test_what_chains_find_more_is_said():
    """By numbers: of three data one is larger by far, one within the error, one has a bad tail."""
    model, guide, _ = two_modes()
    plain = report(model, guide, num_particles=30, check_modes=False).guide
    plain = replace(plain, pareto_k=torch.tensor([0.2, 0.2, 0.9]), num_particles=1000)
    more = torch.tensor([0.7, 0.05, 0.7])
    error = torch.full((3,), 0.02)
    chains = replace(plain, log_evidence=plain.log_evidence + more, standard_error=error)
    result = Report(chains, plain, ())
    assert result.missed.tolist() == [True, False, False]
    assert result.misses
    assert "The guide misses a part" in str(result)
    assert not bool(Report(plain, plain, ()).missed.any())


@pytest.mark.slow
def test_rows_say_what_is_the_guides_and_what_the_chains():
    exact = ConjugateGaussian(N=5)
    alone = str(report(exact.model, exact.guide, num_particles=50, run_chains=False))
    assert "steps " not in alone
    assert re.search("^prior +50 ", alone, re.M)
    both = report(exact.model, exact.guide, num_particles=50, schedule=2, check_modes=False)
    text = str(both)
    rows = {"guide": both.guide.mean, "guide, 2 steps": both.evidence.mean}
    for name, value in rows.items():
        assert re.search(rf"^{name} +50 +{float(value):.2f}", text, re.M), name
    assert f"gap {float(both.gap.mean()):.3f}" in text


def test_k_hat_knows_its_own_error():
    """Weights with Pareto tails: the spread of k-hat over many samples is what is said."""
    exact = ConjugateGaussian(N=5)
    plain = report(exact.model, exact.guide, check_modes=False, run_chains=False).guide
    for shape in (0.2, 0.7):
        k = pareto_k(torch.empty(1000, 400).exponential_() * shape)
        said = replace(plain, pareto_k=k).pareto_k_error.median()
        assert 0.6 < float(k.std() / said) < 1.2


def test_what_is_doubtful():
    exact = ConjugateGaussian(N=5)
    plain = report(exact.model, exact.guide, check_modes=False, run_chains=False).guide
    k = torch.tensor([-math.inf, -0.5, 0.2, 0.3, 0.6, math.inf, math.nan])
    doubtful = replace(plain, pareto_k=k, num_particles=1000).doubtful
    assert doubtful.tolist() == [False, False, False, True, True, True, True]
    # The same tail, and more draws to know it by.
    assert not bool(replace(plain, pareto_k=k, num_particles=10_000).doubtful[3])
    few = replace(plain, pareto_k=k, num_particles=100)
    assert few.doubtful.tolist() == [False] + [True] * 6


@pytest.mark.slow
def test_chains_look_where_the_weights_leave_doubt():
    exact = ConjugateGaussian(N=5)
    exact.set_guide("exact", log_s=-1.2)
    blind = report(exact.model, exact.guide, check_modes=False, run_chains=False, seed=0)
    result = report(exact.model, exact.guide, check_modes=False, seed=0)
    assert torch.equal(blind.evidence.log_evidence, result.guide.log_evidence)
    assert not blind.trusted
    assert "The evidence is a lower bound" in str(blind)
    assert blind.no_chains == "run_chains=False"
    assert result.evidence is result.chains
    off, less = (
        (f.evidence.log_evidence - exact.log_evidence_per_datum()).abs().max()
        for f in (blind, result)
    )
    assert less < 0.1 < off
    assert "The evidence and its error can be trusted." in str(result)
    exact.set_guide("exact", log_s=0.0)
    assert report(exact.model, exact.guide, check_modes=False).chains is None


def test_chains_that_cannot_look_are_said():
    x = torch.full((4,), 2.0)

    def model():
        with pyro.plate("data", 4):
            k = pyro.sample("k", dist.Categorical(torch.ones(3)))
            pyro.sample("x", dist.Normal(k - 1.0, 0.5), obs=x)

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("k", dist.Categorical(torch.tensor([0.6, 0.3, 0.1]).expand(4, 3)))

    result = report(model, guide, num_particles=100, check_modes=False)
    assert result.chains is None
    assert "the guide's site 'k' is discrete" in result.no_chains


def test_training_that_cannot_continue_is_not_called_converged():
    exact = ConjugateGaussian(N=1)

    def guide():
        if torch.is_grad_enabled():
            raise RuntimeError("it is only evaluated")
        exact.guide()

    options = {"num_particles": 200, "check_modes": False, "run_chains": False, "seed": 0}
    result = report(exact.model, guide, check_training=True, **options)
    assert result.rise.why
    assert not result.converged
    assert "training may not have converged" in " ".join(str(result).split())


# The next call for a gap of one weight or of many.
@pytest.mark.parametrize(
    ("gap", "n", "call"),
    [
        (12.0, 1, "draws = refine(model, guide, *args)"),
        (106.4, 1, "draws = refine(model, guide, *args)"),
        (5.7, 20, "TraceIWAE_ELBO(num_particles=10)"),
        (22.3, 20, "TraceSIS_ELBO(10, num_particles=8, multi_sample=True)"),
    ],
)
def test_the_advice_is_a_call(gap, n, call):
    bound = torch.full((n,), -50.0 - gap)
    assert call in by_numbers(1.2, 50.0, n=n, bound=bound).advice


def by_numbers(k, size, steps=0, n=1, whitened=False, **changes):
    """A report of one weight (or ``n``) with this k-hat and effective sample size."""
    one = LogEvidence(
        log_evidence=torch.full((n,), -50.0),
        standard_error=torch.full((n,), 0.1),
        effective_sample_size=torch.full((n,), size),
        pareto_k=torch.full((n,), k),
        bound=torch.full((n,), -51.0),
        num_particles=1000,
        plates=(),
        scale=1.0,
        shared=torch.zeros(()),
        fixed_latents=(),
    )
    one = replace(one, **changes)
    chains = replace(one, acceptance=torch.ones(steps - 1), whitened=whitened) if steps else None
    return Report(chains or one, one, (), "check_modes=False", chains)


def test_no_trust_in_heavy_tails_or_a_few_draws():
    """White chains are trusted up to a k-hat of 0.7, others only if it is certainly below 0.5."""
    assert by_numbers(0.2, 500.0).trusted
    assert not by_numbers(0.6, 50.0, 40).trusted
    assert by_numbers(0.6, 50.0, 40, whitened=True).trusted
    for k, size in ((0.92, 50.0), (0.3, 5.0), (0.92, 5.0)):
        result = by_numbers(k, size, 40, whitened=True)
        assert not result.trusted
        assert "The evidence is a lower bound" in str(result)
        assert "± unknown" in str(result)
        assert "± unknown" in str(result.evidence)


@pytest.mark.parametrize(
    ("k", "more", "trusted"), [(0.45, 0.5, False), (0.45, 0.2, True), (0.2, 0.5, True)]
)
def test_chains_from_the_prior_may_contradict_evidence_whose_tail_may_be_heavy(k, more, trusted):
    result = by_numbers(k, 500.0, 40, whitened=True)
    prior = replace(
        result.guide, log_evidence=torch.tensor([-50.0 + more]), pareto_k=torch.zeros(1)
    )
    prior = replace(prior, standard_error=torch.full((1,), 0.2))
    result = replace(result, prior=prior, guide=replace(result.guide, pareto_k=torch.ones(1)))
    assert result.trusted == trusted


@pytest.mark.parametrize(
    ("k", "size", "suffice"), [(0.2, 500.0, True), (0.6, 500.0, False), (0.2, 100.0, False)]
)
def test_draws_have_a_verdict_of_their_own(k, size, suffice):
    result = by_numbers(k, size)
    assert result.reweights == suffice
    assert not result.close
    text = str(result)
    assert ("The draws of refine can be used: weights suffice." in text) == suffice
    assert ("The draws of refine need chains: see draws.verdict." in text) != suffice
    assert "The guide cannot be used instead of the posterior." in text


@pytest.mark.slow
def test_training_that_has_not_converged_is_detected_on_a_copy():
    y = torch.linspace(5.0, 6.0, 50)

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 10.0))
        pyro.sample("y", dist.Normal(z, 1.0).expand([50]).to_event(1), obs=y)

    guide = AutoNormal(model)
    guide()
    options = {"check_modes": False, "run_chains": False, "num_particles": 200, "seed": 0}
    before = {n: v.clone() for n, v in pyro.get_param_store().items()}
    state, result = torch.get_rng_state(), report(model, guide, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[n]) for n, v in pyro.get_param_store().items())
    assert not result.converged
    assert "training has not converged: the bound rises by" in str(result)
    assert "laplace_init" in result.advice
    assert report(model, guide, check_training=False, **options).converged
    with torch.no_grad():  # the posterior
        precision = 50 + 0.01
        guide.locs.z.copy_(y.sum() / precision)
    guide.scales.z = torch.tensor(precision**-0.5)
    result = report(model, guide, **options)
    assert result.converged
    assert abs(result.rise.nats) < 0.1


def test_a_few_of_many_data_above_by_chance_are_no_missed_mode():
    """Errors of a few effective draws have tails: 2 of 297 were called a missed mode."""
    false, n = 0, 297
    for _ in range(40):
        result = by_numbers(0.2, 500.0, n=n)
        noise = torch.distributions.StudentT(5.0).sample((n,)) * 0.1
        prior = replace(
            result.guide,
            log_evidence=result.guide.log_evidence + noise,
            standard_error=torch.full((n,), 0.1),
            effective_sample_size=torch.full((n,), 6.0),
        )
        guide = replace(result.guide, standard_error=torch.full((n,), 0.01))
        false += replace(result, evidence=guide, guide=guide, prior=prior).misses
    assert false <= 3
    more = torch.zeros(n)
    more[7] = 3.0
    prior = replace(prior, log_evidence=guide.log_evidence + more)
    assert replace(result, evidence=guide, guide=guide, prior=prior).missed.nonzero().tolist() == [
        [7]
    ]


def test_numbers_come_first_then_five_sentences_within_the_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    exact = ConjugateGaussian(N=5)
    exact.set_guide("exact", log_s=-2.0)
    lines = str(report(exact.model, exact.guide, num_particles=50, run_chains=False)).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("The guide"))
    sentences = " ".join(lines[first:])
    assert len([s for s in sentences.split(". ") if s]) <= 5
    assert all(len(line) <= 80 for line in lines)


def test_messages_of_errors_stand_in_no_sentence():
    exact = ConjugateGaussian(N=5)
    result = report(exact.model, exact.guide, num_particles=20, check_modes=False, run_chains=False)
    shape = "The size of tensor a (3) must match the size of tensor b (5)"
    text = str(replace(result, prior=shape, no_chains=shape))
    assert "size of tensor" not in text
    assert "see prior" in text


@pytest.mark.parametrize("subsample", [torch.rand(12), None])
def test_floats_in_subsample_are_no_minibatch(subsample):
    """TyXe gives a plate its predictions as subsample=, of which only the number counts."""
    x = torch.linspace(-1.0, 1.0, 12)

    def model():
        w = pyro.sample("w", dist.Normal(0.0, 3.0))
        with pyro.plate("data", 12, subsample=None if subsample is None else subsample * w):
            pyro.sample("x", dist.Normal(w * x, 0.5), obs=2 * x)

    def guide():
        precision = 1 / 9 + 4 * x.square().sum()
        pyro.sample("w", dist.Normal(8 * x.square().sum() / precision, precision**-0.5))

    result = report(model, guide, num_particles=200)
    exact = dist.MultivariateNormal(
        torch.zeros(12), 9 * torch.outer(x, x) + 0.25 * torch.eye(12)
    ).log_prob(2 * x)
    assert float(result.evidence.total) == pytest.approx(float(exact))
    assert isinstance(result.prior, LogEvidence)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_no_search_is_claimed_where_chains_from_the_prior_were_not_compared(size):
    """The guide draws one of two modes; few chains from the prior reach them."""
    x = torch.linspace(1.0, 3.0, size)

    def model():
        with pyro.plate("data", size):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z.square(), 0.1), obs=x)

    def guide():
        with pyro.plate("data", size):
            pyro.sample("z", dist.Normal(x.sqrt(), 0.055 / x.sqrt()))

    for seed in range(2):
        result = report(model, guide, seed=seed)
        assert "find no modes" not in str(result)
        assert result.misses or "if no mode is missed" in str(result).replace("\n", " ")


@pytest.mark.slow
def test_chains_from_the_prior_that_find_more_are_the_evidence():
    """Centered eight schools: chains from a fitted guide stay where its scale is."""
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    sd = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", 8):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, sd), obs=y)

    def guide():
        pyro.sample("mu", dist.Normal(0.8, 0.5))
        pyro.sample("tau", dist.LogNormal(-1.0, 0.3))
        with pyro.plate("schools", 8):
            pyro.sample("theta", dist.Normal(1.0, 0.3))

    result = report(model, guide)
    assert result.evidence is result.prior
    assert result.misses
    assert not result.trusted
    # By quadrature over mu and tau, with theta integrated out.
    assert float(result.evidence.total) == pytest.approx(-31.312, abs=0.3)
    assert "draws = refine(model, *args)" in result.advice


def test_unreliable_evidence_is_logged(caplog):
    x = torch.tensor(5.0)

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(loc, scale):
        pyro.sample("z", dist.Normal(loc, scale))

    for loc, scale, bad in ((2.5, 0.75, False), (0.0, 0.2, True)):
        caplog.clear()
        result = log_evidence(model, lambda loc=loc, scale=scale: guide(loc, scale))
        assert ("too low by an unknown amount" in caplog.text) == bad
        assert ("± unknown" in str(result)) == bad


def test_unreliable_chains_are_named_also_for_one_candidate():
    """The draws are those of the chains; their weights show what these miss."""

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 0.05), obs=torch.tensor(4.0))

    def guide():
        pyro.sample("z", dist.Normal(0.0, 0.3))

    with pytest.warns(UserWarning, match="Leave out all options but num_samples"):
        refine(model, guide, num_samples=100, num_particles=1, schedule=2, kernel=HMC(0.01))


@pytest.mark.slow
def test_a_k_hat_that_is_good_by_chance_is_no_missed_mode():
    # The posterior is N(x / 2, 1 / 2), so this guide covers it, with heavy tails for every datum.
    torch.manual_seed(0)
    x = 2**0.5 * torch.randn(200, 4)

    def model():
        with pyro.plate("data", 200):
            z = pyro.sample("z", dist.Normal(torch.zeros(4), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=x)

    def guide():
        with pyro.plate("data", 200):
            pyro.sample("z", dist.Normal(x / 2 + 0.3, 0.6).to_event(1))

    options = {"schedule": 5, "num_particles": 300, "check_modes": False}
    results = [report(model, guide, seed=seed, **options) for seed in range(1)]
    assert all(0.4 < r.guide.pareto_k.median() < 0.6 for r in results)
    assert not any(r.misses for r in results)


def test_the_plot_has_the_numbers_of_the_report():
    pytest.importorskip("matplotlib").use("agg")
    exact = ConjugateGaussian(N=6)
    result = report(exact.model, exact.guide, num_particles=600, seed=0)
    left, right = result.plot()
    labels = [text.get_text() for text in left.get_yticklabels()]
    assert labels[:2] == ["ELBO", "weights of the guide"]
    bars = [container.lines[0].get_xdata()[0] for container in left.containers]
    assert bars[:2] == pytest.approx([float(result.bound.mean()), float(result.guide.mean)])
    points = torch.cat([torch.as_tensor(c.get_offsets().data) for c in right.collections])
    assert points[:, 1].sort().values.tolist() == pytest.approx(result.gap.sort().values.tolist())
    assert result.plot((left, right)) == (left, right)
