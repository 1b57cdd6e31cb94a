"""Every divergence that PyTorch and Pyro know in closed form is that of many draws, or is drawn."""

import itertools
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import transforms
from pyro.distributions.torch_distribution import MaskedDistribution
from torch.distributions import kl

from pyro_mcvae import TraceSGVB_ELBO
from pyro_mcvae.elbos import sgvb
from tests.estimates import assert_mean


def stacked(*parts):
    return torch.stack([part.expand(()) for part in parts])


def transformed(a, b, *parts):
    return dist.TransformedDistribution(dist.Normal(a, b), list(parts))


# Of two numbers, the second of them positive.
FAMILIES = {
    "normal": dist.Normal,
    "log-normal": dist.LogNormal,
    "gamma": lambda a, b: dist.Gamma(2 + a, b),
    "inverse-gamma": lambda a, b: dist.InverseGamma(4 + a, b),
    "beta": lambda a, b: dist.Beta(2 + a, 1 + b),
    "kumaraswamy": lambda a, b: dist.Kumaraswamy(2 + a, 1 + b),
    "uniform": lambda a, b: dist.Uniform(0.2 + 0 * a, 0.3 + 0.1 * b),
    "unit": lambda a, b: dist.Uniform(0.0, 1.0),
    "continuous-bernoulli": lambda a, b: dist.ContinuousBernoulli(torch.sigmoid(a - b)),
    "laplace": dist.Laplace,
    "gumbel": dist.Gumbel,
    "cauchy": dist.Cauchy,
    "exponential": lambda a, b: dist.Exponential(b + a),
    "half-normal": lambda a, b: dist.HalfNormal(b + a),
    "weibull": lambda a, b: dist.Weibull(b, 2 + a),
    "pareto": lambda a, b: dist.Pareto(1 + 0 * a, 3 + b),
    "low-pareto": lambda a, b: dist.Pareto(0.1 + 0 * a, 3 + b),
    "affine": lambda a, b: transformed(0 * a, b / b, transforms.AffineTransform(a, b)),
    "sigmoid": lambda a, b: transformed(a, b, transforms.SigmoidTransform()),
    "dirichlet": lambda a, b: dist.Dirichlet(stacked(2 + a, 1 + b, torch.tensor(1.5))),
    "multivariate": lambda a, b: dist.MultivariateNormal(
        stacked(a, a), scale_tril=torch.stack([stacked(b, 0 * b), stacked(a, b)])
    ),
    "low-rank": lambda a, b: dist.LowRankMultivariateNormal(
        stacked(a, a), torch.tensor([[1.0], [0.5]]), stacked(b, b)
    ),
    "independent": lambda a, b: dist.Normal(stacked(a, a), stacked(b, b)).to_event(1),
    "bernoulli": lambda a, b: dist.Bernoulli(logits=a + b),
    "poisson": lambda a, b: dist.Poisson(1 + a + b),
    "geometric": lambda a, b: dist.Geometric(torch.sigmoid(a + b)),
    "binomial": lambda a, b: dist.Binomial(5, logits=a + b),
    "categorical": lambda a, b: dist.Categorical(logits=stacked(a, b, 0 * a)),
    "one-hot": lambda a, b: dist.OneHotCategorical(logits=stacked(a, b, 0 * a)),
}
STARTS = {"a": 0.3, "b": 0.9, "c": 0.1, "d": 1.2}


def known(pair):
    """Whether a rule for a pair is used, and gives a finite number."""
    q, p = FAMILIES[pair[0]](*PARAMS[:2]), FAMILIES[pair[1]](*PARAMS[2:])
    rule = kl._dispatch_kl(type(q), type(p))
    if rule in (NotImplemented, *sgvb._WRONG_RULES) or q.event_shape != p.event_shape:
        return False
    try:
        return bool(torch.distributions.kl_divergence(q, p).isfinite())
    except (NotImplementedError, ValueError):
        return False


PARAMS = [torch.tensor(v) for v in STARTS.values()]
PAIRS = [pair for pair in itertools.product(FAMILIES, FAMILIES) if known(pair)]


def rule_of(pair):
    q, p = (FAMILIES[name](*PARAMS[:2]) for name in pair)
    return kl._dispatch_kl(type(q), type(p)) if q.event_shape == p.event_shape else None


@pytest.mark.filterwarnings("ignore:Ambiguous kl_divergence")
def test_every_rule_is_compared_or_infinite_or_refused():
    compared = {rule_of(pair) for pair in PAIRS}
    # Point masses and masked distributions are never in closed form here.
    unused = dist.Delta, MaskedDistribution
    others = {f for (q, _), f in kl._KL_REGISTRY.items() if q in unused}
    missing = set(kl._KL_REGISTRY.values()) - compared - others - {*sgvb._WRONG_RULES}
    assert {f.__name__ for f in missing if not f.__name__.endswith("_infinity")} == set()


