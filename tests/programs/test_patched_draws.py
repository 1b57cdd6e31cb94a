"""Draws have the density that they are weighed by, and the gradient of its means."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import TraceIWAE_ELBO
from pyro_mcvae.programs.distributions import patched
from pyro_mcvae.programs.messengers import Minibatch, Recorder, Substitutes
from tests.estimates import assert_mean

MADE = {
    "masked": lambda a: dist.LKJCholesky(3, torch.tensor(a)).mask(True),
    "event": lambda a: dist.LKJCholesky(3, torch.tensor([a, a])).to_event(1),
    "expanded": lambda a: dist.LKJCholesky(3, torch.tensor(a)).expand([2]).to_event(1),
    "correlations": lambda a: dist.LKJ(5, torch.tensor(a)),
}


@pytest.mark.parametrize("name", MADE)
def test_mean_weights_are_one_inside_of_wrappers(name):
    """See test_every_distribution.py for what is not wrapped."""
    p, q = MADE[name](1.0), MADE[name](1.5)
    pyro.set_rng_seed(0)
    x = patched(q).sample((10_000,))
    assert_mean((p.log_prob(x) - q.log_prob(x)).exp(), 1.0)


def test_guides_draw_so():
    def model():
        pyro.sample("c", dist.LKJCholesky(3, torch.tensor(1.0)))

    def guide():
        pyro.sample("c", dist.LKJCholesky(3, torch.tensor(1.5)))

    pyro.set_rng_seed(0)
    elbo = TraceIWAE_ELBO(100)
    weights = torch.tensor([-elbo.loss(model, guide) for _ in range(20)]).exp()
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


def test_two_angles_are_refused():
    fn = dist.SineBivariateVonMises(0.3, -0.2, torch.tensor(1.2), torch.tensor(0.9), 0.5)
    with pytest.raises(ValueError, match="draws of Pyro's SineBivariateVonMises do not match"):
        patched(fn)


WRAPPED = {
    "plain": lambda fn: fn.expand([5]),
    "event": lambda fn: fn.expand([5, 1]).to_event(1),
    "masked": lambda fn: fn.expand([5]).mask(torch.tensor(True)),
    "moved": lambda fn: dist.TransformedDistribution(
        fn.expand([5]), [dist.transforms.AffineTransform(0.0, 1.0)]
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("shared", [False, True])
def test_mixtures_have_the_gradient_of_the_score_function(name, shared):
    kind = dist.MixtureOfDiagNormalsSharedCovariance if shared else dist.MixtureOfDiagNormals
    fn = WRAPPED[name](
        kind(torch.randn(3, 2), torch.ones([2] if shared else [3, 2]), torch.ones(3))
    )
    assert fn.has_rsample
    assert not patched(fn).has_rsample


def test_what_is_right_stays_as_it_is():
    for fn in (dist.Normal(0.0, 1.0), dist.LKJCholesky(2), dist.Beta(1.0, 1.0).expand([3])):
        assert patched(fn) is fn
