"""The verdict on a guide: its numbers, its advice, its figure."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import report
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
