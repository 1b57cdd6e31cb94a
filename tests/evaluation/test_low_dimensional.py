"""The evidence from posterior draws and a fitted density: exact models, error bars, refusals."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_mcvae import HMC, ULA, AdaptiveStepSize, RandomWalk, low_dimensional_evidence
from tests.cases import some_slow
from tests.models import (
    ConjugateGaussian,
    DiscreteMixture,
    GammaPoisson,
    HierarchicalGaussian,
    ProbabilisticPCA,
    SequentialPlate,
)

MODELS = {
    "gamma": lambda: GammaPoisson(N=20),
    "2": lambda: ProbabilisticPCA(d=2, N=20, sigma=0.3),
    "3": lambda: ProbabilisticPCA(d=3, N=20, sigma=0.5, family="full"),
    "sequential": lambda: SequentialPlate(N=2),
}


def deviations(found, exact):
    """How many standard errors lie between estimates and exact values."""
    assert found.log_evidence.shape == exact.shape
    return (found.log_evidence - exact) / found.standard_error


@pytest.mark.parametrize("name", some_slow(MODELS, "3"))
def test_exact_models(name):
    exact = MODELS[name]()
    found = low_dimensional_evidence(exact.model, exact.guide)
    off = deviations(found, exact.log_evidence_per_datum())
    # The errors are estimated from ten chains, so that a t distribution tells: its square has the
    # mean 1.3 and the standard deviation 2.3.
    assert (off.abs() < 5).all()
    assert off.square().mean() < 1.3 + 4.5 * 2.3 / len(off) ** 0.5
    assert found.standard_error.max() < 0.1
    assert found.r_hat.median() < 1.1
    assert 0.8 < found.acceptance < 0.99
    assert (found.effective_sample_size > 50).all()
    total = exact.log_evidence_per_datum().sum()
    assert abs(found.total - total) < 5 * found.total_standard_error
    assert found.plates == (() if name == "sequential" else ("data",))


def test_error_bars_are_calibrated():
    exact = ConjugateGaussian(N=300)
    found = low_dimensional_evidence(exact.model, exact.guide, num_draws=30, num_transitions=40)
    off = deviations(found, exact.log_evidence_per_datum())
    # A t distribution with 9 degrees of freedom has 98.5% within three standard errors.
    assert (off.abs() < 3).double().mean() > 0.96
    assert 0.75 < off.std() < 1.5


def test_a_posterior_of_two_modes_with_the_prior_as_a_guide():
    x = torch.tensor([0.5, 2.0, 4.0])

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("x", dist.Normal(z**2, 0.5), obs=x)

    def prior():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))

    z = torch.linspace(-8, 8, 4001)[:, None]
    joint = dist.Normal(0.0, 1.0).log_prob(z) + dist.Normal(z**2, 0.5).log_prob(x)
    exact = joint.logsumexp(0) + math.log(16 / 4000)
    found = low_dimensional_evidence(model, prior, num_chains=100, num_transitions=50, num_draws=20)
    # Any share of chains in each mode will do, as f is fitted to the draws; but the chains that
    # are averaged must have the shares of the posterior, which the symmetric start gives them.
    assert (deviations(found, exact).abs() < 5).all()


def test_minibatches_masks_and_observations_outside_of_the_plate():
    x = torch.randn(10, 2) + 1
    known = torch.tensor([[True, False], [True, True], [True, True]])
    rows = torch.tensor([7, 2, 5])

    def model():
        pyro.sample("y", dist.Normal(torch.zeros(()), 1.0), obs=torch.ones(()))
        with pyro.plate("data", 10, subsample=rows) as i:
            for t in range(2):
                with poutine.mask(mask=known[:, t]):
                    z = pyro.sample(f"z_{t}", dist.Normal(torch.zeros(()), 1.0))
                    pyro.sample(f"x_{t}", dist.Normal(z, 1.0), obs=x[i, t])

    def guide():
        with pyro.plate("data", 10, subsample=rows):
            for t in range(2):
                with poutine.mask(mask=known[:, t]):
                    pyro.sample(f"z_{t}", dist.Normal(torch.zeros(()), 1.2))

    found = low_dimensional_evidence(model, guide)
    each = dist.Normal(torch.zeros(()), 2**0.5).log_prob(x[rows])
    exact = torch.where(known, each, 0.0).sum(-1)
    assert (deviations(found, exact).abs() < 5).all()
    outside = dist.Normal(torch.zeros(()), 1.0).log_prob(torch.ones(()))
    assert torch.allclose(found.shared, outside)
    assert torch.allclose(found.total, outside + 10 / 3 * found.log_evidence.sum())


def test_plates_side_by_side_with_vectors_of_different_lengths():
    a, b = torch.randn(3), torch.randn(2)

    def programs(observe):
        for name, x, d in (("left", a, 1), ("right", b, 3)):
            with pyro.plate(name, len(x)):
                prior = dist.Normal(torch.zeros(d), 1.0).to_event(1)
                z = pyro.sample(f"z_{name}", prior)
                if observe:
                    pyro.sample(f"x_{name}", dist.Normal(z.sum(-1), 1.0), obs=x)

    found = low_dimensional_evidence(lambda: programs(True), lambda: programs(False))
    parts = [dist.Normal(torch.zeros(()), (d + 1) ** 0.5).log_prob(x) for x, d in ((a, 1), (b, 3))]
    assert (deviations(found, torch.cat(parts)).abs() < 5).all()


def test_global_latents_jointly():
    exact = HierarchicalGaussian(N=3)
    found = low_dimensional_evidence(exact.model, exact.guide, num_transitions=200)
    assert abs(deviations(found, exact.log_evidence())) < 5
    assert found.plates == ()
    given = low_dimensional_evidence(
        exact.model, exact.guide, joint=False, num_draws=2, num_transitions=2
    )
    assert given.log_evidence.shape == (3,)
    assert given.given


@pytest.mark.parametrize("vectorize", [False, True])
def test_every_kernel_and_programs_that_cannot_be_vectorized(vectorize):
    exact = ConjugateGaussian(N=3)
    kernel = RandomWalk(AdaptiveStepSize(0.5, 0.4))
    found = low_dimensional_evidence(
        exact.model,
        exact.guide,
        num_chains=8,
        num_draws=60,
        num_transitions=30,
        kernel=kernel,
        vectorize_particles=vectorize,
    )
    assert (deviations(found, exact.log_evidence_per_datum()).abs() < 7).all()
    assert kernel.step_size() == 0.5
    assert kernel.training
    assert found.step_size != 0.5


def test_nothing_is_trained():
    exact = ConjugateGaussian(N=3)
    exact.model()
    exact.guide()
    before = exact.params()
    low_dimensional_evidence(exact.model, exact.guide, num_draws=2, num_transitions=2)
    params = dict(pyro.get_param_store().named_parameters())
    assert all(p.grad is None for p in params.values())
    assert all((exact.params()[n] == v).all() for n, v in before.items())


def test_single_precision():
    exact = ConjugateGaussian(N=5, dtype=torch.float32)
    torch.set_default_dtype(torch.float32)
    found = low_dimensional_evidence(exact.model, exact.guide)
    assert found.log_evidence.dtype == torch.float32
    assert (deviations(found, exact.log_evidence_per_datum()).abs() < 5).all()


def test_chains_that_have_not_mixed_are_reported(caplog):
    exact = ConjugateGaussian(N=3)
    exact.set_guide(log_s=3.0)
    low_dimensional_evidence(
        exact.model, exact.guide, num_draws=10, num_transitions=0, kernel=HMC(0.001, num_leapfrog=1)
    )
    assert "have not reached the posterior" in caplog.text


def test_what_is_refused():
    wide = ProbabilisticPCA(p=6, d=5, N=3)
    with pytest.raises(ValueError, match=r"at most 4 latent dimensions.*draws 5: use"):
        low_dimensional_evidence(wide.model, wide.guide)
    discrete = DiscreteMixture(N=3)
    with pytest.raises(ValueError, match="site 'z' is discrete: use log_evidence"):
        low_dimensional_evidence(discrete.model, discrete.guide)
    exact = ConjugateGaussian(N=3)
    with pytest.raises(ValueError, match=r"leaves the posterior invariant.*got ULA"):
        low_dimensional_evidence(exact.model, exact.guide, kernel=ULA())
    for name, value, least in (
        ("num_chains", 3, 4),
        ("num_draws", 0, 1),
        ("num_transitions", -1, 0),
    ):
        with pytest.raises(ValueError, match=f"{name} must be an int of at least {least}, got"):
            low_dimensional_evidence(exact.model, exact.guide, **{name: value})


def test_programs_that_are_not_finite_name_their_site():
    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            odd = dist.Unit(z + torch.tensor([0.0, math.nan, 0.0]), validate_args=False)
            pyro.sample("odd", odd, obs=torch.zeros(3, 0))

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))

    with pytest.raises(ValueError, match="site 'odd' of the model"):
        low_dimensional_evidence(model, guide)


def test_in_inference_mode():
    """Where the default kernel would be made of tensors that cannot adapt."""
    exact = ConjugateGaussian(N=5)
    with torch.inference_mode():
        found = low_dimensional_evidence(exact.model, exact.guide)
    assert bool((deviations(found, exact.log_evidence_per_datum()).abs() < 5).all())
