"""Appendix D of Kingma and Welling: the evidence from draws of the posterior."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import ULA, low_dimensional_evidence
from pyro_mcvae.evaluation.low_dimensional import kernel_density
from tests.cases import every
from tests.estimates import assert_mean
from tests.models import ConjugateGaussian, GammaPoisson, HierarchicalGaussian, ProbabilisticPCA


def test_a_kernel_density_integrates_to_one():
    grid = torch.linspace(-12, 12, 4001).double()
    draws = torch.randn(20, 3, 1).double() * torch.tensor([0.1, 1.0, 2.0]).double()[:, None]
    density = kernel_density(draws, grid[:, None, None].expand(-1, 3, 1)).exp()
    assert torch.allclose(torch.trapezoid(density, grid, dim=0), torch.ones(3).double())


def test_a_kernel_density_is_the_mean_of_its_kernels():
    draws, at = torch.randn(6, 4, 2), torch.randn(3, 4, 2)
    width = draws.std(0) * (4 / (4 * 6)) ** (1 / 6)
    kernels = dist.Normal(draws, width).to_event(1)
    expected = kernels.log_prob(at.unsqueeze(1)).exp().mean(1)
    assert torch.allclose(kernel_density(draws, at).exp(), expected)


def test_the_ratio_is_unbiased_for_exact_draws_of_the_posterior():
    """E f(z) / p(x, z) = 1 / p(x), whatever f is."""
    posterior = dist.Normal(0.4, 0.7)
    z = posterior.sample((40_000,))
    log_evidence = -1.3
    log_joint = posterior.log_prob(z) + log_evidence
    ratio = (dist.Normal(0.5, 0.4).log_prob(z) - log_joint).exp()
    assert_mean(ratio, torch.tensor(-log_evidence).exp())


@pytest.mark.parametrize(
    ("make", "coordinates"),
    every(
        2, [(ConjugateGaussian, "noise"), (GammaPoisson, "noise"), (ProbabilisticPCA, "noise")], 1
    ),
)
def test_it_finds_the_evidence(make, coordinates):
    """Of one to two dimensions, also of a positive latent, to a tenth of a nat."""
    exact = make()
    result = low_dimensional_evidence(
        exact.model, exact.guide, num_draws=200, num_transitions=15, coordinates=coordinates
    )
    error = result.log_evidence - exact.log_evidence_per_datum()
    assert result.standard_error.shape == error.shape
    assert error.abs().max() < 0.1
    assert error.abs().mean() < 1.5 * result.standard_error.mean()


@pytest.mark.slow
def test_global_latents_have_one_evidence():
    exact = HierarchicalGaussian(N=2)
    result = low_dimensional_evidence(exact.model, exact.guide, num_draws=200, num_transitions=15)
    assert result.log_evidence.shape == ()
    assert abs(result.log_evidence - exact.log_evidence()) < 4.5 * result.standard_error + 0.02


def program(dims, masked=False):
    def model():
        mask = torch.arange(3) < 2 if masked else torch.ones(3, dtype=torch.bool)
        with pyro.plate("data", 3), pyro.poutine.mask(mask=mask):
            z = pyro.sample("z", dist.Normal(torch.zeros(dims), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=torch.ones(3))

    def guide():
        mask = torch.arange(3) < 2 if masked else torch.ones(3, dtype=torch.bool)
        with pyro.plate("data", 3), pyro.poutine.mask(mask=mask):
            pyro.sample("z", dist.Normal(torch.zeros(dims), 1.0).to_event(1))

    return model, guide


@pytest.mark.parametrize(
    ("programs", "options", "message"),
    [
        (program(6), {}, r"a density of 6 latent dimensions .* at most 5: use"),
        (program(1), {"kernel": ULA()}, "which ULA does not: use HMC"),
        (program(1), {"num_draws": 1}, "num_draws must be an int of at least 2"),
        (program(1, masked=True), {}, "some latents are masked: use log_evidence"),
    ],
)
def test_what_it_cannot_estimate(programs, options, message):
    with pytest.raises(ValueError, match=message):
        low_dimensional_evidence(*programs, **options)
