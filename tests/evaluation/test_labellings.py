"""Exchangeable components: found by the mathematics, and their evidence against exact sums."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    compare_models,
    log_evidence,
    report,
)
from tests.tally import Tally

X = torch.tensor([-3.2, -2.7, -3.5, -2.1, 2.4, 3.1, 2.9, 3.6])
OPTIONS = {"num_particles": 500}
AUXILIARY = {"is_auxiliary": True}


def mixture(size, scale=5.0, prior=0.0, weights=None, x=X):
    """Components' means with a normal prior; their exact evidence by quadrature."""
    weights = torch.ones(size) / size if weights is None else weights
    locs = torch.as_tensor(prior).expand(size)

    def model():
        m = pyro.sample("m", dist.Normal(locs, scale).to_event(1))
        with pyro.plate("data", len(x)):
            c = pyro.sample("c", dist.Categorical(weights), infer={"enumerate": "parallel"})
            pyro.sample("x", dist.Normal(m[c], 1.0), obs=x)

    grid = torch.linspace(-9.0, 9.0, {1: 401, 2: 181, 3: 73}[size])
    at = torch.stack(torch.meshgrid(*[grid] * size, indexing="ij"), -1)
    log_p = dist.Normal(locs, scale).log_prob(at).sum(-1)
    for datum in x:
        log_p += (weights.log() + dist.Normal(at, 1.0).log_prob(datum)).logsumexp(-1)
    exact = log_p.flatten().logsumexp(0) + size * (grid[1] - grid[0]).log()
    return model, float(exact)


def normal(*locs, scale=0.5):
    def guide():
        pyro.sample("m", dist.Normal(torch.tensor(locs), scale).to_event(1))

    return guide


def assert_exact(result, exact, errors=4.0):
    assert abs(float(result.total) - exact) < errors * float(result.total_standard_error)


@pytest.mark.parametrize("options", [{}, {"schedule": 4, "num_particles": 50}])
def test_the_evidence_of_a_mixture_is_that_of_all_labellings(options):
    model, exact = mixture(2)
    result = log_evidence(model, normal(-2.8, 2.9), **{**OPTIONS, **options})
    assert_exact(result, exact)
    assert result.labellings.sites == (("m",),)
    assert float(result.labellings.added) == pytest.approx(math.log(2))
    assert "exchangeable" in str(result)
    assert "log 2! = 0.693" in str(result)


def test_nothing_is_added_for_labellings_that_overlap():
    model, _ = mixture(2, x=X * 0.8 / 3)
    assert log_evidence(model, normal(-0.8, 0.8, scale=0.6), **OPTIONS).labellings is None
    # A component that lies anywhere: its labellings overlap with the others'.
    guide = normal(-2.8, 2.9, 0.0, scale=1.0)
    assert log_evidence(mixture(3)[0], guide, **OPTIONS).labellings is None


def test_a_guide_of_all_labellings_needs_nothing_added():
    model, exact = mixture(2)

    def guide():
        sides = torch.tensor([[-2.8, 2.9], [2.9, -2.8]])
        parts = dist.Normal(sides, 0.5).to_event(1)
        pyro.sample("m", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), parts))

    result = log_evidence(model, guide, **OPTIONS)
    assert result.labellings is None
    assert_exact(result, exact)


@pytest.mark.parametrize(
    "options",
    [{"prior": (-0.1, 0.1)}, {"weights": (0.4, 0.6)}],
    ids=["prior", "weights"],
)
def test_components_that_differ_are_not_exchangeable(options):
    model, _ = mixture(2, **{n: torch.tensor(v) for n, v in options.items()})
    assert log_evidence(model, normal(-2.8, 2.9), **OPTIONS).labellings is None


def test_an_ordered_prior_has_one_labelling():
    def model():
        base = dist.Normal(torch.zeros(2), 2.0).to_event(1)
        m = pyro.sample(
            "m", dist.TransformedDistribution(base, [dist.transforms.OrderedTransform()])
        )
        with pyro.plate("data", len(X)):
            c = pyro.sample("c", dist.Categorical(torch.ones(2)), infer={"enumerate": "parallel"})
            pyro.sample("x", dist.Normal(m[c], 1.0), obs=X)

    assert log_evidence(model, normal(-2.8, 2.9, scale=0.1), **OPTIONS).labellings is None


def test_components_of_which_one_differs_are_not_exchangeable():
    model, _ = mixture(3, weights=torch.tensor([0.2, 0.4, 0.4]))
    assert log_evidence(model, normal(0.0, -2.8, 2.9, scale=0.4), **OPTIONS).labellings is None


