"""What SIS and AIS share: evidence, adaptation, learned parts, reweighting, masks, errors."""

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    GaussianReverse,
    RandomWalk,
    TraceAIS_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from pyro_mcvae.chains.parameters import AdaptiveStepSize
from tests.chains.densities import Reverse, learned_moves
from tests.estimates import assert_mean
from tests.models import (
    ConjugateGaussian,
    GammaPoisson,
    HierarchicalGaussian,
    LinearGaussianChain,
    NestedGaussian,
    ProbabilisticPCA,
    UnequalPlates,
    UnequalWalks,
)
from tests.zoo import data, param

KERNELS = {
    "ULA": (TraceSIS_ELBO, lambda: ULA(0.1)),
    "per coordinate": (TraceSIS_ELBO, lambda: ULA(AdaptiveStepSize(0.1, per_coordinate=True))),
    "UnderdampedLangevin": (TraceSIS_ELBO, lambda: UnderdampedLangevin(0.4, momentum=0.6)),
    "learned moves": (TraceSIS_ELBO, lambda: learned_moves(0.3, momentum=0.6)),
    "learned reverse": (TraceSIS_ELBO, lambda: ULA(0.1, reverse=GaussianReverse(Reverse()))),
    "MALA": (TraceAIS_ELBO, lambda: MALA(0.3)),
    "HMC": (TraceAIS_ELBO, lambda: HMC(0.4, num_leapfrog=2)),
    "RandomWalk": (TraceAIS_ELBO, lambda: RandomWalk(0.7)),
}
classes = pytest.mark.parametrize("cls", [TraceSIS_ELBO, TraceAIS_ELBO], ids=["sis", "ais"])


def hierarchy():
    """Near the posterior, as a guide is."""
    exact = HierarchicalGaussian(N=3)
    exact.set_guide("exact", log_sz=exact.presets()["exact"]["log_sz"] + 0.2)
    return exact


# The model, and a factor of the step size: too large ones give the weight heavy tails.
MODELS = {
    "gaussian": (lambda: ConjugateGaussian(N=3), 1.0),
    "pca": (lambda: ProbabilisticPCA(N=3, family="full", sigma=0.5), 0.5),
    "gamma": (lambda: GammaPoisson(N=3), 0.5),
    "nested": (lambda: NestedGaussian(G=2), 0.5),
    "sequential": (lambda: LinearGaussianChain(N=3, T=2), 1.0),
    "padded plates": (UnequalPlates, 1.0),
    "padded walks": (UnequalWalks, 0.5),
    "joint": (hierarchy, 0.2),
}


@pytest.mark.parametrize(
    ("model", "kernel", "coordinates"),
    [
        pytest.param(
            m, k, ("noise", "latent")[i % 2], marks=pytest.mark.slow if (i + j) % 4 else ()
        )
        for i, m in enumerate(MODELS)
        for j, k in enumerate(KERNELS)
        if (i + j) % 2 == 0
    ],
)
def test_mean_weight_is_the_evidence(model, kernel, coordinates):
    """Of each datum, or of all data if they share a global latent."""
    (make, factor), (cls, kernel) = MODELS[model], KERNELS[kernel]
    exact, kernel, joint, count = make(), kernel(), model == "joint", 3000
    kernel.step_size.value.mul_(factor)
    options = {"joint": joint, "coordinates": coordinates, "vectorize_particles": True}
    elbo = cls(3, kernel, num_particles=count, **options)
    with torch.no_grad():
        bounds = elbo.bounds(exact.model, exact.guide)
    log_evidence = exact.log_evidence() if joint else exact.log_evidence_per_datum()
    result = elbo.last_step.log_weight
    weight = (result - log_evidence).exp()
    assert weight.shape == (count, *log_evidence.shape)
    assert_mean(weight, torch.ones_like(log_evidence))
    torch.testing.assert_close(bounds.per_datum, result.mean(0))
    assert (bounds.per_datum < log_evidence + 4.5 * result.std(0) / count**0.5).all()
    assert elbo.last_step.acceptance.numel() == (2 if cls is TraceAIS_ELBO else 3)


@classes
def test_step_sizes_adapt_by_what_moves(cls):
    """Data that are masked change neither acceptance nor step size."""
    x = data(4)

    def programs(count):
        def model():
            with pyro.plate("data", count), pyro.poutine.mask(mask=torch.arange(count) < 4):
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
                pyro.sample("x", dist.Normal(z, 0.5), obs=x.repeat(2)[:count])

        def guide():
            with pyro.plate("data", count), pyro.poutine.mask(mask=torch.arange(count) < 4):
                pyro.sample("z", dist.Normal(x.repeat(2)[:count], 0.3))

        return model, guide

    def step_sizes(count):
        kernel = (ULA if cls is TraceSIS_ELBO else MALA)(0.2)
        elbo = cls(4, kernel, num_particles=500, coordinates="latent", max_plate_nesting=1)
        elbo.kernel.step_size = AdaptiveStepSize(0.2, target_acceptance=0.8, per_coordinate=True)
        elbo.loss_and_grads(*programs(count))
        return elbo.last_step.acceptance, elbo.kernel.step_size()

    (plain, size), (masked, masked_size) = step_sizes(4), step_sizes(8)
    # Four standard errors of 2,000 chains; masked data as others would halve the variance.
    assert torch.allclose(plain, masked, atol=0.03)
    assert torch.allclose(size, masked_size, rtol=0.08)


