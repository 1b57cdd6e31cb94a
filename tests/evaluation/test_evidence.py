"""The log evidence against exact models: value, error bars, tails, memory, and what it refuses."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from torch import nn

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    AdaptiveStepSize,
    LinearSchedule,
    RandomWalk,
    ScoreNetwork,
    UnderdampedLangevin,
    log_evidence,
)
from tests.cases import every
from tests.estimates import assert_mean, called
from tests.models import (
    BetaBernoulli,
    ConjugateGaussian,
    DiscreteMixture,
    GammaPoisson,
    HierarchicalGaussian,
    LinearGaussianChain,
    NestedGaussian,
    ProbabilisticPCA,
    SequentialPlate,
)

CONTINUOUS = {
    cls.__name__: cls
    for cls in (
        ConjugateGaussian,
        ProbabilisticPCA,
        GammaPoisson,
        SequentialPlate,
        NestedGaussian,
        LinearGaussianChain,
        HierarchicalGaussian,
    )
}
MODELS = {**CONTINUOUS, "DiscreteMixture": DiscreteMixture, "BetaBernoulli": BetaBernoulli}
JOINT = {"HierarchicalGaussian", "BetaBernoulli"}


def assert_close(result, exact, sigmas=3.0):
    error = (result.total - exact).abs()
    assert bool(error < sigmas * result.total_standard_error), (result.total, exact)


# With looped particles.
LOOPED = ("NestedGaussian", "HierarchicalGaussian")


@pytest.mark.parametrize(
    ("name", "vectorize"), every(2, [*((n, True) for n in MODELS), *((n, False) for n in LOOPED)])
)
def test_importance_sampling_finds_the_evidence(name, vectorize):
    exact = MODELS[name]()
    count = 4000 if vectorize else 100
    result = log_evidence(
        exact.model, exact.guide, num_particles=count, vectorize_particles=vectorize
    )
    assert_close(result, exact.log_evidence())
    assert result.log_evidence.dim() == (0 if name in JOINT else 1)
    assert bool((result.bound <= result.log_evidence).all())


KERNELS = {
    "default": None,
    "mala": MALA(),
    "random-walk": RandomWalk(),
    "hmc": HMC(0.4, num_leapfrog=2),
    "ula": ULA(),
    "underdamped": UnderdampedLangevin(),
    "learned moves": UnderdampedLangevin(full_mass=True, reverse=ScoreNetwork()),
}


@pytest.mark.parametrize(
    ("name", "kernel"),
    # In turn: a kernel moves states, which may come from any program.
    every(2, zip(CONTINUOUS, itertools.cycle(KERNELS))),
)
def test_chains_find_the_evidence(name, kernel):
    exact, kernel = CONTINUOUS[name](), KERNELS[kernel]
    result = log_evidence(
        exact.model, exact.guide, num_particles=400, schedule=4, kernel=kernel, warmup=8
    )
    assert_close(result, exact.log_evidence(), 4.0)
    assert result.acceptance.shape == ((3,) if kernel is None or kernel.adjusted else (4,))


@pytest.mark.slow
def test_chains_tighten_the_bound():
    exact = ConjugateGaussian(N=20)
    plain = log_evidence(exact.model, exact.guide, num_particles=500)
    chains = log_evidence(exact.model, exact.guide, num_particles=500, schedule=10)
    assert float(chains.bound.sum()) > float(plain.bound.sum())
    assert float(chains.effective_sample_size.min()) > float(plain.effective_sample_size.min())


def test_error_bars_cover():
    """200 repeats of one datum are 200 data with the same value."""
    exact = ConjugateGaussian(N=200)
    exact.x = exact.x[:1].expand(200).clone()
    for options in ({}, {"schedule": 3, "kernel": MALA(0.2)}):
        result = log_evidence(exact.model, exact.guide, num_particles=500, **options)
        error = (result.log_evidence - exact.log_evidence_per_datum()) / result.standard_error
        # Of 200: sd sqrt(200 * 0.95 * 0.05) = 3.1 and sqrt(200 * 0.68 * 0.32) = 6.6.
        assert 190 - 12 <= int((error.abs() < 1.96).sum()) <= 200
        assert 136 - 26 <= int((error.abs() < 1.0).sum()) <= 136 + 26


def test_k_tells_a_good_guide_from_one_that_is_too_narrow():
    exact = ConjugateGaussian(N=20)
    result = {}
    for name, log_s in (("exact", 0.5 * math.log(0.5)), ("wide", 0.0), ("narrow", -2.3)):
        exact.set_guide("exact", log_s=log_s)
        result[name] = log_evidence(exact.model, exact.guide, num_particles=2000)
    assert bool((result["exact"].pareto_k < 0).all())
    assert torch.allclose(result["exact"].effective_sample_size, torch.tensor(2000.0))
    assert bool((result["wide"].pareto_k < 0.5).all())
    assert float(result["narrow"].pareto_k.median()) > 0.85
    assert int(result["narrow"].unreliable.sum()) >= 15
    assert float(result["narrow"].effective_sample_size.max()) < 1000


@pytest.mark.parametrize("options", [{}, {"schedule": 3, "kernel": MALA(0.2)}])
def test_chunks_have_the_law_of_the_whole(options):
    exact = ProbabilisticPCA()
    whole = log_evidence(exact.model, exact.guide, num_particles=900, **options)
    chunked = log_evidence(exact.model, exact.guide, num_particles=900, chunk_size=70, **options)
    error = torch.hypot(whole.standard_error, chunked.standard_error)
    assert bool(((whole.log_evidence - chunked.log_evidence).abs() < 4.5 * error).all())
    assert torch.allclose(whole.standard_error, chunked.standard_error, rtol=0.5)


def test_chunks_of_given_weights_say_what_the_whole_says():
    exact = ProbabilisticPCA()
    result = log_evidence(
        exact.model, exact.guide, num_particles=500, chunk_size=64, keep_log_weight=True
    )
    w = result.log_weight
    assert w.shape == (500, 20)
    assert torch.allclose(result.log_evidence, w.logsumexp(0) - math.log(500))
    ratio = (w - w.amax(0)).exp()
    assert torch.allclose(result.standard_error, ratio.std(0) / ratio.mean(0) / math.sqrt(500))
    assert torch.allclose(result.effective_sample_size, ratio.sum(0) ** 2 / (ratio**2).sum(0))
    assert torch.allclose(result.bound, w.mean(0))


def test_by_default_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("pyro_mcvae.evaluation.weights._CHUNK", 1000)
    exact, sizes = ProbabilisticPCA(), []

    class Watch(pyro.poutine.messenger.Messenger):
        def _pyro_post_sample(self, msg):
            if msg["name"] == "z":
                sizes.append(msg["value"].numel())

    with Watch():
        log_evidence(exact.model, exact.guide, num_particles=50)
    assert max(sizes) <= 1000


def test_minibatches_are_scaled_outside():
    exact = ConjugateGaussian(subsample_size=10)
    result = log_evidence(exact.model, exact.guide, num_particles=3000)
    assert result.log_evidence.shape == (10,)
    assert result.scale == 10.0
    assert result.plates == ("data",)
    assert torch.allclose(result.total, 10 * result.log_evidence.sum())
    index = torch.arange(5, 15)
    result = log_evidence(exact.model, exact.guide, index, num_particles=3000)
    difference = result.log_evidence - exact.log_evidence_per_datum()[index]
    assert bool((difference.abs() < 4 * result.standard_error).all())


def test_chunks_share_one_minibatch():
    exact, seen = ConjugateGaussian(subsample_size=3), []

    def guide(subsample=None):
        with exact.plate(subsample) as index:
            z = pyro.sample("z", dist.Normal(exact.x[index] / 2, 1.0))
            if len(z) == 10:  # a chunk, and not one of the runs that look at the structure
                seen.append(tuple(index.tolist()))

    log_evidence(exact.model, guide, num_particles=40, chunk_size=10, schedule=2, warmup=2)
    assert len(seen) >= 4
    assert len(set(seen)) == 1


def test_globals_are_weighed_with_everything_or_given():
    exact = HierarchicalGaussian()
    together = log_evidence(exact.model, exact.guide, num_particles=2000)
    assert together.log_evidence.shape == ()
    assert together.fixed_latents == ()
    apart = log_evidence(exact.model, exact.guide, num_particles=2000, joint=False)
    assert apart.log_evidence.dim() == 1
    assert len(apart.fixed_latents) == 1


def mixture(x):
    theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(theta, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def test_point_masses_of_globals_are_given():
    x = torch.tensor([0.3, -1.0, 2.0])
    guide = AutoGuideList(mixture)
    guide.append(AutoDelta(pyro.poutine.block(mixture, expose=["theta"])))
    guide.append(AutoNormal(pyro.poutine.block(mixture, expose=["z"]), init_scale=0.8))
    guide(x)
    result = log_evidence(mixture, guide, x, num_particles=4000)
    theta = guide[0].median()["theta"].detach()
    exact = dist.Normal(theta, math.sqrt(2)).log_prob(x)
    assert result.fixed_latents == ("theta",)
    assert bool(((result.log_evidence - exact).abs() < 4 * result.standard_error).all())
    prior = dist.Normal(0.0, 1.0).log_prob(theta)
    assert torch.allclose(result.total, prior + result.log_evidence.sum())


@pytest.mark.slow
def test_auto_guides_are_weighed_together():
    x = torch.tensor([0.3, -1.0, 2.0])
    covariance = 2 * torch.eye(3) + 1
    exact = dist.MultivariateNormal(torch.zeros(3), covariance).log_prob(x)
    guide = called(AutoNormal(mixture, init_scale=0.7), x)
    result = log_evidence(mixture, guide, x, num_particles=4000, schedule=4)
    assert_close(result, exact, 4.0)


def test_masked_data_have_an_evidence_of_zero():
    mask = torch.tensor([True, False, True])
    x = torch.tensor([0.3, -1.0, 2.0])

    def model(x):
        with pyro.plate("data", 3), pyro.poutine.mask(mask=mask):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        with pyro.plate("data", 3), pyro.poutine.mask(mask=mask):
            pyro.sample("z", dist.Normal(x / 2, 0.8))

    exact = torch.where(mask, dist.Normal(0.0, math.sqrt(2)).log_prob(x), 0.0)
    for options in ({}, {"schedule": 3}):
        result = log_evidence(model, guide, x, num_particles=3000, **options)
        error = (result.log_evidence - exact).abs()
        assert bool((error <= 4 * result.standard_error + 1e-9).all())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 2)

    def guide(self, x):
        pyro.module("net", self)
        with pyro.plate("data", len(x)):
            loc = self.head(self.layers(x))
            pyro.sample("z", dist.Normal(loc, 1.0).to_event(1))


def test_nothing_is_trained():
    net, x = Net(), torch.randn(5, 2)
    slope = torch.nn.Parameter(torch.ones(2))

    def model(x):
        pyro.param("new", torch.zeros(2))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            pyro.sample("x", dist.Normal(z * slope, 1.0).to_event(1), obs=x)

    net.layers[1].eval()
    net.layers[1].train()
    net.head.eval()
    net.head.weight.requires_grad_(False)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    modes = {n: m.training for n, m in net.named_modules()}
    kernel, schedule = HMC(AdaptiveStepSize(0.3)), LinearSchedule(3)
    state = torch.get_rng_state()
    one = log_evidence(
        model, net.guide, x, num_particles=60, kernel=kernel, schedule=schedule, seed=1
    )
    assert torch.equal(torch.get_rng_state(), state)
    again = log_evidence(
        model, net.guide, x, num_particles=60, kernel=kernel, schedule=schedule, seed=1
    )
    # In training mode dropout would make them differ, and the minibatch's statistics drift.
    assert torch.equal(one.log_evidence, again.log_evidence)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert {n: m.training for n, m in net.named_modules()} == modes
    assert not net.head.weight.requires_grad
    assert all(p.grad is None for p in net.parameters())
    assert slope.grad is None
    assert float(kernel.step_size()) == pytest.approx(0.3)
    assert float(one.step_size) != pytest.approx(0.3)
    assert kernel.training
    assert list(pyro.get_param_store().keys()) == []
    assert not one.log_evidence.requires_grad


def test_parameters_of_two_names_stay():
    net = nn.Linear(2, 2)
    pyro.module("old", net)
    old = pyro.param("old$$$weight")

    def guide(x):
        pyro.module("new", net)
        pyro.module("other", net)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(net(x), 1.0).to_event(1))

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=x)

    log_evidence(model, guide, torch.randn(3, 2), num_particles=5)
    store = pyro.get_param_store()
    assert set(store.keys()) == {"old$$$weight", "old$$$bias"}
    assert store.param_name(net.weight) == "old$$$weight"
    assert pyro.param("old$$$weight") is old


def test_step_sizes_that_do_not_adapt_are_taken_as_they_are():
    exact = ConjugateGaussian(N=5)
    frozen = HMC(AdaptiveStepSize(0.3)).eval()
    for kernel in (HMC(0.3), frozen):
        result = log_evidence(exact.model, exact.guide, num_particles=30, kernel=kernel)
        assert float(result.step_size) == pytest.approx(0.3)
        assert result.acceptance.shape == (9,)


def test_in_inference_mode():
    exact = ConjugateGaussian(N=5)
    with torch.inference_mode():
        result = log_evidence(exact.model, exact.guide, num_particles=500, schedule=3)
    assert_close(result, exact.log_evidence(), 4.0)


def test_weights_of_zero():
    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.factor("positive", torch.where(z > x, 0.0, -math.inf))

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.zeros(len(x)), 1.0))

    x = torch.tensor([0.0, 1.0, 50.0])
    result = log_evidence(model, guide, x, num_particles=4000)
    exact = dist.Normal(0.0, 1.0).cdf(-x[:2]).log()
    assert bool(((result.log_evidence[:2] - exact).abs() < 4 * result.standard_error[:2]).all())
    assert result.log_evidence[2] == -math.inf
    assert result.effective_sample_size[2] == 0
    assert result.standard_error[2] == math.inf


def test_it_prints_what_matters():
    exact = ConjugateGaussian(N=5)
    text = str(log_evidence(exact.model, exact.guide, num_particles=100, schedule=3))
    for part in ("log evidence", "5 in data", "Pareto k", "effective sample size", "acceptance"):
        assert part in text


def test_single_precision_stays():
    exact = ConjugateGaussian(N=5, dtype=torch.float32)
    for options in ({}, {"schedule": 3}):
        result = log_evidence(exact.model, exact.guide, num_particles=100, **options)
        assert result.log_evidence.dtype == result.pareto_k.dtype == torch.float32


def test_discrete_latents_in_chains_are_named():
    exact = DiscreteMixture()
    with pytest.raises(ValueError, match="site 'z' is discrete: leave out schedule"):
        log_evidence(exact.model, exact.guide, schedule=3)


def test_latents_outside_of_a_subsampled_plate_are_named():
    exact = HierarchicalGaussian(subsample_size=2)
    with pytest.raises(ValueError, match=r"'data' is subsampled \(2 of .*joint=False"):
        log_evidence(exact.model, exact.guide)
    result = log_evidence(exact.model, exact.guide, joint=False, num_particles=50)
    assert result.log_evidence.shape == (2,)

    def model():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 10, 2) as index:
            pyro.sample("x", dist.Normal(theta, 1.0), obs=torch.zeros(10)[index])

    with pytest.raises(ValueError, match=r"plate 'data' \(2 of 10\) does not enclose them"):
        log_evidence(model, called(AutoNormal(model)))


def test_guides_that_draw_nothing_are_named():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match=r"sites 'theta', 'z' are a point mass"):
        log_evidence(mixture, called(AutoDelta(mixture), x), x)


def test_point_masses_in_the_data_plate_are_named():
    guide = AutoGuideList(mixture)
    guide.append(AutoNormal(pyro.poutine.block(mixture, expose=["theta"])))
    guide.append(AutoDelta(pyro.poutine.block(mixture, expose=["z"])))

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z + w, 1.0), obs=x)

    def half(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x, 1.0))
            pyro.sample("w", dist.Delta(x))

    with pytest.raises(ValueError, match="site 'w' of the guide is a point mass inside"):
        log_evidence(model, half, torch.zeros(3))


def test_modules_that_never_ran_are_named():
    net = nn.LazyLinear(2)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(net(x), 1.0).to_event(1))

    with pytest.raises(ValueError, match="'weight' of LazyLinear has no shape yet"):
        log_evidence(lambda x: None, guide, torch.zeros(3, 2))


def test_what_is_no_number_is_named():
    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.factor("f", z * math.nan)

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    pyro.enable_validation(False)
    with pytest.raises(ValueError, match=r"site 'f' of the model \(Unit\): 12 NaN"):
        log_evidence(model, guide, num_particles=4)


@pytest.mark.parametrize("kernel", [RandomWalk(1.0), HMC(0.4, num_leapfrog=4)], ids=["rw", "hmc"])
def test_chains_of_angles_stay_on_the_circle(kernel):
    # The density of an angle repeats itself on the line; what the model makes of it does not.
    size = 400
    prior = dist.VonMises(torch.tensor(1.0), torch.tensor(0.5))
    x = torch.tensor(2.9)

    def model():
        with pyro.plate("data", size):
            z = pyro.sample("z", prior)
            pyro.sample("x", dist.Normal(z, 1.0), obs=x.expand(size))

    def guide():
        with pyro.plate("data", size):
            pyro.sample("z", dist.VonMises(torch.tensor(3.0), torch.tensor(1.0)))

    grid = (torch.arange(4000) + 0.5) / 4000 * 2 * math.pi - math.pi
    exact = (prior.log_prob(grid) + dist.Normal(grid, 1.0).log_prob(x)).logsumexp(0)
    exact = exact + math.log(2 * math.pi / 4000)
    result = log_evidence(
        model, guide, num_particles=20, schedule=15, kernel=kernel, keep_log_weight=True
    )
    assert_mean((result.log_weight - exact).exp().mean(0), 1.0)


def test_a_guide_that_marks_sites_for_enumeration_is_drawn_from():
    """As TraceRaoBlackwell_ELBO takes it: the same numbers as without the mark, and exact ones."""
    x = torch.tensor([-1.0, 0.5, 2.0, 3.0])

    def model(x):
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.Categorical(torch.ones(3)))
            z = pyro.sample("z", dist.Normal(y.double(), 1.0))
            pyro.sample("x", dist.Normal(z, 0.5), obs=x)

    def make(infer):
        def guide(x):
            with pyro.plate("data", len(x)):
                y = pyro.sample("y", dist.Categorical(torch.ones(len(x), 3)), infer=infer)
                pyro.sample("z", dist.Normal((4 * x + y) / 5, 0.2**0.5))

        return guide

    exact = dist.Normal(torch.arange(3.0)[:, None], 1.25**0.5).log_prob(x).logsumexp(0)
    marked, plain = (
        log_evidence(model, make(infer), x, num_particles=2000, seed=0)
        for infer in ({"enumerate": "parallel"}, {})
    )
    assert torch.equal(marked.log_evidence, plain.log_evidence)
    error = (marked.log_evidence - (exact - math.log(3))).abs()
    assert bool((error < 4 * marked.standard_error).all())
    with pytest.raises(ValueError, match="site 'y' of the guide is marked for enumeration"):
        log_evidence(model, make({"enumerate": "parallel"}), x, strict_enumeration_warning=True)
