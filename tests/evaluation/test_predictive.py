"""Every group that ArviZ reads, with a stand-in for ArviZ and with itself."""

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
from pyro.infer.reparam import LocScaleReparam

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
    data = to_inference_data(draws)
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

    result = sandwich(model, guide, torch.ones(3), num_particles=5, schedule=3, warmup=2)
    torch.testing.assert_close(result.lower, result.upper)  # the guide is the posterior


@pytest.mark.slow
def test_a_sandwich_on_a_model_with_deterministic_sites():
    result = sandwich(
        deterministic, its_guide, torch.zeros(3), num_simulations=3, schedule=4, warmup=4
    )
    assert result.lower.shape == (3,)
    assert float(result.mean_gap) < 1.0


BRIEF = {"num_particles": 1, "schedule": 2, "num_transitions": 2}


@pytest.mark.slow
def test_all_draws_have_names(groups):
    exact = NestedGaussian()
    data = to_inference_data(refine(exact.model, exact.guide, num_samples=12, **BRIEF))
    assert data.groups["log_likelihood"]["x"].shape == (1, 12, 3, 4)
    assert data.dims["x"] == data.dims["b"] == ["individuals", "groups"]
    exact = DiscreteMixture(N=5)
    data = to_inference_data(refine(exact.model, exact.guide, num_samples=20))
    assert data.groups["posterior"]["z"].shape == (4, 5, 5)


def test_minibatches_have_the_indices_of_their_data(groups):
    exact = ConjugateGaussian(N=50, subsample_size=4)
    draws = refine(exact.model, exact.guide, num_samples=20)
    data = to_inference_data(draws)
    assert data.coords["data"].tolist() == draws.coords["data"].tolist()
    assert (data.groups["observed_data"]["x"] == exact.x[draws.coords["data"]].numpy()).all()


@pytest.mark.slow
def test_predictive_of_pyro_takes_draws_of_computed_and_reparameterized_sites():
    """From the non-centered parameterization of the same model."""

    def schools():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("schools", 3):
            theta = pyro.sample("theta", dist.Normal(mu, 2.0))
            pyro.sample("x", dist.Normal(theta, 1.0), obs=torch.tensor([0.5, -1.0, 2.0]))

    model = poutine.reparam(schools, {"theta": LocScaleReparam(0.0)})
    guide = AutoNormal(model)
    guide()
    draws = refine(model, guide, num_samples=20, **BRIEF)
    result = Predictive(model, posterior_samples=draws)()
    centered = draws["mu"][:, None] + 2 * draws["theta_decentered"]
    assert torch.allclose(result["theta"].reshape(20, 3), centered)
    draws = refine(deterministic, its_guide, torch.zeros(3), num_samples=6)
    drawn = Predictive(deterministic, posterior_samples=draws)()
    assert drawn["x"].shape == drawn["theta"].shape == (6, 3)


@pytest.mark.slow
def test_a_factor_has_a_likelihood_and_no_value(groups):
    def model(x=torch.zeros(3)):  # noqa: B008
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("x", dist.Normal(b, 1.0), obs=x)
            pyro.factor("likelihood", -((x - b) ** 2))

    guide = AutoNormal(model)
    guide()
    draws = refine(model, guide, num_samples=20, **BRIEF)
    result = to_inference_data(draws).groups
    factor = torch.as_tensor(result["log_likelihood"]["likelihood"])
    assert torch.allclose(factor, -torch.as_tensor(result["posterior"]["b"])[..., None].square())
    assert set(result["observed_data"]) == {"x"}


@pytest.mark.clients
def test_arviz_plots_and_compares_what_is_written():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arviz = pytest.importorskip("arviz")
        matplotlib = pytest.importorskip("matplotlib")
        matplotlib.use("Agg")
        exact = ConjugateGaussian(N=6)
        draws = refine(exact.model, exact.guide, num_samples=200)
        data = to_inference_data(draws)
        arviz.plot_forest(data)
        arviz.loo(data)
        assert len(arviz.compare({"a": data, "b": data})) == 2
        import matplotlib.pyplot as plt

        plt.close("all")