def rest_of(model, m, s, w):
    """A mixture of the sites' values, by whichever layout ``model`` has."""
    parts = dist.Normal(m.unsqueeze(-2), s.unsqueeze(-2))
    mixing = dist.Categorical(w.unsqueeze(-2))
    with pyro.plate("data", len(X)):
        pyro.sample("x", dist.MixtureSameFamily(mixing, parts), obs=X)


def plates():
    w = pyro.sample("w", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("components", 2):
        m, s = pyro.sample("m", dist.Normal(0.0, 5.0)), pyro.sample("s", dist.Gamma(5.0, 5.0))
    rest_of(plates, m, s, w)


def plates_guide():
    pyro.sample("w", dist.Dirichlet(torch.tensor([5.0, 5.0])))
    with pyro.plate("components", 2):
        pyro.sample("m", dist.Normal(torch.tensor([-2.8, 2.9]), 0.4))
        pyro.sample("s", dist.Gamma(9.0, 9.0))


@pytest.mark.parametrize("vectorize", [None, False])
def test_all_that_is_permuted_together_is_found(vectorize):
    """Sites of a plate, and those with an event dim of the same size."""
    count = 200 if vectorize is None else 30
    result = log_evidence(
        plates, plates_guide, num_particles=count, vectorize_particles=vectorize
    ).labellings
    assert result.added == pytest.approx(math.log(2))
    assert set(result.sites[0]) == {"w", "m", "s"}


SLOPES, HEIGHTS = torch.tensor([3.0, 1.0, -2.0]), torch.tensor([2.0, -4.0, 6.0])
T = torch.linspace(-2.0, 2.0, 12)


def network():
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 3.0).to_event(1))
    v = pyro.sample("v", dist.Normal(torch.zeros(3), 3.0).to_event(1))
    f = (torch.tanh(w.unsqueeze(-2) * T[:, None]) * v.unsqueeze(-2)).sum(-1)
    with pyro.plate("data", 12):
        pyro.sample("y", dist.Normal(f, 0.3), obs=T.sin())


