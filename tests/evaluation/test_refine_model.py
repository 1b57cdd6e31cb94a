"""Posterior draws without a guide: exact moments, equivariance, modes, verdicts, side effects."""

import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoNormal

from pyro_mcvae import HMC, laplace_init, refine
from pyro_mcvae.evaluation import ensemble
from pyro_mcvae.evaluation.ensemble import normal_scores, split_r_hat
from tests.models import ConjugateGaussian

X = torch.tensor([-2.0, 0.5, 1.0, 3.0])


def assert_near(draws, mean, sd, errors=5.0, size=500.0):
    """Within five errors of ``size`` independent draws."""
    assert bool(((draws.mean(0) - mean).abs() < errors * sd / size**0.5).all())
    assert bool(((draws.std(0) / sd).log().abs() < errors * (0.5 / size) ** 0.5).all())


def regression(scale=1.0, correlated=False):
    """A posterior of a line whose coefficients have standard deviations apart by ``scale``."""
    x = torch.linspace(0.0, 1.0, 30) + (1000.0 if correlated else 0.0)
    y = 0.3 * x + 0.1 * torch.sin(17 * x)

    def model():
        b = pyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), (2,))) / scale
        mean = b[..., :1] + b[..., 1:] * x
        pyro.sample("y", dist.Normal(mean, 0.1).to_event(1), obs=y)

    design = torch.stack([torch.ones_like(x), x], -1)
    covariance = 0.01 * torch.linalg.inv(design.T @ design)
    return model, covariance @ design.T @ y / 0.01 * scale, covariance.diagonal().sqrt() * scale


@pytest.mark.parametrize(("scale", "correlated"), [(1.0, False), (1e-3, False), (1e3, True)])
def test_draws_do_not_depend_on_the_scales_of_latents(scale, correlated):
    model, mean, sd = regression(scale, correlated)
    draws = refine(model, seed=0)
    assert draws.verdict.trusted
    assert_near(draws["b"], mean, sd)


@pytest.mark.slow
def test_affine_maps_of_latents_map_the_draws():
    factor = torch.tensor([[1e3, 0.0], [0.999e-3, 1e-3 * (1 - 0.999**2) ** 0.5]])

    def model(factor):
        z = pyro.sample("z", dist.MultivariateNormal(torch.zeros(2), scale_tril=factor))
        white = torch.linalg.solve_triangular(factor, z.unsqueeze(-1), upper=False).squeeze(-1)
        pyro.sample("x", dist.Normal(white, 0.5).to_event(1), obs=torch.tensor([1.0, -2.0]))

    for matrix in (torch.eye(2), factor):
        draws = refine(model, matrix, seed=0)
        white = torch.linalg.solve_triangular(matrix, draws["z"].T, upper=False).T
        assert draws.verdict.trusted
        assert_near(white, torch.tensor([0.8, -1.6]), torch.tensor(0.2**0.5))


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_moments_of_a_gaussian_posterior_over_seeds(count):
    """Errors of means and of scales, in units of 1,000 independent draws, have mean 0."""
    exact = ConjugateGaussian(N=2)
    mean, sd = exact.posterior()
    of_means, of_scales = [], []
    for seed in range(count):
        draws = refine(exact.model, seed=seed)
        assert draws.verdict.trusted
        of_means.append((draws["z"].mean(0) - mean) / sd * 1000**0.5)
        of_scales.append((draws["z"].std(0) / sd).log() * 2000**0.5)
        assert_near(draws["z"], mean, sd)
    for z in (torch.stack(of_means), torch.stack(of_scales)):
        assert float(z.mean().abs()) < 5 / z.numel() ** 0.5
        assert float(z.square().mean()) < 2.5


def test_two_modes_are_both_reported_with_their_masses():
    def model():
        a = pyro.sample("a", dist.ImproperUniform(dist.constraints.real, (), ()))
        left = dist.Normal(-8.0, 0.5).log_prob(a) + math.log(0.3)
        pyro.factor("f", torch.logaddexp(left, dist.Normal(6.0, 1.0).log_prob(a) + math.log(0.7)))

    draws = refine(model, seed=0)
    assert len(draws.verdict.modes) == 2
    assert sum(share for _, share in draws.verdict.modes) == pytest.approx(1.0)
    share = float((draws["a"] < 0).double().mean())
    assert share == pytest.approx(0.3, abs=5 * (0.21 / 500) ** 0.5)
    assert draws.verdict.trusted
    assert "2 modes" in str(draws)


