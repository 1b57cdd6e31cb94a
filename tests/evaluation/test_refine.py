"""Posterior draws against exact posteriors, and what Predictive and ArviZ make of them."""

import math
import sys
import types
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch.nn.functional import conv1d

from pyro_mcvae import HMC, MALA, ULA, RandomWalk, refine, to_inference_data
from tests.cases import some_slow
from tests.estimates import called
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
from tests.params import in_turn

WAYS = {
    "resampled": {"num_particles": 50},
    "ais": {"schedule": 6, "num_particles": 10, "warmup": 5},
    "sis": {"schedule": 6, "kernel": ULA(), "num_particles": 20, "warmup": 5},
    "chain": {"schedule": 4, "num_particles": 1, "num_transitions": 6, "warmup": 5},
}


def test_a_plate_without_a_size_has_that_of_its_data():
    """As pyro/examples/vae has it: Pyro gives the plate's frame the size -1."""
    x = torch.tensor([1.0, -0.5, 2.0, 0.3])

    def program(x, guide=False):
        with pyro.plate("data"):
            z = pyro.sample("z", dist.Normal(x / 2 if guide else torch.zeros(4), 0.5**0.5))
            if not guide:
                pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    draws = refine(program, lambda x: program(x, True), x, num_samples=3)
    assert draws["z"].shape == (3, 4)
    assert draws.coords["data"].tolist() == [0, 1, 2, 3]


def assert_moments(draws, mean, variance):
    """Within 4.5 standard errors, and 3 percent of a standard deviation for the way's bias."""
    count = len(draws)
    error = (draws.mean(0) - mean).abs() / variance.sqrt()
    assert bool((error < 4.5 / math.sqrt(count) + 0.03).all()), error
    ratio = (draws.var(0) / variance - 1).abs()
    assert bool((ratio < 4.5 * math.sqrt(2 / count) + 0.05).all()), ratio


@pytest.mark.parametrize("way", WAYS)
def test_draws_of_one_plate_have_the_posteriors_moments(way):
    exact = ConjugateGaussian(N=10)
    draws = refine(exact.model, exact.guide, num_samples=1000, **WAYS[way])
    mean, sd = exact.posterior()
    assert_moments(draws["z"], mean, sd**2)


@pytest.mark.parametrize("way", some_slow(WAYS, *(WAYS.keys() - {"chain"})))
def test_draws_of_vectors_have_the_posteriors_moments(way):
    exact = ProbabilisticPCA(N=6)
    draws = refine(exact.model, exact.guide, num_samples=1000, **WAYS[way])
    mean, covariance = exact.posterior()
    assert_moments(draws["z"], mean, covariance.diagonal())
    result = torch.einsum("sni,snj->ij", draws["z"] - mean, draws["z"] - mean) / (1000 * 6)
    assert torch.allclose(result, covariance, atol=0.1 * float(covariance.diagonal().max()))


@pytest.mark.parametrize("way", some_slow(WAYS, *(WAYS.keys() - {"resampled"})))
def test_draws_of_global_and_local_latents_have_the_posteriors_moments(way):
    exact = HierarchicalGaussian(N=4)
    options = {**WAYS[way], "num_particles": 4 * WAYS[way]["num_particles"]}
    draws = refine(exact.model, exact.guide, num_samples=1500, **options)
    mean, covariance = exact.posterior()
    together = torch.cat([draws["theta"].unsqueeze(-1), draws["z"]], -1)
    assert_moments(together, mean, covariance.diagonal())


@pytest.mark.slow
def test_constrained_draws_are_in_their_own_space():
    exact = GammaPoisson(N=6)
    concentration, rate = exact.posterior()
    for options in (WAYS["resampled"], WAYS["ais"]):
        draws = refine(exact.model, exact.guide, num_samples=500, **options)
        assert bool((draws["z"] > 0).all())
        assert_moments(draws["z"], concentration / rate, concentration / rate**2 * 1.0)


