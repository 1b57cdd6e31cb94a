"""Draws of correlations have the density that they are weighed by."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import TraceIWAE_ELBO
from pyro_mcvae.programs.lkj import with_draws_of_its_density
from pyro_mcvae.programs.messengers import Recorder, Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from tests.estimates import assert_mean

MADE = {
    "plain": lambda a, size: dist.LKJCholesky(size, torch.tensor(a)),
    "masked": lambda a, size: dist.LKJCholesky(size, torch.tensor(a)).mask(True),
    "event": lambda a, size: dist.LKJCholesky(size, torch.tensor([a, a])).to_event(1),
    "expanded": lambda a, size: dist.LKJCholesky(size, torch.tensor(a)).expand([2]).to_event(1),
    "correlations": lambda a, size: dist.LKJ(size, torch.tensor(a)),
}


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", MADE)
def test_mean_weights_are_one(name, size):
    p, q = MADE[name](1.0, size), MADE[name](1.5, size)
    pyro.set_rng_seed(0)
    x = with_draws_of_its_density(q).sample((20_000,))
    assert_mean((p.log_prob(x) - q.log_prob(x)).exp(), 1.0)


def test_guides_draw_so():
    def model():
        pyro.sample("c", dist.LKJCholesky(3, torch.tensor(1.0)))

    def guide():
        pyro.sample("c", dist.LKJCholesky(3, torch.tensor(1.5)))

    pyro.set_rng_seed(0)
    elbo = TraceIWAE_ELBO(100)
    weights = torch.tensor([-elbo.loss(model, guide) for _ in range(50)]).exp()
    assert_mean(weights, 1.0)


def test_priors_draw_so():
    """All correlations of an LKJ distribution are alike: their variance is 1 / (2 a + size - 1)."""

    def model():
        with pyro.plate("draws", 20_000):
            pyro.sample("c", dist.LKJCholesky(4, torch.tensor(1.5)))

    pyro.set_rng_seed(0)
    with Recorder(Substitutes(Minibatch())) as recorder:
        model()
    factor = recorder.trace.nodes["c"]["value"]
    square = (factor @ factor.mT).square()
    for i, j in [(1, 0), (2, 0), (2, 1), (3, 2)]:
        assert_mean(square[:, i, j], 1 / 6)


def test_what_is_right_stays_as_it_is():
    for fn in (dist.Normal(0.0, 1.0), dist.LKJCholesky(2), dist.Beta(1.0, 1.0).expand([3])):
        assert with_draws_of_its_density(fn) is fn