@pytest.fixture
def briefly(monkeypatch):
    """Run twenty transitions of fifty chains, after a short warm-up."""
    monkeypatch.setattr(ensemble, "_CHAINS", 50)
    monkeypatch.setattr(ensemble, "_CHECKED", (20,))
    monkeypatch.setattr(ensemble, "_MOST_WINDOWS", 6)


@pytest.mark.parametrize("count", [30, 101, 160, 430])
def test_draws_of_any_number_come_from_the_chains_of_all_starts(count, monkeypatch, briefly):
    def model():
        a = pyro.sample("a", dist.ImproperUniform(dist.constraints.real, (), ()))
        pyro.factor("f", torch.logaddexp(*(dist.Normal(m, 1.0).log_prob(a) for m in (-30.0, 30.0))))

    jump = ensemble.Ensemble._jump
    stay = lambda self, state: (state, jump(self, state)[1])  # noqa: E731
    monkeypatch.setattr(ensemble.Ensemble, "_jump", stay)
    draws = refine(model, num_samples=count, seed=0)
    sides = (draws["a"] > 0).double()
    per_chain = math.ceil(count / draws.chains)
    assert abs(float(sides.mean()) - 0.5) <= 2 * per_chain / count  # half of the chains start there
    for chain in sides.split(per_chain):
        assert chain.unique().numel() == 1  # a chain stays in its mode
    assert math.ceil(count / per_chain) == draws.chains
    ess, r_hat = draws._diagnostics(sides + 0.01 * torch.randn(count))
    if per_chain >= 4:
        assert float(r_hat) > 1.5
        assert float(ess) < 2 * draws.chains
    else:
        assert (ess, r_hat) == (str(count), "")
    assert draws._diagnostics(torch.ones(count)) == ("", "")


@pytest.mark.slow
def test_modes_that_do_not_mix_are_not_trusted(briefly):
    """Ten coordinates between chains that the fitted normal densities do not propose: two rings."""

    def model():
        a = pyro.sample("a", dist.ImproperUniform(dist.constraints.real, (), (8,)))
        radii = [(a - c).square().sum(-1).sqrt() for c in (-12.0, 12.0)]
        rings = [dist.Normal(4.0, 0.02).log_prob(r) for r in radii]
        pyro.factor("f", torch.logaddexp(*rings))

    draws = refine(model, seed=0)
    assert not draws.verdict.trusted
    assert "cannot be trusted" in str(draws)


def test_standard_deviations_that_are_not_known_are_not_trusted(briefly):
    def model():
        pyro.sample("a", dist.Cauchy(0.0, 1.0))
        pyro.factor("f", torch.zeros(()))

    draws = refine(model, seed=0)
    assert any("standard deviation of a" in reason for reason in draws.verdict.reasons)


@pytest.mark.parametrize("form", ["improper", "mask", "context"])
def test_flat_priors(form):
    def model():
        flat = {
            "improper": dist.ImproperUniform(dist.constraints.positive, (), ()),
            "mask": dist.LogNormal(0.0, 1.0).mask(False),
            "context": dist.LogNormal(0.0, 1.0),
        }[form]
        with poutine.mask(mask=False) if form == "context" else pyro.plate("one", 1, dim=-2):
            if form == "context":
                s = pyro.sample("s", flat)
        if form != "context":
            s = pyro.sample("s", flat)
        pyro.factor("f", dist.Gamma(5.0, 2.0).log_prob(s))

    draws = refine(model, seed=0)
    assert_near(draws["s"], 2.5, torch.tensor(5.0).sqrt() / 2)


@pytest.mark.slow
def test_a_cholesky_factorization_that_fails_rejects_a_proposal(monkeypatch):
    monkeypatch.setattr(ensemble, "_CHAINS", 40)  # all are run one by one where one fails

    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        # Positive definite below 1.
        matrix = torch.eye(2) - a[..., None, None] * torch.eye(2)
        factor = torch.linalg.cholesky(matrix)
        pyro.factor("f", 0.0 * factor.diagonal(dim1=-2, dim2=-1).sum(-1))

    draws = refine(model, seed=0)
    normal = dist.Normal(0.0, 1.0)
    below = normal.cdf(torch.tensor(1.0))
    mean = -normal.log_prob(torch.tensor(1.0)).exp() / below
    assert bool((draws["a"] < 1).all())
    sd = (1 + mean - mean**2).sqrt()
    assert_near(draws["a"], mean, sd)


