"""Predictive draws, and every group that ArviZ reads, with a stand-in for ArviZ and with itself."""

import sys
import types
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoNormal
from pyro.infer.reparam import LocScaleReparam, TransformReparam

from pyro_mcvae import refine, sandwich, to_inference_data
from tests.models import ConjugateGaussian, DiscreteMixture, NestedGaussian


@pytest.fixture
def groups(monkeypatch):
    """Calls that ``arviz.from_dict`` gets, in the form of ArviZ 1.x, or of 0.x."""
    arviz = types.ModuleType("arviz")
    arviz.__version__ = "1.0.0"
    arviz.from_dict = lambda groups, coords, dims: types.SimpleNamespace(
        groups=groups, coords=coords, dims=dims
    )
    monkeypatch.setitem(sys.modules, "arviz", arviz)


def test_predictive_draws_belong_to_their_posterior_draws(groups):
    """z | x ~ N(x / 2, 1 / 2), and x' | z ~ N(z, 1); by itself x' ~ N(0, 2)."""
    exact = ConjugateGaussian(N=40)
    exact.set_guide("exact")
    draws = refine(exact.model, exact.guide, num_samples=40, num_particles=1)
    data = to_inference_data(draws, exact.model, num_prior=30, seed=0)
    z, x = (data.groups[g][n] for g, n in (("posterior", "z"), ("posterior_predictive", "x")))
    assert z.shape == x.shape == (4, 10, 40)
    assert (x - z).var() == pytest.approx(1.0, abs=4 * (2 / 1600) ** 0.5)
    assert abs((x - z).mean()) < 4 / 1600**0.5
    prior, predicted = data.groups["prior"]["z"], data.groups["prior_predictive"]["x"]
    assert prior.shape == predicted.shape == (1, 30, 40)
    assert prior.var() == pytest.approx(1.0, abs=0.16)
    assert predicted.var() == pytest.approx(2.0, abs=0.33)
    assert data.dims["x"] == data.dims["z"] == ["data"]


def test_predictive_draws_are_of_the_minibatch(groups):
    exact = ConjugateGaussian(N=40, subsample_size=3)
    exact.x = 100.0 * torch.arange(40.0)

    def model():
        with exact.plate() as index:
            z = pyro.sample("z", dist.Normal(100.0 * index, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=exact.x[index])

    def guide():
        with exact.plate() as index:
            pyro.sample("z", dist.Normal(100.0 * index, 0.8))

    draws = refine(model, guide, num_samples=20)
    data = to_inference_data(draws, model, num_prior=7)
    for group in ("posterior_predictive", "prior_predictive"):
        drawn = torch.as_tensor(data.groups[group]["x"])
        assert bool(((drawn - 100.0 * draws.coords["data"]).abs() < 8).all())
    once, again = (to_inference_data(draws, model, num_prior=0, seed=0).groups for _ in range(2))
    assert (once["posterior_predictive"]["x"] == again["posterior_predictive"]["x"]).all()
    assert "prior" not in once
    assert data.groups["prior_predictive"]["x"].shape == (1, 7, 3)


def deterministic(x=None):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 3):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + z)
        pyro.sample("x", dist.Normal(theta, 1.0), obs=x)


def its_guide(x=None):
    mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("data", 3):
        pyro.sample("z", dist.Normal((x - mu) / 2, 0.8))


def test_deterministic_values_keep_their_shape(groups):
    x = torch.tensor([0.5, -1.0, 2.0])
    draws = refine(deterministic, its_guide, x, num_samples=40)
    data = to_inference_data(draws, deterministic, x, num_prior=5)
    for group, shape in (("posterior", (4, 10, 3)), ("prior", (1, 5, 3))):
        found = data.groups[group]
        assert found["theta"].shape == shape
        assert torch.equal(
            torch.as_tensor(found["theta"]),
            torch.as_tensor(found["mu"])[..., None] + torch.as_tensor(found["z"]),
        )
    assert data.groups["posterior_predictive"]["x"].shape == (4, 10, 3)
    assert data.dims["theta"] == ["data"]