@pytest.mark.slow
def test_states_of_a_program_that_does_not_broadcast_are_drawn():
    """The model is run again for them in the way that its particles are run in."""
    data, kernel = torch.tensor([0.3, -0.2, 0.9]), torch.tensor([[[0.5, 1.0, -0.3]]])

    def model():
        z = pyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
        # A convolution takes no leading dims but a batch's.
        mean = conv1d(z.unsqueeze(0), kernel, padding=1)[0]
        with pyro.plate("data", 3):
            y = pyro.sample("y", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            pyro.sample("x", dist.Normal(mean + y, 0.5), obs=data)

    def guide():
        pyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))

    linear = conv1d(torch.eye(3).unsqueeze(1), kernel, padding=1)[:, 0].T
    given_y = linear @ linear.T + 0.25 * torch.eye(3)
    y = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    prior = (y * math.log(0.3) + (1 - y) * math.log(0.7)).sum(-1)
    weights = (dist.MultivariateNormal(y, given_y).log_prob(data) + prior).softmax(0)

    draws = refine(model, guide, num_samples=4000, num_particles=100, seed=1)
    assert draws["y"].shape == (4000, 3)
    assert_moments(draws["y"], weights @ y, (weights @ y) * (1 - weights @ y))


def test_discrete_draws_are_resampled():
    exact = DiscreteMixture()
    draws = refine(exact.model, exact.guide, num_samples=4000, num_particles=50)
    probs = exact.posterior().exp()
    for c in range(probs.shape[-1]):
        error = ((draws["z"] == c).double().mean(0) - probs[:, c]).abs()
        assert bool((error < 4.5 * (probs[:, c] * (1 - probs[:, c]) / 4000).sqrt() + 0.02).all())


@in_turn(
    cls=[SequentialPlate, NestedGaussian, LinearGaussianChain, BetaBernoulli, HierarchicalGaussian],
    vectorize=[True, False],
)
def test_shapes_are_those_of_one_run(cls, vectorize):
    exact = cls()
    trace = pyro.poutine.trace(exact.model).get_trace()
    draws = refine(
        exact.model,
        exact.guide,
        num_samples=3,
        num_particles=2,
        vectorize_particles=vectorize,
    )
    latents = {n for n, s in trace.nodes.items() if s["type"] == "sample" and not s["is_observed"]}
    latents -= {"data", "groups", "individuals"}
    assert set(draws) == latents
    for n, value in draws.items():
        assert value.shape == (3, *trace.nodes[n]["value"].shape), n
    trace.compute_log_prob()
    for n, value in draws.log_likelihood.items():
        assert value.shape == (3, *trace.nodes[n]["log_prob"].shape), n
        assert torch.equal(draws.observed[n], trace.nodes[n]["value"])


@pytest.mark.parametrize("options", [{}, {"schedule": 2}])
def test_likelihoods_are_those_of_the_draws(options):
    exact = ConjugateGaussian(N=5)
    draws = refine(exact.model, exact.guide, num_samples=7, num_particles=3, **options)
    expected = dist.Normal(draws["z"], 1.0).log_prob(exact.x)
    assert torch.allclose(draws.log_likelihood["x"], expected)


def test_chunks_have_the_law_of_the_whole():
    exact = ConjugateGaussian(N=10)
    mean, sd = exact.posterior()
    draws = refine(exact.model, exact.guide, num_samples=1500, num_particles=20, chunk_size=700)
    assert_moments(draws["z"], mean, sd**2)
    assert draws.log_weight.shape == (1500, 10)


@pytest.mark.slow
def test_globals_may_stay_the_guides():
    exact = HierarchicalGaussian(N=4)
    draws = refine(exact.model, exact.guide, num_samples=80, num_particles=30, joint=False)
    p = exact.params()
    assert_moments(draws["theta"], p["m"], (2 * p["log_s"]).exp())
    c0, c1, sz = exact.posterior_z()
    given = draws["z"] - (c0 + c1 * draws["theta"].unsqueeze(-1))
    assert_moments(given, torch.zeros(4), (sz**2).expand(4))


def test_minibatches_stay_the_same():
    exact = HierarchicalGaussian(N=10, subsample_size=3)
    draws = refine(exact.model, exact.guide, num_samples=20, num_particles=5, joint=False)
    assert draws["z"].shape == (20, 3)
    assert len(set(draws["theta"].tolist())) == 20
    assert torch.equal(draws.observed["x"], exact.x[draws.coords["data"]])


