"""The exact models against quadrature, enumeration, a Kalman filter, scipy and plain sampling."""

import itertools
import math

import numpy as np
import pyro
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from scipy import integrate, special, stats

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
    expected_iwae,
)

FULL = {"family": "full", "p": 4, "d": 2}
MODELS = {  # constructor, whether the preset "exact" is the posterior
    "gaussian": (ConjugateGaussian, True),
    "sequential": (SequentialPlate, True),
    "ppca": (ProbabilisticPCA, False),
    "ppca_full": (lambda **kwargs: ProbabilisticPCA(**FULL, **kwargs), True),
    "ppca_fixed": (lambda **kwargs: ProbabilisticPCA(**FULL, learn=False, **kwargs), True),
    "gamma": (GammaPoisson, True),
    "mixture": (DiscreteMixture, True),
    "beta": (BetaBernoulli, False),
    "hierarchical": (HierarchicalGaussian, True),
    "nested": (NestedGaussian, True),
    "chain": (LinearGaussianChain, True),
    "chain_range": (lambda **kwargs: LinearGaussianChain(markov=False, **kwargs), True),
}
EXACT = [name for name, (_, exact) in MODELS.items() if exact]
GLOBAL = ["beta", "hierarchical"]
LOCAL = [name for name in MODELS if name not in GLOBAL]


def traces(model, guide, *args):
    """The two traces of one run, with their log probabilities."""
    guide_trace = poutine.trace(guide).get_trace(*args)
    model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args)
    guide_trace.compute_log_prob()
    model_trace.compute_log_prob()
    return model_trace, guide_trace


def log_weight(model, guide, *args):
    """log p(x, z) - log q(z), scaled by subsampling, one run."""
    model_trace, guide_trace = traces(model, guide, *args)
    return model_trace.log_prob_sum() - guide_trace.log_prob_sum()


def log_weights(exact, num_draws, guide=None):
    """The same for many draws: a plate outside the model's, or a loop for a sequential plate."""
    guide = guide or exact.guide
    with torch.no_grad():
        if exact.max_plate_nesting == 0:
            return torch.stack([log_weight(exact.model, guide) for _ in range(num_draws)])
        dim = -1 - exact.max_plate_nesting

        def vectorize(program):
            def vectorized():
                with pyro.plate("draws", num_draws, dim=dim):
                    program()

            return vectorized

        total = 0
        pair = traces(vectorize(exact.model), vectorize(guide))
        for trace, sign in zip(pair, (1, -1), strict=True):
            for site in trace.nodes.values():
                if site["type"] == "sample" and not isinstance(
                    site["fn"], poutine.subsample_messenger._Subsample
                ):
                    assert site["log_prob"].shape[dim] == num_draws
                    total = total + sign * site["log_prob"].reshape(num_draws, -1).sum(-1)
        return total


def assert_mean(samples, expected, num_errors=4.5):
    error = samples.std() / len(samples) ** 0.5
    assert error > 0
    assert abs(samples.mean() - expected) < num_errors * error


def quad(function, *bounds):
    return integrate.quad(function, *bounds, epsabs=0, epsrel=1e-10, limit=200)[0]


# Evidence


def test_conjugate_gaussian_evidence():
    exact = ConjugateGaussian()
    evidence = exact.log_evidence_per_datum()
    for n in (0, 1, 2):
        x = exact.x[n].item()
        value = quad(lambda z, x=x: stats.norm.pdf(z) * stats.norm.pdf(x, z), -12, 12)
        assert evidence[n].item() == pytest.approx(math.log(value), rel=1e-9)
    assert exact.log_evidence() == pytest.approx(evidence.sum().item())
    assert exact.log_evidence().item() == pytest.approx(-172.8, abs=0.05)


def test_ppca_evidence():
    exact = ProbabilisticPCA(p=3, d=2, N=3, sigma=0.5)
    p = {name: value.numpy() for name, value in exact.params().items()}
    grid = np.linspace(-7, 7, 351)
    z = np.stack(np.meshgrid(grid, grid), -1)
    prior = stats.norm.pdf(z).prod(-1)
    loc = p["theta0"] + z @ p["theta1"].T
    evidence = exact.log_evidence_per_datum()
    for n in range(3):
        joint = prior * stats.norm.pdf(exact.x[n].numpy(), loc, 0.5).prod(-1)
        expected = math.log(joint.sum() * (grid[1] - grid[0]) ** 2)
        assert evidence[n].item() == pytest.approx(expected, rel=1e-8)


