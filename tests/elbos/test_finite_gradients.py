"""No gradient is NaN at a finite loss: finite where the mathematics is, an error elsewhere."""

import math
from contextlib import nullcontext, suppress

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch.distributions import constraints, kl_divergence

from pyro_mcvae import (
    MonteCarloEM,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRenyi_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from tests.cases import every
from tests.estimates import assert_mean

CHAINS = {
    "sis": lambda: TraceSIS_ELBO(2),
    "sis latent": lambda: TraceSIS_ELBO(2, coordinates="latent"),
    "ais": lambda: TraceAIS_ELBO(2),
    "ais latent": lambda: TraceAIS_ELBO(2, coordinates="latent", multi_sample=True),
    "sis, several": lambda: TraceSIS_ELBO(2, num_particles=2, multi_sample=True),
    "reweighted": lambda: TraceSIS_ELBO(2, gradient_estimator="reweighted"),
    "em": lambda: MonteCarloEM(2),
}
DRAWS = {
    "sgvb": lambda: TraceSGVB_ELBO(analytic_kl=False),
    "iwae": lambda: TraceIWAE_ELBO(3),
    "stl": lambda: TraceIWAE_ELBO(3, gradient_estimator="stl"),
    "dreg": lambda: TraceIWAE_ELBO(3, gradient_estimator="dreg"),
    "renyi": lambda: TraceRenyi_ELBO(0.5, num_particles=3),
}
OBJECTIVES = {**CHAINS, **DRAWS}
N = 8


def learned(name, value, shape=(), positive=True):
    constraint = constraints.positive if positive else constraints.real
    return pyro.param(name, torch.full((N, *shape), float(value)), constraint=constraint)


# By name: a guide's distribution of a concentration and a scale, and a prior with its support.
BOUNDED = {
    "Gamma": (
        lambda c, s: dist.Gamma(learned("c", c), learned("r", 1 / s)),
        lambda s: dist.Gamma(1.0, 1 / s),
    ),
    "Beta": (
        lambda c, s: dist.Beta(learned("c", c), learned("d", c)),
        lambda s: dist.Beta(1.0, 2.0),
    ),
    "RelaxedBernoulli": (
        lambda c, s: dist.RelaxedBernoulli(torch.tensor(min(c, 5.0)), logits=learned("l", 0.3)),
        lambda s: dist.RelaxedBernoulli(torch.tensor(0.1), logits=torch.tensor(0.0)),
    ),
    "Dirichlet": (
        lambda c, s: dist.Dirichlet(learned("c", c, (3,))),
        lambda s: dist.Dirichlet(torch.ones(3)),
    ),
    "RelaxedOneHotCategorical": (
        lambda c, s: dist.RelaxedOneHotCategorical(
            torch.tensor(min(c, 5.0)), logits=learned("l", 0.3, (3,), positive=False)
        ),
        lambda s: dist.RelaxedOneHotCategorical(torch.tensor(0.1), logits=torch.zeros(3)),
    ),
    "InverseGamma": (
        lambda c, s: dist.InverseGamma(learned("c", c), learned("r", s)),
        lambda s: dist.InverseGamma(1.0, s),
    ),
    "LogNormal": (
        lambda c, s: dist.LogNormal(learned("l", math.log(s), positive=False), learned("d", 1 / c)),
        lambda s: dist.LogNormal(math.log(s), 1.0),
    ),
    "HalfCauchy": (lambda c, s: dist.HalfCauchy(learned("r", s)), dist.HalfCauchy),
    "StudentT": (
        lambda c, s: dist.StudentT(3.0, 0.0, learned("r", s)),
        lambda s: dist.StudentT(3.0, 0.0, s),
    ),
}
EXTREMES = {
    "concentration of 0.05": (0.05, 1.0),
    "concentration of 1e4": (1e4, 1.0),
    "scale of 1e-6": (1.0, 1e-6),
    "scale of 1e6": (1.0, 1e6),
}


@pytest.fixture(autouse=True)
def _default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def programs(make, prior):
    x = torch.linspace(-1.0, 1.0, N)

    def model():
        with pyro.plate("data", N):
            z = pyro.sample("z", prior())
            at = torch.tanh(z.reshape(N, -1)[:, :2].sum(-1))
            pyro.sample("x", dist.Normal(at, 1.0), obs=x)

    def guide():
        with pyro.plate("data", N):
            pyro.sample("z", make())

    return model, guide


class _Refused(Exception):
    """An error that names a site."""


def loss_of(loss, model, guide):
    try:
        return loss.loss_and_grads(model, guide)
    except ValueError as error:
        raise (_Refused if "site 'z' of the" in str(error) else ValueError)(str(error)) from error


def assert_finite(loss, model, guide, steps=4, may_refuse=False):
    """
    :param may_refuse: whether a step may raise, naming the site: draws that are rounded to a
        boundary have no density there, where nothing else is known of them.
    """
    for _ in range(steps):
        with suppress(_Refused) if may_refuse else nullcontext():
            assert math.isfinite(loss_of(loss, model, guide))
        for name, p in pyro.get_param_store().named_parameters():
            assert p.grad is None or p.grad.isfinite().all(), name
            p.grad = None


def in_turn(rows, columns, shift):
    """A column for each row, every one as often as others."""
    return [(r, columns[(i + shift) % len(columns)]) for i, r in enumerate(rows)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("name", "objective", "extreme"),
    [
        (name, objective, extreme)
        for i, extreme in enumerate(EXTREMES)
        # A part of the distributions at one extreme here, and all at all of them below.
        for name, objective in in_turn(BOUNDED, list(OBJECTIVES), 3 * i)[i::6]
    ],
)
def test_distributions_with_a_boundary(name, objective, extreme, dtype):
    torch.set_default_dtype(dtype)
    make, prior = BOUNDED[name]
    c, s = EXTREMES[extreme]
    pair = programs(lambda: make(c, s), lambda: prior(s))
    assert_finite(OBJECTIVES[objective](), *pair, may_refuse=objective in DRAWS)


def tiny_gamma(likelihood):
    x = torch.tensor([0.0, 0.0, 1.0, 5.0] * 10)

    def model():
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Gamma(1.0, 1.0))
            pyro.sample("x", likelihood(z), obs=x)

    def guide():
        a = pyro.param("a", torch.full((len(x),), 0.1), constraint=constraints.positive)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Gamma(a, 1.0))

    return model, guide


