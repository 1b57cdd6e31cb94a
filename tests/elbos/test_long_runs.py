"""The exactness of gradients again, with enough draws to see a small bias."""

import pytest
import torch

from pyro_mcvae import TraceIWAE_ELBO, TraceSGVB_ELBO
from tests.estimates import assert_gradient, assert_mean, values
from tests.models import (
    BetaBernoulli,
    ConjugateGaussian,
    DiscreteMixture,
    GammaPoisson,
    HierarchicalGaussian,
    LinearGaussianChain,
)

pytestmark = pytest.mark.slow


def mixture(subsample_size=None):
    exact = DiscreteMixture(N=3, C=3, subsample_size=subsample_size)
    logits = torch.tensor([[0.5, 0.0, -0.5], [0.0, 0.3, 0.0], [-0.4, 0.2, 0.1]])
    exact.set_guide(guide_logits=logits)
    return exact


@pytest.mark.parametrize("estimator", ["reparam", "dreg", "vimco"])
@pytest.mark.parametrize("num_particles", [2, 3])
@pytest.mark.parametrize("size", [None, 2])
def test_gaussian_guide(estimator, num_particles, size):
    exact = ConjugateGaussian(N=4, subsample_size=size)
    elbo = TraceIWAE_ELBO(num_particles, estimator, vectorize_particles=True)
    assert_gradient(elbo, exact, exact.grad(exact.iwae_per_datum, num_particles), 8000)


@pytest.mark.parametrize("num_particles", [2, 3, 4])
@pytest.mark.parametrize("size", [None, 2])
def test_discrete_guide(num_particles, size):
    exact = mixture(size)
    elbo = TraceIWAE_ELBO(num_particles, vectorize_particles=True)
    assert_gradient(elbo, exact, exact.grad(exact.iwae_per_datum, num_particles), 8000)


@pytest.mark.parametrize("vectorize", [False, True])
def test_global_and_discrete_local_latents(vectorize):
    exact = BetaBernoulli(N=4, subsample_size=2)
    elbo = TraceIWAE_ELBO(3, vectorize_particles=vectorize)
    assert_mean(values(elbo, exact, 6000), exact.iwae(3))
    assert_gradient(elbo, exact, exact.grad(exact.iwae, 3), 6000)


@pytest.mark.parametrize("analytic_kl", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        mixture,
        lambda: GammaPoisson(N=4),
        lambda: HierarchicalGaussian(N=6, subsample_size=2),
        lambda: LinearGaussianChain(N=3, T=3),
        lambda: BetaBernoulli(N=4),
    ],
    ids=["mixture", "gamma", "hierarchical", "chain", "beta-bernoulli"],
)
def test_elbo(make, analytic_kl):
    exact = make()
    assert_gradient(TraceSGVB_ELBO(analytic_kl=analytic_kl), exact, exact.grad(exact.elbo), 8000)
