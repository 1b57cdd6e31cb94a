"""Slots of countable supports against scipy's distributions."""

import math

import pyro.distributions as dist
import pytest
import scipy.stats
import torch

from pyro_mcvae.ops.slots import SlotCount, count_slots, count_window
from pyro_mcvae.programs.supports import count_law

LAWS = {
    "poisson-small": (lambda: dist.Poisson(torch.tensor(0.3)), scipy.stats.poisson(0.3)),
    "poisson": (lambda: dist.Poisson(torch.tensor(7.4)), scipy.stats.poisson(7.4)),
    "poisson-large": (lambda: dist.Poisson(torch.tensor(900.0)), scipy.stats.poisson(900.0)),
    "geometric": (lambda: dist.Geometric(torch.tensor(0.2)), scipy.stats.geom(0.2, loc=-1)),
}


@pytest.fixture(params=LAWS)
def pair(request):
    make, exact = LAWS[request.param]
    return make(), exact


def parameters(fn):
    return {name: getattr(fn, name) for name in ("rate", "probs") if name in vars(fn)}


def test_distribution_functions(pair):
    fn, exact = pair
    law = count_law(fn)
    counts = torch.cat([torch.arange(-1.0, 40), torch.arange(40.0, 1200, 97)])
    torch.testing.assert_close(law.cdf(counts), torch.as_tensor(exact.cdf(counts)))
    torch.testing.assert_close(
        law.tail(counts), torch.as_tensor(exact.sf(counts)), rtol=1e-6, atol=1e-300
    )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_window_holds_the_most_probable_counts(pair, size):
    fn, exact = pair
    counts, prob = count_window(count_law(fn), size)
    best = torch.as_tensor(exact.pmf(range(1500))).sort(descending=True).values[:size]
    torch.testing.assert_close(prob, best)
    torch.testing.assert_close(torch.as_tensor(exact.pmf(counts)), best)


@pytest.mark.parametrize("options", [(2, 1), (0, 3), (3, 3, 1)])
def test_the_mean_of_the_estimate_is_the_expectation(pair, options):
    fn, exact = pair
    many = type(fn)(**{k: v.expand(1_500) for k, v in parameters(fn).items()})
    value, weight, sampled = count_slots(count_law(many), SlotCount(*options))
    torch.testing.assert_close(weight.sum(0), torch.ones(1_500), rtol=1e-9, atol=0)
    summed = value[:, 0][~sampled[:, 0]]
    assert not torch.isin(value[sampled & (weight > 0)], summed).any()
    for f in (lambda v: v, lambda v: (0.7 * v).sin()):
        result = (weight * f(value)).sum(0)
        counts = torch.arange(3000.0)
        truth = (torch.as_tensor(exact.pmf(counts)) * f(counts)).sum()
        assert abs(result.mean() - truth) < 5 * result.std() / 1_500**0.5 + 1e-9


def test_draws_from_the_complement_follow_the_law(pair):
    fn, exact = pair
    many = type(fn)(**{k: v.expand(2_000) for k, v in parameters(fn).items()})
    value, _, _ = count_slots(count_law(many), SlotCount(2, 1))
    window, draws = value[:2, 0], value[2]
    counts = torch.arange(3000.0)
    pmf = torch.as_tensor(exact.pmf(counts)).index_fill(0, window.long(), 0.0)
    pmf = pmf / pmf.sum()
    result = torch.bincount(draws.long(), minlength=3000) / 2_000
    error = (pmf * (1 - pmf) / 2_000).sqrt()
    assert (abs(result - pmf) < 5 * error + 2 / 2_000).all()


def test_single_precision():
    law = count_law(dist.Poisson(torch.tensor([0.01, 3.0, 500.0], dtype=torch.float32)))
    value, weight, _ = count_slots(law, SlotCount(2, 2))
    assert value.dtype == weight.dtype == torch.float32
    assert value.isfinite().all()
    assert math.isclose(float(weight.sum(0)[1]), 1.0, rel_tol=1e-5)
