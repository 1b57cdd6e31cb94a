"""Every distribution of Pyro: its density, its draws and the gradient through them agree."""

import inspect

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.nn.functional import softplus

from pyro_mcvae.programs.distributions import patched
from tests.cases import some_slow
from tests.estimates import assert_mean


def positive(x):
    return softplus(x + 1)


def pair(a, b):
    return torch.stack([a, b])


def tril(a, b):
    return torch.stack([pair(positive(a), 0 * a), pair(b, positive(b))])


def unit(size):
    return torch.eye(size, dtype=torch.float64)


def one(value):
    return torch.tensor(value, dtype=torch.float64)


def hmm(a, b):
    normal = dist.MultivariateNormal
    start, noise, seen = normal(a.reshape(1), unit(1)), normal(0 * unit(1)[0], unit(1)), unit(1)
    return dist.GaussianHMM(start, unit(1), noise, seen, normal(b.reshape(1), unit(1)), duration=3)


def hmm_output():
    return dist.Normal(pair(one(0.0), one(1.0)), 1.0)


MADE = {
    "AVFMultivariateNormal": lambda a, b: dist.AVFMultivariateNormal(
        pair(a, b), tril(a, b), torch.stack([pair(a, b).unsqueeze(0), pair(b, a).unsqueeze(0)])
    ),
    "AffineBeta": lambda a, b: dist.AffineBeta(positive(a), positive(b), one(-1.0), one(3.0)),
    "AsymmetricLaplace": lambda a, b: dist.AsymmetricLaplace(a, positive(b), one(1.5)),
    "Beta": lambda a, b: dist.Beta(positive(a), positive(b)),
    "Cauchy": lambda a, b: dist.Cauchy(a, positive(b)),
    "Chi2": lambda a, b: dist.Chi2(2 + positive(a)),
    "ContinuousBernoulli": lambda a, b: dist.ContinuousBernoulli(logits=a + 0.3),
    "Dirichlet": lambda a, b: dist.Dirichlet(torch.stack([positive(a), positive(b), one(1.0)])),
    "Exponential": lambda a, b: dist.Exponential(positive(a)),
    "FisherSnedecor": lambda a, b: dist.FisherSnedecor(3 + positive(a), 5 + positive(b)),
    "FoldedDistribution": lambda a, b: dist.FoldedDistribution(dist.Normal(a, positive(b))),
    "Gamma": lambda a, b: dist.Gamma(1 + positive(a), positive(b)),
    "GaussianHMM": hmm,
    "Gumbel": lambda a, b: dist.Gumbel(a, positive(b)),
    "HalfCauchy": lambda a, b: dist.HalfCauchy(positive(b)),
    "HalfNormal": lambda a, b: dist.HalfNormal(positive(b)),
    "IndependentHMM": lambda a, b: dist.IndependentHMM(hmm(a, b).expand([2])),
    "InverseGamma": lambda a, b: dist.InverseGamma(2 + positive(a), positive(b)),
    "Kumaraswamy": lambda a, b: dist.Kumaraswamy(positive(a), positive(b)),
    "Laplace": lambda a, b: dist.Laplace(a, positive(b)),
    "LogNormal": lambda a, b: dist.LogNormal(a, positive(b)),
    "Logistic": lambda a, b: dist.Logistic(a, positive(b)),
    "LogisticNormal": lambda a, b: dist.LogisticNormal(pair(a, b), positive(pair(b, a))),
    "LowRankMultivariateNormal": lambda a, b: dist.LowRankMultivariateNormal(
        pair(a, b), pair(b, a).unsqueeze(-1), positive(pair(a, b))
    ),
    "MaskedMixture": lambda a, b: dist.MaskedMixture(
        torch.tensor(True), dist.Normal(a, positive(b)), dist.Normal(b, positive(a))
    ),
    "MixtureOfDiagNormals": lambda a, b: dist.MixtureOfDiagNormals(
        torch.stack([1 + pair(a, b), pair(1 + b, a)]),
        positive(torch.stack([pair(a, b), pair(b, b)])),
        pair(a, b),
    ),
    "MixtureOfDiagNormalsSharedCovariance": lambda a, b: dist.MixtureOfDiagNormalsSharedCovariance(
        torch.stack([1 + pair(a, b), pair(1 + b, a)]), positive(pair(a, b)), pair(a, b)
    ),
    "MultivariateNormal": lambda a, b: dist.MultivariateNormal(
        pair(a, b), precision_matrix=tril(a, b) @ tril(a, b).mT
    ),
    "MultivariateStudentT": lambda a, b: dist.MultivariateStudentT(
        4 + positive(b), pair(a, b), tril(a, b)
    ),
    "NanMaskedMultivariateNormal": lambda a, b: dist.NanMaskedMultivariateNormal(
        pair(a, b), scale_tril=tril(a, b)
    ),
    "NanMaskedNormal": lambda a, b: dist.NanMaskedNormal(a, positive(b)),
    "Normal": lambda a, b: dist.Normal(a, positive(b)),
    "OMTMultivariateNormal": lambda a, b: dist.OMTMultivariateNormal(pair(a, b), tril(a, b)),
    "Pareto": lambda a, b: dist.Pareto(one(0.5), 1.5 + positive(b)),
    "ProjectedNormal": lambda a, b: dist.ProjectedNormal(torch.stack([a, b, a * b])),
    "RelaxedBernoulli": lambda a, b: dist.RelaxedBernoulli(one(0.7), logits=a),
    "RelaxedOneHotCategorical": lambda a, b: dist.RelaxedOneHotCategorical(
        one(0.7), logits=torch.stack([a, b, 0 * a])
    ),
    "SkewLogistic": lambda a, b: dist.SkewLogistic(a, positive(b), one(1.3)),
    "SoftAsymmetricLaplace": lambda a, b: dist.SoftAsymmetricLaplace(
        a, positive(b), one(1.5), one(0.7)
    ),
    "SoftLaplace": lambda a, b: dist.SoftLaplace(a, positive(b)),
    "StableWithLogProb": lambda a, b: dist.StableWithLogProb(one(1.7), one(0.3), positive(b), a),
    "StudentT": lambda a, b: dist.StudentT(3 + positive(b), a, one(1.0)),
    "Weibull": lambda a, b: dist.Weibull(positive(a), 0.5 + positive(b)),
}
# Of some versions of PyTorch alone.
if hasattr(dist, "GeneralizedPareto"):
    MADE["GeneralizedPareto"] = lambda a, b: dist.GeneralizedPareto(
        one(0.0), positive(a), 0.1 + 0 * b
    )