@pytest.mark.slow
def test_enumerated_sites_are_summed_and_drawn_last():
    def model():
        p = pyro.sample("p", dist.Beta(2.0, 2.0))
        with pyro.plate("data", 4):
            k = pyro.sample("k", dist.Bernoulli(p), infer={"enumerate": "parallel"})
            pyro.sample("x", dist.Normal(2 * k, 1.0), obs=X)

    draws = refine(model, seed=0)
    grid = torch.linspace(0.0005, 0.9995, 1000)
    on, off = (dist.Normal(m, 1.0).log_prob(X).exp() for m in (2.0, 0.0))
    prior = dist.Beta(2.0, 2.0).log_prob(grid).exp()
    weights = prior * (grid[:, None] * on + (1 - grid[:, None]) * off).prod(-1)
    weights /= weights.sum()
    mean = (weights * grid).sum()
    assert_near(draws["p"], mean, (weights * (grid - mean).square()).sum().sqrt())
    assert draws["k"].shape == (1000, 4)


def test_discrete_sites_that_are_not_enumerated_are_named():
    def model():
        k = pyro.sample("k", dist.Bernoulli(0.5))
        pyro.sample("x", dist.Normal(k, 1.0), obs=torch.tensor(0.3))

    with pytest.raises(ValueError, match="site 'k' is discrete"):
        refine(model)


LATENTS_ON_NO_LINE = {
    "(MixtureSameFamily) has no unconstrained form (Cannot transform Mixture": lambda: (
        dist.MixtureSameFamily(
            dist.Categorical(torch.ones(2)), dist.Normal(torch.tensor([-5.0, 5.0]), 1.0)
        )
    ),
    "is an angle (VonMises).*periodic": lambda: dist.VonMises(0.0, 1.0),
    "(ProjectedNormal) has no unconstrained form (Cannot transform _Sphere": lambda: (
        dist.ProjectedNormal(torch.ones(3))
    ),
}


@pytest.mark.parametrize("make", [refine, laplace_init])
@pytest.mark.parametrize("why", LATENTS_ON_NO_LINE)
def test_latents_without_unconstrained_coordinates_are_named(make, why):
    """There is no guide that could be at fault, and one is the remedy."""

    def model():
        pyro.sample("u", LATENTS_ON_NO_LINE[why]())

    pattern = re.escape(why).replace(re.escape(".*"), ".*")
    with pytest.raises(ValueError, match=f"site 'u' {pattern}.*pass a guide that draws it"):
        make(model)


def test_subsampled_plates_are_named():
    def model():
        with pyro.plate("data", 4, subsample_size=2) as i:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X[i])

    with pytest.raises(ValueError, match="plate 'data' is subsampled"):
        refine(model)


def test_options_of_chains_need_a_guide():
    with pytest.raises(ValueError, match="kernel refines the draws of a guide"):
        refine(ConjugateGaussian(N=2).model, kernel=HMC())


@pytest.mark.slow
def test_the_argument_after_the_model_is_a_guide_if_it_is_callable():
    def model(f, x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(f(z), 1.0), obs=x)

    draws = refine(model, None, torch.neg, X, seed=0, num_samples=250)
    assert_near(draws["z"], -X / 2, torch.tensor(0.5).sqrt(), size=150)
    assert draws["z"].shape == (250, 4)
    kwargs = refine(model, None, model_kwargs={"f": torch.neg, "x": X}, seed=0, num_samples=250)
    assert torch.equal(kwargs["z"], draws["z"])


def test_draws_have_the_dtype_of_their_site():
    """Also where the default is another one, and a product needs both factors in one dtype."""
    torch.set_default_dtype(torch.float32)  # the fixture of all tests restores it
    x = torch.linspace(0.0, 1.0, 20, dtype=torch.float64)
    design = torch.stack([torch.ones_like(x), x], -1)
    y = design.sum(-1) + 0.3 * torch.sin(17 * x)

    def model():
        b = pyro.sample("b", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
        mean = (design @ b.unsqueeze(-1)).squeeze(-1)
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    covariance = torch.linalg.inv(design.T @ design + torch.eye(2))
    draws = refine(model, seed=0)
    assert draws["b"].dtype == torch.float64
    assert draws.verdict.trusted
    assert_near(draws["b"], covariance @ design.T @ y, covariance.diagonal().sqrt())


def test_a_guide_that_misses_a_mode_does_not_hide_it():
    def model():
        a = pyro.sample("a", dist.Normal(0.0, 10.0))
        pyro.factor("f", torch.logaddexp(*(dist.Normal(m, 0.5).log_prob(a) for m in (-5.0, 5.0))))

    def guide():
        pyro.sample("a", dist.Normal(5.0, 0.1))

    draws = refine(model, guide, seed=0)
    assert draws.verdict.trusted
    assert_near((draws["a"] > 0).double(), 0.5, torch.tensor(0.5))


def test_weights_of_a_good_guide_suffice():
    exact = ConjugateGaussian(N=3)
    draws = refine(exact.model, exact.guide, seed=0)
    assert draws.verdict.method == "draws of the guide, selected by weight"
    assert draws.verdict.trusted
    exact.set_guide("exact", log_s=-2.5)
    moved = refine(exact.model, exact.guide, seed=0)
    assert moved.verdict.method == "draws of the guide, moved by chains"
    assert_near(moved["z"], *exact.posterior())


def test_draws_that_are_selected_by_weight_have_the_means_of_the_posterior():
    """Up to a twentieth of a standard deviation, and four errors of the mean."""
    x = torch.tensor([0.5, 2.0, -1.0])

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def prior():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(pyro.param("loc", torch.zeros(3)), 1.0))

    prior()
    draws = refine(model, prior, seed=0, num_samples=20_000)
    assert draws.verdict.method == "draws of the guide, selected by weight"
    assert draws.verdict.trusted
    error = (draws["z"].mean(0) - x / 2).abs() / 0.5**0.5
    assert bool((error < 0.05 + 4 / 20_000**0.5).all())