def layers():
    """The same network with the weights of its layers in matrices."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 1), 3.0).to_event(2))
    v = pyro.sample("v", dist.Normal(torch.zeros(1, 3), 3.0).to_event(2))
    f = (torch.tanh(T[:, None] @ w.mT) @ v.mT).squeeze(-1)
    with pyro.plate("data", 12):
        pyro.sample("y", dist.Normal(f, 0.3), obs=T.sin())


def of_network(scale, shapes=((3,), (3,))):
    def guide():
        for name, loc, shape in zip("wv", (SLOPES, HEIGHTS), shapes, strict=True):
            fn = dist.Normal(loc.reshape(shape), scale).to_event(len(shape))
            pyro.sample(name, fn)

    return guide


@pytest.mark.parametrize("num_particles", [3, 30, 300])
def test_hidden_units_are_permuted_with_all_their_weights(num_particles):
    """For each number of particles, and for a network in each form."""
    forms = {network: ((3,), (3,)), layers: ((3, 1), (1, 3))}
    for model, shapes in forms.items():
        found = log_evidence(model, of_network(0.1, shapes), num_particles=num_particles).labellings
        assert set(found.sites[0]) == {"w", "v"}
        assert found.added == pytest.approx(math.log(6))
        # Wide densities of the units overlap.
        wide = log_evidence(model, of_network(4.0, shapes), num_particles=num_particles)
        assert wide.labellings is None


def test_components_of_each_datum():
    """Two sources of each datum, of which sum and product are seen."""
    x = torch.tensor([[1.0, -6.0], [0.5, -4.0], [-2.0, -8.0]])

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 3.0).to_event(1))
            seen = torch.stack([z.sum(-1), z.prod(-1)], -1)
            pyro.sample("x", dist.Normal(seen, 0.5).to_event(1), obs=x)

    roots = (x[:, :1] + torch.tensor([1.0, -1.0]) * (x[:, :1].square() - 4 * x[:, 1:]).sqrt()) / 2

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(roots, 0.35).to_event(1))

    grid = torch.linspace(-9.0, 9.0, 1201)
    a, b = grid[:, None], grid[None, :]
    log_p = dist.Normal(0.0, 3.0).log_prob(a) + dist.Normal(0.0, 3.0).log_prob(b)
    log_p = log_p + dist.Normal(a + b, 0.5).log_prob(x[:, 0, None, None])
    log_p = log_p + dist.Normal(a * b, 0.5).log_prob(x[:, 1, None, None])
    exact = log_p.flatten(1).logsumexp(1) + 2 * (grid[1] - grid[0]).log()
    result = log_evidence(model, guide, num_particles=4000)
    assert result.labellings.added == pytest.approx(math.log(2))
    assert bool(((result.log_evidence - exact).abs() < 4 * result.standard_error + 0.02).all())


def test_data_that_are_alike_are_no_components():
    """Their latents are exchangeable, and drawn alike; or weighed each by itself."""

    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 6):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.ones(6))

    def guide():
        pyro.sample("mu", dist.Normal(0.7, 0.6))
        with pyro.plate("data", 6):
            pyro.sample("z", dist.Normal(0.9, 0.8))

    exact = dist.MultivariateNormal(torch.zeros(6), 2 * torch.eye(6) + 1).log_prob(torch.ones(6))
    result = log_evidence(model, guide, num_particles=2000)
    assert result.labellings is None
    assert_exact(result, float(exact))


@pytest.mark.slow
def test_the_number_of_components_that_is_preferred_is_the_right_one():
    """With one labelling alone two components would have log 2! too little beside one."""
    models = {f"{k}": mixture(k, x=X.sort().values) for k in (1, 2)}
    guides = {"1": normal(0.0, scale=0.4), "2": normal(-2.8, 2.9)}
    result = compare_models({k: (models[k][0], guides[k]) for k in models}, num_particles=1000)
    exact = models["2"][1] - models["1"][1]
    difference, error = result.difference("2", "1")
    assert abs(difference - exact) < 4 * error
    assert "2: exchangeable components" in result.verdict
    # Where they overlap, three may be better: nothing is said to be known.
    models["3"] = mixture(3)
    guides["3"] = normal(-2.8, 2.9, 0.0, scale=1.0)
    result = compare_models({k: (models[k][0], guides[k]) for k in "23"}, num_particles=500)
    assert "3" in result.best
    assert "not known" in str(result)


@pytest.mark.slow
def test_a_report_knows_them_and_looks_from_the_prior():
    model, exact = mixture(2)
    result = report(model, normal(-2.8, 2.9), num_particles=1000)
    assert_exact(result.evidence, exact)
    assert result.prior.labellings is None
    assert abs(float(result.prior.total) - exact) < 4 * float(result.prior.total_standard_error)
    assert not result.misses
    assert "exchangeable" in str(result)
    assert "close to one labelling of the posterior" in result.advice or result.gap > 0.8


def test_latents_that_nothing_reads_are_no_components():
    """Exchangeable, and drawn by a guide that is about their prior: no labelling is missed."""

    def model():
        pyro.sample("u", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=torch.ones(()))

    def guide():
        pyro.sample("u", dist.Normal(torch.tensor([-0.1, 0.1]), 1.0).to_event(1))
        pyro.sample("z", dist.Normal(0.5, 0.5**0.5))

    result = log_evidence(model, guide, **OPTIONS)
    assert result.labellings is None
    assert_exact(result, float(dist.Normal(0.0, 2**0.5).log_prob(torch.ones(()))))


def test_nothing_is_added_for_a_guide_without_a_density_at_given_latents():
    """As AutoStructured, or a flow without an inverse: whether labellings overlap is not known."""
    model, exact = mixture(2)

    def guide():
        noise = pyro.sample("noise", dist.Normal(torch.zeros(2), 1.0).to_event(1), infer=AUXILIARY)
        m = torch.tensor([-2.8, 2.9]) + 0.5 * noise
        density = torch.tensor(0.5).log().expand(m.shape[:-1]) * -2
        pyro.sample("m", dist.Delta(m, density, event_dim=1))

    result = log_evidence(model, guide, **OPTIONS)
    assert result.labellings is None
    assert_exact(result, exact - math.log(2))


@pytest.mark.parametrize("num_particles", [3, 300])
def test_the_search_for_components_costs_a_few_runs(num_particles):
    """Beside the same evaluation of a network whose units have priors of their own."""
    runs = Tally()

    def counts(scales):
        def model():
            runs.add()
            w = pyro.sample("w", dist.Normal(torch.zeros(3), scales).to_event(1))
            v = pyro.sample("v", dist.Normal(torch.zeros(3), 3.0).to_event(1))
            f = (torch.tanh(w.unsqueeze(-2) * T[:, None]) * v.unsqueeze(-2)).sum(-1)
            with pyro.plate("data", 12):
                pyro.sample("y", dist.Normal(f, 0.3), obs=T.sin())

        result = log_evidence(model, of_network(0.1), num_particles=num_particles)
        return result.labellings, runs.take()["run"]

    found, with_search = counts(torch.full((3,), 3.0))
    none, without = counts(torch.tensor([2.0, 3.0, 4.0]))
    assert found is not None
    assert none is None
    assert with_search <= without + 4 <= 12