def test_ppca_evidence_gradient():
    exact = ProbabilisticPCA(p=3, d=2, N=4)
    p = {name: value.numpy() for name, value in exact.params().items()}

    def evidence(theta0, theta1):
        covariance = theta1 @ theta1.T + 0.1**2 * np.eye(3)
        return stats.multivariate_normal.logpdf(exact.x.numpy(), theta0, covariance).sum()

    grads = exact.grad(exact.log_evidence)
    h = 1e-6
    for index in np.ndindex(3, 2):
        e = np.zeros((3, 2))
        e[index] = h
        upper = evidence(p["theta0"], p["theta1"] + e)
        lower = evidence(p["theta0"], p["theta1"] - e)
        assert grads["theta1"][index].item() == pytest.approx((upper - lower) / (2 * h), rel=1e-4)
    for i in range(3):
        e = h * np.eye(3)[i]
        upper, lower = (
            evidence(p["theta0"] + e, p["theta1"]),
            evidence(p["theta0"] - e, p["theta1"]),
        )
        assert grads["theta0"][i].item() == pytest.approx((upper - lower) / (2 * h), rel=1e-4)
    assert not grads["W"].any()  # the evidence knows no guide


def test_gamma_poisson_evidence():
    exact = GammaPoisson(a=2.0, b=0.5)
    expected = stats.nbinom.logpmf(exact.x.numpy(), 2, 0.5 / 1.5)
    np.testing.assert_allclose(exact.log_evidence_per_datum(), expected, rtol=1e-10)
    assert exact.x.unique().numel() > 3


def test_discrete_mixture_evidence():
    exact = DiscreteMixture(sigma=0.7)
    p = {name: value.numpy() for name, value in exact.params().items()}
    weights = special.softmax(p["weight_logits"])
    expected = np.log(stats.norm.pdf(exact.x.numpy()[:, None], p["mu"], 0.7) @ weights)
    np.testing.assert_allclose(exact.log_evidence_per_datum(), expected, rtol=1e-10)


def test_beta_bernoulli_evidence():
    exact = BetaBernoulli(N=5, a=2.0, b=3.0)
    likelihood = stats.norm.pdf(exact.x.numpy()[:, None], [-1.0, 1.0], 1.0)
    terms = np.zeros(6)
    for z in itertools.product((0, 1), repeat=5):
        m = sum(z)
        terms[m] += likelihood[range(5), z].prod() * special.beta(2 + m, 8 - m) / special.beta(2, 3)
    assert exact.log_evidence().item() == pytest.approx(math.log(terms.sum()), rel=1e-10)
    np.testing.assert_allclose(exact.posterior().exp(), terms / terms.sum(), rtol=1e-9)


def test_hierarchical_evidence():
    exact = HierarchicalGaussian(N=4)
    x, v = exact.x.numpy(), 1.0 + 0.8**2

    def joint(theta):
        return stats.norm.pdf(theta, 0, 1.5) * stats.norm.pdf(x, theta, math.sqrt(v)).prod()

    value = quad(joint, -20, 20)
    assert exact.log_evidence().item() == pytest.approx(math.log(value), rel=1e-9)
    mean = quad(lambda theta: theta * joint(theta), -20, 20) / value
    square = quad(lambda theta: theta**2 * joint(theta), -20, 20) / value
    m, s = exact.posterior_theta()
    assert m.item() == pytest.approx(mean, rel=1e-7)
    assert s.item() == pytest.approx(math.sqrt(square - mean**2), rel=1e-6)


def test_hierarchical_joint_posterior():
    exact = HierarchicalGaussian(N=3)
    one = np.ones(3)
    prior = np.block(  # of (theta, z)
        [
            [np.full((1, 1), 2.25), 2.25 * one[None]],
            [2.25 * one[:, None], 2.25 * np.ones((3, 3)) + np.eye(3)],
        ]
    )
    observe = np.eye(4)[1:]
    gain = prior @ observe.T @ np.linalg.inv(observe @ prior @ observe.T + 0.64 * np.eye(3))
    loc, covariance = exact.posterior()
    np.testing.assert_allclose(loc, gain @ exact.x.numpy(), rtol=1e-9)
    np.testing.assert_allclose(covariance, prior - gain @ observe @ prior, rtol=1e-9)


def test_nested_evidence():
    exact = NestedGaussian(G=3, M=4)
    assert exact.log_evidence_per_datum().shape == (3,)
    for g, value in enumerate(exact.log_evidence_per_datum()):
        x = exact.x[:, g].numpy()
        expected = quad(
            lambda a, x=x: stats.norm.pdf(a) * stats.norm.pdf(x, a, math.sqrt(2)).prod(), -12, 12
        )
        assert value.item() == pytest.approx(math.log(expected), rel=1e-9)