def test_what_is_computed_from_data_is_computed_from_those_that_were_seen(groups):
    x, seen = torch.tensor([1.0, 0.0, -1.0]), torch.tensor([True, False, True])

    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(mu, 1.0), obs=x, obs_mask=seen)
            pyro.deterministic("residual", z - mu)
            pyro.sample("y", dist.Normal(z, 1.0), obs=x + 0.5)

    def guide():
        pyro.sample("mu", dist.Normal(torch.tensor(0.2), 0.6))
        with pyro.plate("data", 3):
            pyro.sample("z_unobserved", dist.Normal(torch.full((3,), 0.3), 0.8))

    draws = refine(model, guide, num_samples=20, num_particles=5)
    data = to_inference_data(draws, model, num_prior=7, seed=0)
    posterior, prior = (
        {n: torch.as_tensor(v) for n, v in data.groups[g].items()} for g in ("posterior", "prior")
    )
    expected = torch.where(seen, x, posterior["z_unobserved"])
    assert torch.equal(posterior["z"], expected)
    assert torch.equal(posterior["residual"], expected - posterior["mu"][..., None])
    assert torch.equal(prior["residual"], prior["z"] - prior["mu"][..., None])
    assert (prior["z"].std(1) > 0.1).all()  # by itself the model draws what it observes
    theirs = Predictive(model, posterior_samples=draws)()
    assert torch.equal(theirs["residual"].reshape(20, 3), posterior["residual"].reshape(20, 3))


@pytest.mark.parametrize(
    "reparam", [LocScaleReparam(0.0), LocScaleReparam(0.3), TransformReparam()]
)
def test_reparameterized_sites_are_in_the_posterior_and_the_prior(reparam, groups):
    def schools():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("schools", 3):
            base = dist.Normal(mu, 2.0)
            moved = dist.TransformedDistribution(base, dist.transforms.AffineTransform(1.0, 2.0))
            theta = pyro.sample("theta", base if isinstance(reparam, LocScaleReparam) else moved)
            pyro.sample("x", dist.Normal(theta, 1.0), obs=torch.tensor([0.5, -1.0, 2.0]))

    model = poutine.reparam(schools, {"theta": reparam})
    guide = AutoNormal(model)
    guide()
    draws = refine(model, guide, num_samples=20, num_particles=1)
    data = to_inference_data(draws, model, num_prior=7, seed=0)
    theirs = Predictive(model, posterior_samples=draws)()
    found = torch.as_tensor(data.groups["posterior"]["theta"])
    assert found.shape == (4, 5, 3)
    assert torch.equal(found.reshape(20, 3), theirs["theta"].reshape(20, 3))
    assert data.groups["prior"]["theta"].shape == (1, 7, 3)
    assert data.dims["theta"] == ["schools"]


@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (1, 3), (3,), (1, 1), (2, 3)])
def test_data_that_broadcast_over_their_plates(shape, groups):
    x = torch.full(shape, 0.3)

    def model(x):
        with pyro.plate("rows", 2, dim=-2), pyro.plate("columns", 3, dim=-1):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        with pyro.plate("rows", 2, dim=-2), pyro.plate("columns", 3, dim=-1):
            pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))

    draws = refine(model, guide, x, num_samples=6, num_particles=1)
    data = to_inference_data(draws, model, x, num_prior=3)
    assert data.dims["x"] == ["rows", "columns"]
    for group, lead in (("observed_data", ()), ("log_likelihood", (1, 6))):
        assert data.groups[group]["x"].shape == (*lead, 2, 3)
    assert (data.groups["observed_data"]["x"] == x.expand(2, 3).numpy()).all()
    if x.numel() == 6:
        assert sandwich(model, guide, x, num_particles=5, schedule=3, warmup=2).lower.shape[
            -2:
        ] == (2, 3)
        return
    with pytest.raises(ValueError, match=r"pass data in the shape of the plates \(\.expand"):
        sandwich(model, guide, x, num_particles=5, schedule=3, warmup=2)


def test_a_sandwich_of_data_without_a_plates_dim_of_size_one():
    def model(x):
        with pyro.plate("one", 1, dim=-2), pyro.plate("columns", 3, dim=-1):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        with pyro.plate("one", 1, dim=-2), pyro.plate("columns", 3, dim=-1):
            pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))

    found = sandwich(model, guide, torch.ones(3), num_particles=5, schedule=3, warmup=2)
    torch.testing.assert_close(found.lower, found.upper)  # the guide is the posterior