def take_steps(loss, model, guide, count):
    for _ in range(count):
        loss.loss_and_grads(model, guide)


@pytest.mark.parametrize("chain", [TraceSIS_ELBO, TraceAIS_ELBO])
@pytest.mark.parametrize(
    "likelihood",
    [lambda z: dist.Poisson(0.1 + 2 * z), lambda z: dist.Normal(1 / (1 + z), 1.0)],
    ids=["sum", "fraction"],
)
def test_programs_that_are_smooth_at_zero(likelihood, chain):
    """A Gamma of concentration 0.1 in single precision, whose own density is not smooth at 0."""
    torch.set_default_dtype(torch.float32)
    assert_finite(chain(3), *tiny_gamma(likelihood), 5)


@pytest.mark.parametrize("chain", [TraceSIS_ELBO, TraceAIS_ELBO])
def test_a_correlation_matrix(chain):
    """In single precision, from the identity on, where Pyro's ELBO trains the same programs."""
    torch.set_default_dtype(torch.float32)
    x = torch.randn(20, 3)

    def model():
        tril = pyro.sample("tril", dist.LKJCholesky(3, 1.0))
        with pyro.plate("data", 20):
            pyro.sample("x", dist.MultivariateNormal(torch.zeros(3), scale_tril=tril), obs=x)

    def guide():
        loc = pyro.param("loc", torch.zeros(3))
        scale = pyro.param("scale", torch.full((3,), 0.1), constraint=constraints.positive)
        base = dist.Normal(loc, scale).to_event(1)
        transform = dist.transforms.CorrCholeskyTransform()
        pyro.sample("tril", dist.TransformedDistribution(base, [transform]))

    assert_finite(chain(3), model, guide, 3)


@pytest.mark.parametrize(
    "likelihood",
    every(
        2,
        [
            lambda z: dist.Poisson(z),
            lambda z: dist.Poisson((0.1 * z.log()).exp()),
            lambda z: dist.Exponential(z),
        ],
        1,
    ),
    ids=["rate", "log", "exponential"],
)
def test_programs_whose_derivatives_overflow_near_zero(likelihood):
    """The second derivative of log z overflows below 1e-19: an error names the latent."""
    torch.set_default_dtype(torch.float32)
    pair = tiny_gamma(likelihood)
    assert_finite(TraceAIS_ELBO(3), *pair, 5, may_refuse=True)
    message = (
        r"gradient of 'a', .* is not finite, though the loss is .*float64.*larger concentrations"
        r"(.|\n)*site 'z' of the guide \(Gamma\): \d+ values are almost 0.*such as \d.*e-\d\d"
    )
    with pytest.raises(ValueError, match=message):
        take_steps(TraceSIS_ELBO(3), *pair, 20)
    assert all(p.grad is None for _, p in pyro.get_param_store().named_parameters())
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    assert_finite(TraceSIS_ELBO(3), *tiny_gamma(likelihood), 20)