def test_chain_evidence():
    exact = LinearGaussianChain(N=3, T=5)
    mean, variance, total = np.zeros(3), 0.0, np.zeros(3)  # Kalman filter
    for x in exact.x.numpy().T:
        mean, variance = 0.9 * mean, 0.81 * variance + 1
        total += stats.norm.logpdf(x, mean, math.sqrt(variance + 1))
        gain = variance / (variance + 1)
        mean, variance = mean + gain * (x - mean), (1 - gain) * variance
    np.testing.assert_allclose(exact.log_evidence_per_datum(), total, rtol=1e-10)
    loc, covariance = exact.posterior()  # the last state's marginal is the filter's
    np.testing.assert_allclose(loc[:, -1], mean, rtol=1e-10)
    np.testing.assert_allclose(covariance[-1, -1], variance, rtol=1e-10)


# Exact guides


@pytest.mark.parametrize("name", EXACT)
def test_exact_guide_has_constant_weight(name):
    exact = MODELS[name][0]()
    assert log_weights(exact, 8).std() > 1e-2  # mismatched
    exact.set_guide("exact")
    weights = log_weights(exact, 8)
    torch.testing.assert_close(weights, exact.log_evidence().expand(8))
    torch.testing.assert_close(exact.elbo(), exact.log_evidence())


def test_beta_bernoulli_exact_guide():
    exact = BetaBernoulli()
    weights = log_weights(exact, 20, exact.exact_guide)
    torch.testing.assert_close(weights, exact.log_evidence().expand(20))


@pytest.mark.parametrize("name", [name for name in EXACT if name not in GLOBAL])
@pytest.mark.parametrize("given", [False, True], ids=["drawn", "given"])
def test_subsample(name, given):
    """The exact guide on a minibatch: N/B times the evidence of its data."""
    exact = MODELS[name][0](subsample_size=None if given else 2)
    exact.set_guide("exact")
    args = (torch.tensor([2, 0]),) if given else ()
    plate = "groups" if name == "nested" else "data"
    model_trace, guide_trace = traces(exact.model, exact.guide, *args)
    idx = guide_trace.nodes[plate]["value"]
    assert len(idx) == 2
    value = model_trace.log_prob_sum() - guide_trace.log_prob_sum()
    expected = exact.N / 2 * exact.log_evidence_per_datum()[idx].sum()
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("name", GLOBAL)
def test_subsample_with_globals(name):
    """Conditionally exact local guides: the N/B scaled log p(x_n | global) of the minibatch."""
    exact = MODELS[name][0](subsample_size=3)
    exact.set_guide("conditional")
    model_trace, guide_trace = traces(exact.model, exact.guide)
    idx = guide_trace.nodes["data"]["value"]
    if name == "beta":
        pi = guide_trace.nodes["pi"]["value"]
        likelihood = exact.log_likelihood()[idx].exp()
        local = ((1 - pi) * likelihood[:, 0] + pi * likelihood[:, 1]).log()
    else:
        theta = guide_trace.nodes["theta"]["value"]
        scale = torch.sqrt(exact.tau**2 + exact.sigma**2)
        local = torch.distributions.Normal(theta, scale).log_prob(exact.x[idx])
    weight = (
        sum(model_trace.nodes[site]["log_prob"].sum() for site in ("z", "x"))
        - guide_trace.nodes["z"]["log_prob"].sum()
    )
    torch.testing.assert_close(weight, exact.N / 3 * local.sum())


# Closed-form bounds


@pytest.mark.parametrize("name", MODELS)
def test_elbo(name):
    """The mean of sampled log weights; an ELBO below the evidence; Pyro's own loss."""
    exact = MODELS[name][0]()
    weights = log_weights(exact, 100 if name == "sequential" else 20_000)
    assert_mean(weights, exact.elbo())
    assert exact.elbo() < exact.log_evidence() - 0.05
    if name in LOCAL:
        assert (exact.elbo_per_datum() <= exact.log_evidence_per_datum()).all()