def test_a_sandwich_on_a_model_with_deterministic_sites():
    found = sandwich(
        deterministic, its_guide, torch.zeros(3), num_simulations=3, schedule=4, warmup=4
    )
    assert found.lower.shape == (3,)
    assert float(found.mean_gap) < 1.0


def test_all_draws_have_names(groups):
    exact = NestedGaussian()
    draws = refine(exact.model, exact.guide, num_samples=12)
    data = to_inference_data(draws, exact.model, num_prior=3)
    assert data.groups["posterior_predictive"]["x"].shape == (1, 12, 3, 4)
    assert data.dims["x"] == ["individuals", "groups"]


def test_discrete_draws_and_predictive_of_pyro(groups):
    exact = DiscreteMixture(N=5)
    draws = refine(exact.model, exact.guide, num_samples=20)
    data = to_inference_data(draws, exact.model, num_prior=2)
    assert data.groups["posterior_predictive"]["x"].shape == (4, 5, 5)
    drawn = Predictive(
        deterministic,
        posterior_samples=refine(deterministic, its_guide, torch.zeros(3), num_samples=6),
    )()
    assert drawn["x"].shape == drawn["theta"].shape == (6, 3)


def test_a_factor_has_a_likelihood_and_no_value(groups):
    def model(x=torch.zeros(3)):  # noqa: B008
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("x", dist.Normal(b, 1.0), obs=x)
            pyro.factor("likelihood", -((x - b) ** 2))

    guide = AutoNormal(model)
    guide()
    draws = refine(model, guide, num_samples=20, num_particles=1)
    found = to_inference_data(draws, model, num_prior=2).groups
    factor = torch.as_tensor(found["log_likelihood"]["likelihood"])
    assert torch.allclose(factor, -torch.as_tensor(found["posterior"]["b"])[..., None].square())
    for group in ("observed_data", "posterior_predictive", "prior_predictive"):
        assert set(found[group]) == {"x"}


def test_arguments(groups):
    exact = ConjugateGaussian(N=4)
    draws = refine(exact.model, exact.guide, num_samples=4)
    with pytest.raises(ValueError, match="the model has no site 'z', which the draws have"):
        to_inference_data(draws, lambda: pyro.sample("a", dist.Normal(0.0, 1.0)))
    with pytest.raises(ValueError, match="num_prior must be an int of at least 0"):
        to_inference_data(draws, exact.model, num_prior=-1)


@pytest.mark.clients
def test_arviz_plots_and_compares_what_is_written():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arviz = pytest.importorskip("arviz")
        matplotlib = pytest.importorskip("matplotlib")
        matplotlib.use("Agg")
        exact = ConjugateGaussian(N=6)
        draws = refine(exact.model, exact.guide, num_samples=200)
        data = to_inference_data(draws, exact.model, num_prior=100)
        for name in ("posterior_predictive", "prior", "prior_predictive"):
            assert name in data.groups() if callable(data.groups) else name in data.children
        arviz.plot_forest(data)
        ppc = "plot_ppc" if hasattr(arviz, "plot_ppc") else "plot_ppc_dist"
        getattr(arviz, ppc)(data)
        arviz.loo(data)
        assert len(arviz.compare({"a": data, "b": data})) == 2
        import matplotlib.pyplot as plt

        plt.close("all")


def test_data_of_another_number_are_refused(groups):
    """Which were predicted in silence, as many as there had been."""

    def model(n):
        with pyro.plate("data", n):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.zeros(n))

    def guide(n):
        with pyro.plate("data", n):
            pyro.sample("z", dist.Normal(0.0, torch.ones(n)))

    draws = refine(model, guide, 3, num_samples=20)
    assert to_inference_data(draws, model, 3).groups["posterior_predictive"]["x"].shape[-1] == 3
    with pytest.raises(ValueError, match=r"plate 'data' has size 5 .*, and 3 in the draws"):
        to_inference_data(draws, model, 5)