@pytest.mark.slow
def test_a_guide_whose_training_has_not_converged_is_named():
    y = torch.full((20,), 8.0)

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 10.0))
        pyro.sample("y", dist.Normal(z, 1.0).expand([20]).to_event(1), obs=y)

    guide = AutoNormal(model)
    guide()
    draws = refine(model, guide, seed=0)
    assert "training has not converged: the bound rises by" in draws.verdict.method
    assert draws.verdict.trusted  # chains do not need the guide
    precision = 20 + 0.01
    assert_near(draws["z"], y.sum() / precision, torch.tensor(precision**-0.5))


def test_nothing_is_changed():
    """The store, modes of modules and random streams are as they were."""
    network = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5))

    def model(x):
        pyro.module("network", network)
        scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(network(z.unsqueeze(-1)).squeeze(-1), scale), obs=x)

    model(X)
    before = {n: v.clone() for n, v in pyro.get_param_store().items()}
    state = torch.get_rng_state()
    refine(model, X, seed=3, num_samples=20)
    assert torch.equal(torch.get_rng_state(), state)
    after = dict(pyro.get_param_store().items())
    assert before.keys() == after.keys()
    assert all(torch.equal(after[n], v) for n, v in before.items())
    assert network.training
    assert network[1].training


@pytest.mark.slow
def test_draws_print_as_a_table_and_go_to_predictive():
    def model(x=None):
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            return pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    draws = refine(model, X, seed=0)
    lines = str(draws).splitlines()
    assert lines[0].split() == ["mean", "sd", "5%", "95%", "ESS", "R-hat"]
    assert [line.split()[0] for line in lines[2:6]] == [f"z[{i}]" for i in range(4)]
    assert Predictive(model, posterior_samples=draws)()["x"].shape == (1000, 4)


def test_split_r_hat_of_groups():
    """R-hat is about 1 for independent draws, and detects a shifted group and a shifted half."""
    torch.manual_seed(0)
    draws = torch.randn(40, 20, 1)
    assert float(split_r_hat(draws)) < 1.02
    shifted = draws.clone()
    shifted[:10] += 0.7
    assert float(split_r_hat(shifted)) > 1.03
    shifted = draws.clone()
    shifted[:, 10:] += 0.7
    assert float(split_r_hat(shifted)) > 1.03


def test_normal_scores_of_equal_draws_are_equal():
    scores = normal_scores(torch.tensor([0.0, 1.0, 1.0, 2.0]).reshape(2, 2, 1)).flatten()
    assert scores[1] == scores[2]
    assert scores.sum() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_a_neck_that_chains_do_not_enter_is_not_trusted(briefly):
    """A funnel: half of the mass of ``s`` is where the scales of ``z`` are 0.03 and less."""

    def model():
        s = pyro.sample("s", dist.Normal(0.0, 5.0))
        pyro.sample("z", dist.Normal(0.0, s.exp().unsqueeze(-1)).expand([9]).to_event(1))
        pyro.factor("f", torch.zeros(()))

    draws = refine(model, seed=0)
    assert any("hardly move at an end of s" in reason for reason in draws.verdict.reasons)


def test_acceptance_at_the_ends_of_a_value():
    starts = torch.linspace(0.0, 1.0, 200).reshape(10, 20, 1)
    acceptance = torch.ones(10, 20)
    acceptance[-1, 10:] = 0.2  # from the largest 5 %
    assert float(ensemble.at_ends(starts, acceptance)) == pytest.approx(0.2)
    assert float(ensemble.at_ends(-starts, acceptance)) == pytest.approx(0.2)
    assert float(ensemble.at_ends(starts, torch.ones(10, 20))) == 1.0