@pytest.mark.parametrize("name", ["gaussian", "ppca_full", "hierarchical", "nested", "chain"])
def test_elbo_gradient(name):
    """The mean of Pyro's reparameterized gradients, for every parameter."""
    exact = MODELS[name][0]()
    elbo = Trace_ELBO(2000, vectorize_particles=True, max_plate_nesting=exact.max_plate_nesting)
    runs = []
    for _ in range(8):
        pyro.clear_param_store()
        elbo.loss_and_grads(exact.model, exact.guide)
        store = pyro.get_param_store()
        runs.append({name: -store[name].grad for name in exact.values})
    for param, expected in exact.grad(exact.elbo).items():
        samples = torch.stack([run[param] for run in runs])
        error = samples.std(0) / len(runs) ** 0.5
        assert expected.abs().max() > 1e-3
        assert ((samples.mean(0) - expected).abs() <= 8 * error + 1e-8).all(), param


def test_ppca_mean_field_is_optimal():
    exact = ProbabilisticPCA()
    assert exact.grad(exact.elbo)["log_s"].abs().max() > 0.1
    exact.set_guide("exact")
    grads = exact.grad(exact.elbo)
    for name in ("W", "c", "log_s"):
        torch.testing.assert_close(grads[name], torch.zeros_like(grads[name]), atol=1e-8, rtol=0)
    assert exact.elbo() < exact.log_evidence() - 0.1  # the posterior is correlated
    assert grads["theta1"].abs().max() > 0.1


def test_hierarchical_global_bound():
    exact = HierarchicalGaussian(N=4)
    p = {name: value.numpy() for name, value in exact.params().items()}
    m, s = p["m"], np.exp(p["log_s"])
    x, scale = exact.x.numpy(), math.sqrt(1.64)

    def integrand(theta):
        log_q = stats.norm.logpdf(theta, m, s)
        log_lik = stats.norm.logpdf(x, theta, scale).sum()
        return np.exp(log_q) * (stats.norm.logpdf(theta, 0, 1.5) + log_lik - log_q)

    expected = quad(integrand, m - 12 * s, m + 12 * s)
    assert exact.global_bound().item() == pytest.approx(expected, rel=1e-8)
    assert exact.elbo() < exact.global_bound() - 0.1
    exact.set_guide("conditional")
    assert exact.global_bound().item() == pytest.approx(exact.elbo().item())
    assert exact.global_bound() < exact.log_evidence() - 0.1


def test_beta_bernoulli_bounds():
    exact = BetaBernoulli(N=3)
    p = {name: value.numpy() for name, value in exact.params().items()}
    q = stats.beta(np.exp(p["log_alpha"]), np.exp(p["log_beta"]))
    likelihood = stats.norm.pdf(exact.x.numpy()[:, None], [-1.0, 1.0], 1.0)
    q_one = special.expit(p["logits"])  # slope 0

    def bound(pi, num_particles):
        """By the definition: Python loops over all draws of z_n."""
        total = stats.beta.logpdf(pi, 2, 3) - q.logpdf(pi)
        for n in range(3):
            prior, q_n = (1 - pi, pi), (1 - q_one[n], q_one[n])
            for zs in itertools.product((0, 1), repeat=num_particles):
                mean_w = np.mean([prior[z] * likelihood[n, z] / q_n[z] for z in zs])
                total += np.prod([q_n[z] for z in zs]) * math.log(mean_w)
        return q.pdf(pi) * total

    for num_particles in (1, 2):
        expected = quad(lambda pi, K=num_particles: bound(pi, K), 0, 1)
        assert exact.iwae(num_particles).item() == pytest.approx(expected, rel=1e-7)
    bounds = [exact.elbo(), exact.iwae(2), exact.iwae(4), exact.global_bound()]
    bounds = torch.stack([*bounds, exact.log_evidence()])
    assert (bounds.diff() > 1e-2).all()
    exact.set_guide("conditional")
    torch.testing.assert_close(exact.elbo(), exact.global_bound())
    torch.testing.assert_close(exact.iwae(3), exact.global_bound())
    assert exact.elbo() < exact.log_evidence() - 1e-2


def test_expected_iwae_by_loops():
    log_w, log_q = torch.randn(2, 3), torch.randn(2, 3).log_softmax(-1)
    expected = torch.zeros(2)
    for n, zs in itertools.product(range(2), itertools.product(range(3), repeat=3)):
        probability = math.prod(log_q[n, z].exp() for z in zs)
        expected[n] += probability * math.log(sum(log_w[n, z].exp() for z in zs) / 3)
    torch.testing.assert_close(expected_iwae(log_w, log_q, 3), expected)


def test_discrete_mixture_iwae():
    exact = DiscreteMixture(N=4, C=3)
    kl = (exact.params()["guide_logits"].softmax(-1)) * (
        exact.params()["guide_logits"].log_softmax(-1) - exact.posterior()
    )
    evidence = exact.log_evidence_per_datum()
    torch.testing.assert_close(exact.elbo_per_datum(), evidence - kl.sum(-1))
    bounds = torch.stack([*(exact.iwae_per_datum(K) for K in (1, 2, 4)), evidence])
    assert (bounds.diff(dim=0) > 0).all()
    exact.set_guide("exact")
    torch.testing.assert_close(exact.iwae_per_datum(3), evidence)