@pytest.mark.parametrize("parallel", [True, False])
def test_predictive_takes_the_draws(parallel):
    exact, count = ConjugateGaussian(N=5), 2000 if parallel else 200
    draws = refine(exact.model, exact.guide, num_samples=count, num_particles=20)

    def model():
        with pyro.plate("data", 5):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0))

    result = Predictive(model, posterior_samples=draws, parallel=parallel)()["x"]
    mean, sd = exact.posterior()
    assert result.shape == (count, 5)
    assert_moments(result, mean, sd**2 + 1)


@pytest.mark.parametrize(
    "auto", [AutoNormal, pytest.param(AutoMultivariateNormal, marks=pytest.mark.slow)]
)
def test_auto_guides_are_refined_in_the_models_space(auto):
    x = torch.tensor([0.5, 1.5, 1.0])

    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, scale))
            pyro.sample("x", dist.Normal(z, 0.7), obs=x)

    guide = called(auto(model, init_scale=0.5))
    draws = refine(model, guide, num_samples=300, num_particles=5, schedule=4, num_transitions=3)
    assert set(draws) == {"scale", "z"}
    assert bool((draws["scale"] > 0).all())
    # Given the scale, z is Gaussian: the sum of standardised errors has mean 0.
    variance = 1 / (1 / draws["scale"] ** 2 + 1 / 0.49).unsqueeze(-1)
    score = (draws["z"] - variance * x / 0.49) / variance.sqrt()
    assert_moments(score, torch.zeros(3), torch.ones(3))


def test_nothing_is_trained():
    exact = ConjugateGaussian(N=5)
    kernel = HMC()
    one = refine(
        exact.model, exact.guide, num_samples=5, kernel=kernel, schedule=2, warmup=2, seed=1
    )
    assert float(kernel.step_size()) == pytest.approx(0.1)
    again = refine(
        exact.model, exact.guide, num_samples=5, kernel=kernel, schedule=2, warmup=2, seed=1
    )
    assert torch.equal(one["z"], again["z"])
    assert list(pyro.get_param_store().keys()) == []
    assert not one["z"].requires_grad


def test_a_narrow_guide_is_warned_of():
    exact = ConjugateGaussian(N=5)
    exact.set_guide("exact", log_s=-2.5)
    with pytest.warns(UserWarning, match=r"Pareto k of the weights is above 0.7 for \d of 5"):
        refine(exact.model, exact.guide, num_samples=500, num_particles=10)


@pytest.mark.slow
def test_the_remedy_for_short_chains_is_the_call_without_options():
    exact = ConjugateGaussian(N=5)
    exact.set_guide("exact", log_s=-2.5)
    options = {"schedule": 2, "kernel": HMC(1e-3), "warmup": 1}
    with pytest.warns(UserWarning, match="Leave out all options but num_samples"):
        refine(exact.model, exact.guide, num_samples=200, num_particles=1, **options)
    assert refine(exact.model, exact.guide, num_samples=200, seed=0).verdict.trusted


def test_unadjusted_kernels_make_no_transitions_at_the_end():
    exact = ConjugateGaussian(N=5)
    with pytest.raises(ValueError, match="which ULA does not"):
        refine(exact.model, exact.guide, num_transitions=3, kernel=ULA())


def test_sites_that_come_and_go_are_named():
    def program():
        n = pyro.sample("n", dist.Bernoulli(0.5))
        if n > 0.5:
            pyro.sample("z", dist.Normal(0.0, 1.0))

    options = {"num_samples": 20, "num_particles": 1, "vectorize_particles": False}
    with pytest.raises(ValueError, match="'z' is drawn in some executions"):
        refine(program, program, joint=True, **options)


# ArviZ


@pytest.fixture
def arviz():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("arviz")


