"""Chains in white coordinates: exact evidences, and posteriors that other chains miss."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    HMC,
    MALA,
    RandomWalk,
    log_evidence,
    refine,
    report,
    sandwich,
)
from tests.models import (
    ConjugateGaussian,
    DiscreteMixture,
    GammaPoisson,
    HierarchicalGaussian,
    LinearGaussianChain,
    NestedGaussian,
    ProbabilisticPCA,
    SequentialPlate,
    UnequalPlates,
    UnequalWalks,
)

MODELS = (
    ConjugateGaussian,
    ProbabilisticPCA,
    GammaPoisson,
    SequentialPlate,
    NestedGaussian,
    LinearGaussianChain,
    HierarchicalGaussian,
)
WHITE = {"coordinates": "whitened", "num_particles": 400, "schedule": 4, "warmup": 4}


QUICK = (ConjugateGaussian, GammaPoisson)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in QUICK else pytest.mark.slow) for k in MODELS]
)
def test_the_evidence_is_the_exact_one(kind):
    exact = kind()
    result = log_evidence(exact.model, exact.guide, seed=0, **WHITE)
    error = (result.total - exact.log_evidence()).abs()
    assert bool(error < 4 * result.total_standard_error + 1e-5), (
        result.total,
        exact.log_evidence(),
    )


@pytest.mark.parametrize(
    "kind", [UnequalPlates, pytest.param(UnequalWalks, marks=pytest.mark.slow)]
)
def test_padding_of_shorter_vectors_has_no_weight(kind):
    exact = kind()
    truth = exact.log_evidence_per_datum()
    result = log_evidence(exact.model, exact.guide, seed=0, **WHITE)
    error = (result.log_evidence - truth).abs()
    assert bool((error < 4 * result.standard_error + 1e-5).all()), (result.log_evidence, truth)


# Standard deviations of a posterior in two directions that no coordinate follows.
CONDITION = 1e4


class Scales:
    """A linear model whose posterior is long and narrow, and a guide that is narrow all around."""

    def __init__(self, dim=6, condition=CONDITION):
        generator = torch.Generator().manual_seed(1)
        rotation, _ = torch.linalg.qr(torch.randn(dim, dim, generator=generator))
        precision = torch.logspace(0, math.log10(condition), dim)
        self.design = (precision - 1 + 1e-3).sqrt().unsqueeze(-1) * rotation
        self.x = self.design @ torch.randn(dim, generator=generator)
        self.x = self.x + torch.randn(dim, generator=generator)
        # The mean field of the posterior: as narrow as it is when all other latents are known.
        full = self.design.T @ self.design + torch.eye(dim)
        self.mean = torch.linalg.solve(full, self.design.T @ self.x)
        self.scale = full.diagonal().rsqrt()
        covariance = self.design @ self.design.T + torch.eye(dim)
        self.exact = dist.MultivariateNormal(torch.zeros(dim), covariance).log_prob(self.x)

    def model(self):
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand(self.mean.shape).to_event(1))
        at = (self.design @ z.unsqueeze(-1)).squeeze(-1)
        pyro.sample("x", dist.Normal(at, 1.0).to_event(1), obs=self.x)

    def guide(self):
        pyro.sample("z", dist.Normal(self.mean, self.scale).to_event(1))

    def evaluate(self, seed, coordinates):
        return log_evidence(
            self.model,
            self.guide,
            joint=True,
            num_particles=200,
            schedule=10,
            kernel=HMC(jitter=0.3),
            coordinates=coordinates,
            seed=seed,
        )


@pytest.mark.slow
def test_a_badly_scaled_posterior():
    scales = Scales()
    plain, white = (scales.evaluate(0, kind) for kind in ("noise", "whitened"))
    assert float(scales.exact - plain.total) > 1.0
    assert float(plain.total_standard_error) < 0.7
    assert float((white.total - scales.exact).abs()) < 2 * float(white.total_standard_error) + 0.01
    assert float(white.total_standard_error) < 0.1


@pytest.mark.slow
def test_a_report_takes_white_coordinates_where_weights_leave_doubt():
    scales = Scales()
    options = {"joint": True, "check_modes": False, "seed": 0, "warmup": 10}
    result = report(scales.model, scales.guide, num_particles=500, **options)
    assert result.chains.whitened
    assert float((result.evidence.total - scales.exact).abs()) < 0.1
    assert "fitted normal, 40 steps" in str(result)
    assert result.trusted


@pytest.mark.slow
def test_errors_in_white_coordinates_cover():
    scales = Scales()
    result = [scales.evaluate(seed, "whitened") for seed in range(40)]
    ratios = torch.stack([(f.total - scales.exact) / f.total_standard_error for f in result])
    assert int((ratios.abs() < 2).sum()) >= 35
    assert float(ratios.mean().abs()) < 4 / len(result) ** 0.5
    weights = torch.stack([f.total - scales.exact for f in result]).exp()
    assert float((weights.mean() - 1).abs()) < 4 * float(weights.std()) / len(result) ** 0.5


@pytest.mark.parametrize("kernel", [MALA(), RandomWalk()], ids=["mala", "random-walk"])
def test_other_kernels_find_white_coordinates_too(kernel):
    exact = ConjugateGaussian(N=20)
    result = log_evidence(exact.model, exact.guide, kernel=kernel, seed=0, **WHITE)
    error = (result.total - exact.log_evidence()).abs()
    assert bool(error < 4 * result.total_standard_error)


def test_masked_latents_stay_where_they_are():
    x, seen = torch.tensor([0.3, -1.0, 2.0]), torch.tensor([True, True, False])

    def model():
        with pyro.plate("data", 3), pyro.poutine.mask(mask=seen):
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x)

    def guide():
        with pyro.plate("data", 3), pyro.poutine.mask(mask=seen):
            pyro.sample("z", dist.Normal(x.unsqueeze(-1) / 3, 0.4).expand([3, 2]).to_event(1))

    result = log_evidence(model, guide, seed=0, **WHITE)
    exact = dist.Normal(0.0, 3**0.5).log_prob(x) * seen
    assert bool(((result.log_evidence - exact).abs() < 4 * result.standard_error + 1e-5).all())


@pytest.mark.slow
def test_draws_and_sandwiches_in_white_coordinates():
    scales = Scales(dim=3, condition=100.0)
    draws = refine(
        scales.model,
        scales.guide,
        joint=True,
        num_samples=1000,
        num_particles=1,
        schedule=3,
        num_transitions=10,
        kernel=HMC(jitter=0.3),
        coordinates="whitened",
        seed=0,
    )["z"]
    full = torch.linalg.inv(scales.design.T @ scales.design + torch.eye(3))
    assert torch.allclose(draws.mean(0), scales.mean, atol=0.1)
    assert torch.allclose(draws.T.cov(), full, atol=0.15)
    exact = ConjugateGaussian(N=50)
    options = WHITE | {"num_particles": 50, "to_args": lambda data: ()}
    # They find simulated data whose guide stays where it is, unlike chains from its draws.
    result = sandwich(exact.model, exact.guide, seed=0, **options)
    assert -0.02 < float(result.mean_gap) < 0.1


def test_autocast_around_a_judge_leaves_the_map_alone():
    """Its products were rounded to bfloat16, of which no triangular system can be solved."""

    def model():
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z.cumsum(-1), 0.5).to_event(1), obs=torch.tensor([1.0, 0, 2]))

    def guide():
        pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    options = {"schedule": 3, "num_particles": 40, "warmup": 3, "seed": 0}
    result = log_evidence(model, guide, coordinates="whitened", **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other = log_evidence(model, guide, coordinates="whitened", **options)
    assert torch.equal(result.log_evidence, other.log_evidence)


def test_discrete_latents_and_no_warm_up_are_refused():
    exact = DiscreteMixture()
    with pytest.raises(ValueError, match="discrete"):
        log_evidence(exact.model, exact.guide, **WHITE)
    exact = ConjugateGaussian(N=5)
    with pytest.raises(ValueError, match="warmup must be an int of at least 1"):
        log_evidence(exact.model, exact.guide, **(WHITE | {"warmup": 0}))


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32")])
def test_latents_and_defaults_may_have_different_dtypes(dtypes):
    """Float32 latents in a double precision model, and the reverse."""
    latents, default = (getattr(torch, name) for name in dtypes)
    torch.set_default_dtype(default)  # the fixture of all tests restores it
    y = torch.tensor([-2.0, 0.0, 1.0], dtype=torch.float64)

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(torch.zeros(2, dtype=latents), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(z.double().sum(-1), 1.0), obs=y)

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(torch.zeros(2, dtype=latents), 1.0).to_event(1))

    chains = {"coordinates": "whitened", "num_particles": 1, "schedule": 3, "warmup": 4}
    draws = refine(model, guide, seed=0, num_samples=500, num_transitions=5, **chains)
    assert draws["z"].dtype == latents
    error = (draws["z"].mean(0) - (y / 3)[:, None]) / (2 / 3 / 500) ** 0.5
    assert float(error.abs().max()) < 5
