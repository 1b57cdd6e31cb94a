"""The verdict on a guide: its numbers, its advice, its figure."""

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import Report, report
from tests.models import (
    ConjugateGaussian,
    DiscreteMixture,
    HierarchicalGaussian,
    NestedGaussian,
)


@pytest.mark.parametrize("options", [{}, {"schedule": 4}])
def test_numbers_are_those_of_the_exact_model(options):
    exact = ConjugateGaussian(N=20)
    found = report(exact.model, exact.guide, num_particles=3000, **options)
    error = found.evidence.standard_error
    difference = found.evidence.log_evidence - exact.log_evidence_per_datum()
    assert bool((difference.abs() < 4 * error).all())
    kl = exact.log_evidence_per_datum() - exact.elbo_per_datum()
    assert torch.allclose(found.gap, kl, atol=0.2)
    assert (found.evidence is found.guide) == (not options)


def test_the_worst_served_data_are_found():
    exact = NestedGaussian()
    index, gaps = zip(*report(exact.model, exact.guide).worst(3), strict=True)
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

    assert report(model, guide).worst(1)[0][0] == (1, 2)


def advice(exact, **options):
    return report(exact.model, exact.guide, num_particles=2000, **options).advice


def test_advice():
    exact = ConjugateGaussian(N=20)
    exact.set_guide("exact")
    assert "tight enough" in advice(exact)
    exact.set_guide("exact", log_s=0.5)
    assert "TraceIWAE_ELBO" in advice(exact)
    exact.set_guide("exact", log_s=-2.5)
    assert "TraceSIS_ELBO" in advice(exact)
    assert "pass schedule=10" in advice(exact)
    assert "pass schedule=10" not in advice(exact, schedule=3)
    assert "TraceRaoBlackwell_ELBO" in advice(DiscreteMixture())


@pytest.mark.parametrize("cls", [ConjugateGaussian, HierarchicalGaussian, DiscreteMixture])
def test_it_prints_and_plots(cls, tmp_path):
    pytest.importorskip("matplotlib")
    exact = cls()
    found = report(exact.model, exact.guide, num_particles=200)
    text = str(found)
    for part in ("ELBO", "log evidence", "gap", "Pareto k", "effective sample size"):
        assert part in text
    assert ("largest gaps" in text) == (found.gap.numel() > 1)
    figure = found.plot()
    assert len(figure.axes) == 3
    figure.savefig(tmp_path / "report.png")


def test_chains_look_at_the_same_minibatch():
    exact = ConjugateGaussian(subsample_size=5)
    found = report(exact.model, exact.guide, num_particles=4000, schedule=5)
    difference = found.evidence.log_evidence - found.guide.log_evidence
    error = torch.hypot(found.evidence.standard_error, found.guide.standard_error)
    assert bool((difference.abs() < 5 * error).all())


def test_a_tail_may_be_missing():
    exact = ConjugateGaussian(N=5)
    exact.set_guide("exact")
    found = report(exact.model, exact.guide)
    assert "-inf" in str(found)
    assert float(found.guide.pareto_k.max()) == -math.inf
    found.plot()


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


@pytest.mark.parametrize("options", [{}, {"schedule": 2, "num_particles": 30}])
def test_a_mode_that_is_never_drawn_shows_in_no_number(options):
    model, guide, exact = two_modes()
    found = report(model, guide, **options)
    assert torch.allclose(exact - found.evidence.log_evidence, torch.tensor(math.log(2.0)))
    assert float(found.guide.pareto_k.max()) == -math.inf
    assert not bool(found.missed.any())
    assert "a mode of the posterior where the guide draws nothing shows in neither" in str(found)


def test_what_chains_find_more_is_said():
    """By numbers: of three data one is larger by far, one within the error, one has a bad tail."""
    model, guide, _ = two_modes()
    plain = report(model, guide, num_particles=30).guide
    plain = replace(plain, pareto_k=torch.tensor([0.2, 0.2, 0.9]))
    more = torch.tensor([0.7, 0.05, 0.7])
    error = torch.full((3,), 0.02)
    chains = replace(plain, log_evidence=plain.log_evidence + more, standard_error=error)
    found = Report(chains, plain, ())
    assert found.missed.tolist() == [True, False, False]
    assert "for 1 of 3, where Pareto k is good: the guide misses a part" in found.advice
    assert not bool(Report(plain, plain, ()).missed.any())


def test_labels_say_what_is_the_guides_and_what_the_chains():
    exact = ConjugateGaussian(N=5)
    alone = str(report(exact.model, exact.guide, num_particles=50))
    assert "guide: log evidence" in alone
    assert "chains: " not in alone
    both = report(exact.model, exact.guide, num_particles=50, schedule=2)
    text = str(both)
    assert f"guide: log evidence                 {float(both.guide.mean):.3f}" in text
    assert f"chains: log evidence                {float(both.evidence.mean):.3f}" in text
    assert "gap: log evidence by chains - ELBO" in text