@pytest.mark.parametrize("num_particles", [1, 3])
def test_discrete_mixture_iwae_gradient(num_particles):
    exact = DiscreteMixture(N=3, C=2)
    grads = exact.grad(exact.iwae_per_datum, num_particles)
    assert set(grads) == {"weight_logits", "mu", "guide_logits"}
    h = 1e-5
    for name, value in exact.params().items():
        for index in np.ndindex(*value.shape):
            e = torch.zeros_like(value)
            e[index] = h
            upper, lower = (
                exact.iwae_per_datum(num_particles, {name: value + sign * e}).sum()
                for sign in (1, -1)
            )
            expected = (upper - lower).item() / (2 * h)
            assert grads[name][index].item() == pytest.approx(expected, rel=1e-5, abs=1e-8)
        assert grads[name].abs().max() > 1e-2


@pytest.mark.parametrize("num_particles", [2, 3])
def test_conjugate_gaussian_iwae(num_particles):
    """Quadrature against sampled bounds, and against itself with more nodes."""
    exact = ConjugateGaussian(N=3, seed=0)
    exact.set_guide(a=0.1, b=0.4, log_s=0.2)
    p = exact.params()
    q = torch.distributions.Normal(p["a"] * exact.x + p["b"], p["log_s"].exp())
    z = q.sample((20_000, num_particles))
    log_p = -0.5 * z**2 - 0.5 * (exact.x - z) ** 2 - math.log(2 * math.pi)
    samples = (log_p - q.log_prob(z)).logsumexp(1) - math.log(num_particles)
    values = exact.iwae_per_datum(num_particles)
    for n in range(3):
        assert_mean(samples[:, n], values[n])
    assert (exact.elbo_per_datum() < values).all()
    assert (values < exact.log_evidence_per_datum()).all()
    torch.testing.assert_close(exact.iwae_per_datum(1), exact.elbo_per_datum())
    exact.set_guide("mismatched")
    values, finer = (exact.iwae_per_datum(num_particles, nodes=nodes) for nodes in (32, 44))
    torch.testing.assert_close(values, finer, atol=1e-6, rtol=0)


# The objects themselves


@pytest.mark.parametrize("name", MODELS)
def test_data_are_fixed(name):
    build = MODELS[name][0]
    first = build()
    pyro.set_rng_seed(99)
    state = torch.get_rng_state()
    second = build()
    assert torch.equal(first.x, second.x)
    assert torch.equal(state, torch.get_rng_state())  # nor do they touch the global generator
    assert not torch.equal(first.x, build(seed=1).x)


@pytest.mark.parametrize("name", MODELS)
def test_single_precision(name):
    double, single = (MODELS[name][0](dtype=dtype) for dtype in (torch.float64, torch.float32))
    torch.testing.assert_close(single.x.double(), double.x, rtol=1e-6, atol=1e-6)
    expected = double.log_evidence()  # before the two meet in the parameter store
    model_trace, guide_trace = traces(single.model, single.guide)
    for site in [*model_trace.nodes.values(), *guide_trace.nodes.values()]:
        if site["type"] in ("sample", "param") and torch.is_floating_point(site["value"]):
            assert site["value"].dtype == torch.float32
    assert single.log_evidence().dtype == single.elbo().dtype == torch.float32
    evidence = single.log_evidence().double()
    torch.testing.assert_close(evidence, expected, rtol=1e-4, atol=1e-4)


def test_set_guide():
    exact = ConjugateGaussian()
    optimizer = pyro.optim.Adam({"lr": 0.1})
    SVI(exact.model, exact.guide, optimizer, Trace_ELBO()).step()
    assert exact.params()["a"] != 0.3  # trained
    trained = exact.params()["a"]
    exact.set_guide(b=1.5)
    assert exact.params() == {"a": trained, "b": 1.5, "log_s": exact.params()["log_s"]}
    exact.set_guide("exact", log_s=0.0)
    guide_trace = poutine.trace(exact.guide).get_trace()
    torch.testing.assert_close(guide_trace.nodes["z"]["fn"].mean, exact.posterior()[0])
    assert guide_trace.nodes["log_s"]["value"] == 0
    with pytest.raises(KeyError, match="nonsense"):
        exact.set_guide(nonsense=0.0)