@pytest.mark.parametrize(
    "pair", [("unit", "continuous-bernoulli"), ("continuous-bernoulli", "unit")]
)
def test_a_finite_divergence_that_a_rule_of_pytorch_calls_infinite_is_drawn(pair):
    both = programs(pair)
    assert torch.distributions.kl_divergence(*(FAMILIES[n](*PARAMS[:2]) for n in pair)).isinf()
    pyro.set_rng_seed(0)
    drawn = TraceSGVB_ELBO(analytic_kl=False).loss(*both)
    pyro.set_rng_seed(0)
    assert TraceSGVB_ELBO().loss(*both) == drawn
    assert abs(drawn) < 10.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Ambiguous kl_divergence")
def test_a_rule_is_infinite_only_where_draws_leave_the_support():
    for pair in itertools.product(FAMILIES, FAMILIES):
        rule = rule_of(pair)
        if rule in (None, NotImplemented, *sgvb._WRONG_RULES):
            continue
        params = [torch.tensor(v) for v in STARTS.values()]
        q, p = FAMILIES[pair[0]](*params[:2]), FAMILIES[pair[1]](*params[2:])
        try:
            divergence = torch.distributions.kl_divergence(q, p)
        except NotImplementedError:
            continue
        inside = p.support.check(q.sample((100_000,)))
        assert bool(divergence.isinf()) != bool(inside.all()), (pair, rule)


def step(elbo, model, guide):
    """The bound, and its gradient."""
    loss = elbo.loss_and_grads(model, guide)
    result = []
    for name in STARTS:
        param = pyro.param(name)
        result.append(torch.zeros(()) if param.grad is None else param.grad)
        param.grad = None
    return -torch.stack([torch.as_tensor(loss), *result])


def programs(pair):
    """A latent of one family and its guide of the other, with parameters of their own."""
    for name, value in STARTS.items():
        pyro.param(name, torch.tensor(value))

    def model():
        with pyro.plate("data", 2):
            pyro.sample("z", FAMILIES[pair[1]](pyro.param("c"), pyro.param("d")))

    def guide():
        with pyro.plate("data", 2):
            pyro.sample("z", FAMILIES[pair[0]](pyro.param("a"), pyro.param("b")))

    return model, guide


@pytest.mark.parametrize(
    "pair",
    # One of each kind of rule by default.
    [
        pytest.param(p, marks=[] if p[0] in ("inverse-gamma", "gamma") else pytest.mark.slow)
        for p in PAIRS
    ],
    ids=" ".join,
)
def test_a_divergence_in_closed_form_is_that_of_draws(pair):
    both = programs(pair)
    drawn = TraceSGVB_ELBO(500, analytic_kl=False, vectorize_particles=True)
    result = torch.stack([step(drawn, *both) for _ in range(20)])
    assert_mean(result, step(TraceSGVB_ELBO(), *both), sigmas=6.0)


@pytest.mark.parametrize("q", ["categorical", "bernoulli", "normal"])
def test_a_divergence_in_closed_form_has_no_noise(q):
    """Also of a site without reparameterization, whose score has nothing to weigh."""
    both = programs((q, q))
    params = [torch.tensor(v, requires_grad=True) for v in STARTS.values()]
    families = FAMILIES[q](*params[:2]), FAMILIES[q](*params[2:])
    bound = -2 * torch.distributions.kl_divergence(*families)
    exact = torch.stack([bound, *torch.autograd.grad(bound, params)])
    for _ in range(3):
        assert torch.allclose(step(TraceSGVB_ELBO(2), *both), exact, atol=1e-6)


@pytest.mark.parametrize(
    "family",
    [
        lambda logits: dist.Categorical(logits=logits),
        lambda logits: dist.OneHotCategorical(logits=logits),
        lambda logits: dist.Categorical(logits=logits).expand([2]).to_event(1),
    ],
    ids=["categorical", "one-hot", "event"],
)
def test_a_category_that_neither_program_has_does_not_count(family):
    """The gradient of PyTorch's rule is NaN there."""
    rows = []
    for extra in ([], [torch.tensor(-torch.inf)]):
        pyro.clear_param_store()

        def sites(a, b, extra=extra):
            logits = stacked(pyro.param(a), pyro.param(b), torch.zeros(()), *extra)
            with pyro.plate("data", 2):
                pyro.sample("z", family(logits))

        for name, value in STARTS.items():
            pyro.param(name, torch.tensor(value))
        rows.append(step(TraceSGVB_ELBO(), partial(sites, "c", "d"), partial(sites, "a", "b")))
    assert rows[0][0] < 0
    assert torch.allclose(*rows)


@pytest.mark.parametrize("validate", [True, False])
def test_an_infinite_divergence_names_the_site_and_the_remedy(validate):
    # For all draws: most draws of this guide are positive.
    def model():
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.Gamma(2.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor([1.0, 2.0]))

    def guide():
        with pyro.plate("data", 2):
            pyro.sample("z", dist.Normal(3.0, 0.5))

    message = r"loss is inf.*\n.*site 'z'.*\(Gamma\).*AutoGuide"
    with pyro.validation_enabled(validate), pytest.raises(ValueError, match=message):
        TraceSGVB_ELBO().loss(model, guide)