@pytest.mark.parametrize(
    ("cls", "kernel"),
    [
        (TraceSIS_ELBO, None),
        pytest.param(TraceSIS_ELBO, ULA, marks=pytest.mark.slow),
        pytest.param(TraceAIS_ELBO, None, marks=pytest.mark.slow),
        pytest.param(TraceAIS_ELBO, MALA, marks=pytest.mark.slow),
    ],
)
def test_adaptation_reaches_its_target_in_training_and_only_there(cls, kernel):
    """Of what is learned as well, where no optimizer takes it."""
    exact = ConjugateGaussian(N=50)

    def make(**options):
        return cls(4, kernel=kernel and kernel(), **options)

    elbo = make(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    step_size = elbo.kernel.step_size
    elbo.loss(exact.model, exact.guide)
    elbo.bounds(exact.model, exact.guide)
    assert step_size().item() == pytest.approx(elbo.kernel.initial_step_size)
    rates = []
    for i in range(100):  # from the initial step size, at most a tenth larger at each step
        with pyro.validation_enabled(i == 0):
            elbo.loss_and_grads(exact.model, exact.guide)
        rates.append(elbo.last_step.acceptance.mean())
    goal = getattr(step_size, "start", step_size).target_acceptance
    assert torch.stack(rates[-40:]).mean().item() == pytest.approx(goal, abs=0.03)
    before = step_size()
    elbo.eval()
    elbo.loss_and_grads(exact.model, exact.guide)
    assert step_size() == before
    other = make()
    other.load_state_dict(elbo.state_dict())
    assert other.kernel.step_size() == before


@pytest.mark.slow
def test_a_few_diverged_chains_shorten_an_unadjusted_step():
    """Two data of a hundred are so exact that steps which suit the others lose their chains."""
    precision = torch.ones(100)
    precision[:2] = 1e4

    def model():
        with pyro.plate("data", 100):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, precision.rsqrt()), obs=torch.zeros(100))

    def guide():
        with pyro.plate("data", 100):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    pyro.set_rng_seed(0)
    elbo = TraceSIS_ELBO(6, UnderdampedLangevin(AdaptiveStepSize(0.6)))
    first = elbo.loss(model, guide)
    with pyro.validation_enabled(False):  # it costs most of the time
        for _ in range(30):
            elbo.loss_and_grads(model, guide)
    # 98 of 100 chains could go further: the mean of the acceptance does not see the others.
    assert elbo.last_step.acceptance.mean() > 0.95
    assert elbo.kernel.step_size() < 0.05
    assert elbo.loss(model, guide) < 0.01 * first


@classes
def test_reweighted_gradients_by_hand(cls):
    """theta: normalised weights of the ends; phi: the plain ELBO of the first draws."""
    x = data(4)

    def model():
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(param("slope") * z, 0.7), obs=x)

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(param("a") * x, param("s", seed=2).exp()))

    elbo = cls(3, num_particles=3, gradient_estimator="reweighted", coordinates="noise")
    chains = []
    run = elbo._run
    elbo._run = lambda *args: chains.append(run(*args)) or chains[-1]
    elbo.loss_and_grads(model, guide)
    (chain,) = chains
    assert not chain.log_weight.requires_grad
    slope, a, s = (pyro.param(n).detach().requires_grad_() for n in ("slope", "a", "s"))

    def log_joint(z, slope):
        prior = dist.Normal(0.0, 1.0).log_prob(z)
        return prior + dist.Normal(slope * z, 0.7).log_prob(x)

    def draw(noise):
        return a * x + s.exp() * noise[..., 0]

    ends = draw(chain.state.position).detach()
    weighted = (chain.log_weight.softmax(0) * log_joint(ends, slope)).sum()
    z = draw(chain.start.position.detach())
    first = log_joint(z, slope.detach()) - dist.Normal(a * x, s.exp()).log_prob(z)
    expected = torch.autograd.grad(weighted + first.mean(0).sum(), (slope, a, s))
    for name, grad in zip(("slope", "a", "s"), expected, strict=True):
        assert torch.allclose(-pyro.param(name).grad, grad), name


@pytest.mark.parametrize(
    ("objective", "kernel"), [(TraceSIS_ELBO, UnderdampedLangevin), (TraceAIS_ELBO, HMC)]
)
def test_units_of_the_latent_are_the_users(objective, kernel):
    """Chains along latents of a scale of 1e9 are those of a scale of one, in other units."""
    losses = []
    for scale in (1.0, 1e9):

        def model(scale=scale):
            with pyro.plate("data", 5):
                z = pyro.sample("z", dist.Normal(0.0, scale))
                pyro.sample("x", dist.Normal(torch.tanh(z / scale), 1.0), obs=torch.ones(5))

        def guide(scale=scale):
            with pyro.plate("data", 5):
                pyro.sample("z", dist.Normal(0.5 * scale, scale))

        pyro.set_rng_seed(0)
        losses.append(objective(3, kernel(0.3 * scale), coordinates="latent").loss(model, guide))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