@pytest.mark.parametrize("concentration", [0.05, 1.0])
@pytest.mark.parametrize("kind", ["gamma", "beta"])
def test_the_gradient_is_the_right_one(kind, concentration):
    """Chains of short steps have the gradient of the ELBO, which is known in closed form."""
    torch.set_default_dtype(torch.float32)
    family = dist.Gamma if kind == "gamma" else dist.Beta
    count = 4000

    def model():
        with pyro.plate("data", count):
            pyro.sample("z", family(1.0, 1.0))

    def guide():
        a = pyro.param("a", torch.full((count,), concentration), constraint=constraints.positive)
        with pyro.plate("data", count):
            pyro.sample("z", family(a, torch.ones(count)))

    TraceSIS_ELBO(2, UnderdampedLangevin(1e-6, momentum=0.0)).loss_and_grads(model, guide)
    result = pyro.get_param_store()._params["a"].grad.double()
    log_a = torch.tensor(concentration, dtype=torch.float64).log().requires_grad_()
    one = torch.ones((), dtype=torch.float64)
    (exact,) = torch.autograd.grad(kl_divergence(family(log_a.exp(), one), family(one, one)), log_a)
    # PyTorch's derivative of a quantile of Gamma is an approximation to about 1e-3.
    assert_mean(result, exact, sigmas=5)


# --- Gradients that are not finite ---------------------------------------------------------------


def rough_model():
    with pyro.plate("data", 3):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        scale = pyro.param("scale", torch.tensor(0.0))
        pyro.sample("x", dist.Normal(z + scale.sqrt() * 0, 1.0), obs=torch.zeros(3))


def rough_guide(x=None):
    loc = pyro.param("loc", torch.tensor(0.3))
    with pyro.plate("data", 3):
        pyro.sample("z", dist.Normal(loc, 1.0))


MESSAGE = "gradient of 'scale' is not finite, though the loss is .*double precision"


@pytest.mark.parametrize(
    ("objective", "validate"), [(o, bool(i % 2)) for i, o in enumerate(OBJECTIVES)]
)
def test_a_gradient_that_is_not_finite_is_an_error(objective, validate):
    loss = OBJECTIVES[objective]()
    svi = SVI(rough_model, rough_guide, pyro.optim.Adam({"lr": 0.1}), loss)
    with pyro.validation_enabled(validate), pytest.raises(ValueError, match=MESSAGE):
        svi.step()
    assert pyro.param("loc") == 0.3
    assert all(p.grad is None for _, p in pyro.get_param_store().named_parameters())


def test_a_gradient_that_is_not_finite_in_backward():
    loss = TraceIWAE_ELBO(3).differentiable_loss(rough_model, rough_guide)
    with pytest.raises(ValueError, match=MESSAGE):
        loss.backward()
    assert all(p.grad is None for _, p in pyro.get_param_store().named_parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda: TraceAIS_ELBO(3, num_particles=8, multi_sample=True),
        lambda: TraceAIS_ELBO(3, num_particles=8, multi_sample=True, coordinates="latent"),
        lambda: TraceSIS_ELBO(3, num_particles=8, multi_sample=True),
        lambda: TraceIWAE_ELBO(8),
        lambda: TraceIWAE_ELBO(8, gradient_estimator="vimco"),
        lambda: TraceRenyi_ELBO(0.5, num_particles=8),
    ],
    ids=["ais", "ais latent", "sis", "iwae", "vimco", "renyi"],
)
def test_every_way_to_the_loss_agrees_at_weights_of_zero(make):
    x = torch.tensor([-1.0, 0.0, 2.0])

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.factor("cut", torch.where(z > -0.2, 0.0, -math.inf))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide():
        loc = pyro.param("loc", torch.zeros(3))
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(loc, 1.0))

    loss, result = make(), []
    for function in (loss.loss, loss.differentiable_loss, loss.loss_and_grads):
        loss = make()
        pyro.set_rng_seed(3)
        value = getattr(loss, function.__name__)(model, guide)
        result.append(value.item() if isinstance(value, torch.Tensor) else value)
    assert result[0] == result[1] == result[2]
    assert pyro.get_param_store()._params["loc"].grad.isfinite().all()