# Without a gradient through their draws; of a number that their density depends on.
DRAWN = {
    "Bernoulli": lambda a: dist.Bernoulli(a),
    "BetaBinomial": lambda a: dist.BetaBinomial(1 + a, one(2.0), one(6.0)),
    "Binomial": lambda a: dist.Binomial(6, a),
    "Categorical": lambda a: dist.Categorical(torch.stack([a, one(0.3), one(0.5)])),
    "CoalescentTimes": lambda a: dist.CoalescentTimes(torch.tensor([0.0, 0.1, 0.4]).to(a), 1 + a),
    "DirichletMultinomial": lambda a: dist.DirichletMultinomial(
        torch.stack([1 + a, one(0.7), one(2.0)]), one(4.0)
    ),
    "DiscreteHMM": lambda a: dist.DiscreteHMM(
        pair(a, 1 - a).log(), pair(pair(a, 1 - a), pair(1 - a, a)).log(), hmm_output(), duration=3
    ),
    "ExtendedBetaBinomial": lambda a: dist.ExtendedBetaBinomial(1 + a, one(2.0), one(6.0)),
    "ExtendedBinomial": lambda a: dist.ExtendedBinomial(6, a),
    "GammaPoisson": lambda a: dist.GammaPoisson(2 + a, one(1.5)),
    "Geometric": lambda a: dist.Geometric(a),
    "LKJ": lambda a: dist.LKJ(4, 1 + a),
    "LKJCholesky": lambda a: dist.LKJCholesky(3, 1 + a),
    "MixtureSameFamily": lambda a: dist.MixtureSameFamily(
        dist.Categorical(pair(a, 1 - a)), dist.Gamma(pair(one(2.0), one(3.0)), 1 + a)
    ),
    "Multinomial": lambda a: dist.Multinomial(4, torch.stack([a, one(0.3), one(0.5)])),
    "NegativeBinomial": lambda a: dist.NegativeBinomial(one(3.0), a),
    "OneHotCategorical": lambda a: dist.OneHotCategorical(torch.stack([a, one(0.3), one(0.5)])),
    "OneOneMatching": lambda a: dist.OneOneMatching(
        pair(pair(a, one(1.0)), pair(one(0.3), one(0.1)))
    ),
    "OneTwoMatching": lambda a: dist.OneTwoMatching(
        torch.stack([pair(k * a, one(0.1)) for k in range(4)])
    ),
    "OrderedLogistic": lambda a: dist.OrderedLogistic(a, pair(one(-1.0), one(0.5))),
    "Poisson": lambda a: dist.Poisson(2 + a),
    "SineBivariateVonMises": lambda a: dist.SineBivariateVonMises(
        a, one(-0.2), 1 + a, one(0.9), one(0.5)
    ),
    "SineSkewed": lambda a: dist.SineSkewed(
        dist.VonMises(pair(a, one(1.0)), 1 + a).to_event(1), pair(one(0.4), one(-0.3))
    ),
    "SpanningTree": lambda a: dist.SpanningTree(
        torch.stack([a, one(0.7), one(-0.3)]), sampler_options={"backend": "python"}
    ),
    "VonMises": lambda a: dist.VonMises(a, 1 + a),
    "ZeroInflatedDistribution": lambda a: dist.ZeroInflatedDistribution(
        dist.Poisson(2 + a), gate=one(0.3)
    ),
    "ZeroInflatedNegativeBinomial": lambda a: dist.ZeroInflatedNegativeBinomial(
        one(3.0), probs=a, gate=one(0.3)
    ),
    "ZeroInflatedPoisson": lambda a: dist.ZeroInflatedPoisson(2 + a, gate=one(0.3)),
}
WITHOUT = {
    "a base or a wrapper": {
        "ExpandedDistribution",
        "ExponentialFamily",
        "Independent",
        "MaskedDistribution",
        "TorchDistribution",
        "TransformedDistribution",
    },
    "no draws": {
        "CoalescentTimesWithRate",
        "GammaGaussianHMM",
        "GaussianMRF",
        "GroupedNormalNormal",
        "ImproperUniform",
        "LogNormalNegativeBinomial",
        "VonMises3D",
    },
    "no density": {"Delta", "LinearHMM", "Stable", "Unit"},
    "a density of one value only": {"GaussianScaleMixture"},
    "nothing of its own": {"Empirical", "LKJCorrCholesky", "Rejector", "TruncatedPolyaGamma"},
    "ends that move": {"Uniform"},
    "draws that are changed in place": {"Wishart"},
    "rounded draws": {
        "OneHotCategoricalStraightThrough",
        "RelaxedBernoulliStraightThrough",
        "RelaxedOneHotCategoricalStraightThrough",
    },
}


