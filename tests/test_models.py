"""The exact models against quadrature, enumeration, a Kalman filter, scipy and plain sampling."""

import pyro
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

from tests.cases import every
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


@pytest.mark.parametrize("name", every(2, MODELS))
def test_elbo(name):
    """The mean of sampled log weights; an ELBO below the evidence; Pyro's own loss."""
    exact = MODELS[name][0]()
    weights = log_weights(exact, 100 if name == "sequential" else 20_000)
    assert_mean(weights, exact.elbo())
    assert exact.elbo() < exact.log_evidence() - 0.05
    if name in LOCAL:
        assert (exact.elbo_per_datum() <= exact.log_evidence_per_datum()).all()


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
