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