def test_every_distribution_is_here():
    """But for what later versions of PyTorch add."""
    known = MADE.keys() | DRAWN.keys() | set().union(*WITHOUT.values())
    for name, cls in vars(dist).items():
        own = inspect.isclass(cls) and not hasattr(torch.distributions, name)
        if own and issubclass(cls, torch.distributions.Distribution):
            assert name in known, f"{name} is not tested: do so, or say why not"


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_density_and_draws_agree(name):
    pyro.set_rng_seed(0)
    other, fn = DRAWN[name](one(0.2)), patched(DRAWN[name](one(0.3)))
    if name in ("OneOneMatching", "OneTwoMatching", "SpanningTree"):
        values = [fn.sample() for _ in range(300)]  # one at a time
        log_weight = torch.stack([other.log_prob(v) - fn.log_prob(v) for v in values])
    else:
        values = fn.sample((10_000,))
        log_weight = other.log_prob(values) - fn.log_prob(values)
    assert_mean(log_weight.exp(), one(1.0))
    assert log_weight.std() > 1e-3, "nothing to compare"


def statistic(z, fn):
    """A smooth one, of every entry of a value."""
    z = torch.tanh(z.reshape(*z.shape[: z.dim() - fn.event_dim], -1))
    return (z * (1 + torch.arange(z.shape[-1]) / 2)).sum(-1)


# Draws and densities of the one are integrals, a second each; the other one is many GaussianHMM.
SLOW = "StableWithLogProb", "IndependentHMM"


@pytest.mark.parametrize("name", some_slow(sorted(MADE), *SLOW))
def test_density_draws_and_pathwise_gradient_agree(name):
    pyro.set_rng_seed(0)
    with pyro.validation_enabled(False):
        a, b = one(0.05).requires_grad_(), one(0.1).requires_grad_()
        through, score, weights = [], [], []
        for _ in range(20):
            fn, other = patched(MADE[name](a, b)), MADE[name](one(0.15), one(0.0))
            z = fn.rsample((1000,))
            still, log_q = z.detach(), fn.log_prob(z.detach())
            h = statistic(still, fn)
            parts = [statistic(z, fn).mean(), ((h - h.mean()) * log_q).mean() * 1000 / 999]
            for kept, part in zip((through, score), parts, strict=True):
                result = torch.autograd.grad(part, [a, b], retain_graph=True, allow_unused=True)
                kept.append(torch.stack([one(0.0) if g is None else g for g in result]))
            weights.append((other.log_prob(still) - log_q.detach()).exp().mean())
    assert_mean(torch.stack(weights), one(1.0))
    assert_mean(torch.stack(through) - torch.stack(score), one(0.0))
    assert torch.stack(score).any(), "nothing to compare"