@pytest.mark.clients
def test_arviz_gets_every_group(arviz):
    exact = NestedGaussian()
    draws = refine(exact.model, exact.guide, num_samples=100, schedule=3, warmup=2, kernel=MALA())
    data = to_inference_data(draws)
    assert set(data.posterior.data_vars) == {"a", "b"}
    assert data.posterior["a"].dims == ("chain", "draw", "groups")
    assert data.posterior["b"].dims == ("chain", "draw", "individuals", "groups")
    assert data.posterior["a"].shape == (4, 25, 4)
    assert data.log_likelihood["x"].dims == ("chain", "draw", "individuals", "groups")
    assert data.observed_data["x"].dims == ("individuals", "groups")
    stats = data.sample_stats
    assert set(stats.data_vars) == {"log_weight", "acceptance_rate", "step_size"}
    assert stats["log_weight"].dims == ("chain", "draw", "groups")
    assert stats["step_size"].shape == (4, 25)
    summary = arviz.summary(data)
    assert len(summary) == 4 + 12
    assert bool((summary["r_hat"].astype(float) < 1.2).all())
    loo = arviz.loo(data)
    assert math.isfinite(float(loo.elpd_loo if hasattr(loo, "elpd_loo") else loo.elpd))


@pytest.mark.clients
def test_arviz_of_the_next_major_version_gets_every_group(monkeypatch):
    """ArviZ 1.x is made of parts, whose from_dict takes the groups in a dict."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = pytest.importorskip("arviz_base")
    arviz = types.ModuleType("arviz")
    arviz.__version__, arviz.from_dict = "1.0.0", base.from_dict
    monkeypatch.setitem(sys.modules, "arviz", arviz)
    exact = NestedGaussian()
    data = to_inference_data(
        refine(exact.model, exact.guide, num_samples=100, schedule=2, warmup=2)
    )
    assert data["posterior"]["b"].dims == ("chain", "draw", "individuals", "groups")
    assert data["posterior"]["b"].shape == (4, 25, 3, 4)
    assert data["log_likelihood"]["x"].dims == ("chain", "draw", "individuals", "groups")
    assert data["sample_stats"]["log_weight"].dims == ("chain", "draw", "groups")
    assert data["observed_data"]["x"].dims == ("individuals", "groups")


@pytest.mark.slow
def test_plots_of_arviz_take_the_draws(arviz):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    exact = ConjugateGaussian(N=3)
    data = to_inference_data(refine(exact.model, exact.guide, num_samples=100))
    # plot_posterior became plot_dist in ArviZ 1.x, where 0.x has another function of this name.
    dist_plot = "plot_posterior" if hasattr(arviz, "plot_posterior") else "plot_dist"
    for plot in ("plot_trace", "plot_forest", dist_plot, "plot_rank"):
        getattr(arviz, plot)(data)
    import matplotlib.pyplot as plt

    plt.close("all")


def test_a_plate_may_have_a_sites_name(arviz):
    def model():
        with pyro.plate("z", 3):
            z = pyro.sample("z_", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.zeros(3))

    def guide():
        with pyro.plate("z", 3):
            pyro.sample("z_", dist.Normal(torch.zeros(3), 0.8))

    draws = refine(model, guide, num_samples=20)
    draws["z"] = draws.pop("z_")
    draws.dims["z"] = draws.dims.pop("z_")
    assert to_inference_data(draws).posterior["z"].dims == ("chain", "draw", "z_plate")


def test_random_walks_refine_too():
    exact = ConjugateGaussian(N=5)
    draws = refine(
        exact.model,
        exact.guide,
        num_samples=500,
        kernel=RandomWalk(),
        schedule=5,
        warmup=5,
        num_transitions=10,
    )
    mean, sd = exact.posterior()
    assert_moments(draws["z"], mean, sd**2)


def test_data_wider_than_the_event_that_scores_them():
    """Two visits of a site under one event: Pyro broadcasts the value, and so do the draws."""
    y = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 2.0]])

    def model():
        with pyro.plate("s", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z.unsqueeze(-1), 1.0).to_event(1), obs=y)

    def guide():
        with pyro.plate("s", 3):
            pyro.sample("z", dist.Normal(y.sum(-1) / 3, 3**-0.5))

    draws = refine(model, guide, num_samples=2000)
    assert_moments(draws["z"], y.sum(-1) / 3, torch.full((3,), 1 / 3))
    assert torch.equal(draws.observed["y"], y)
