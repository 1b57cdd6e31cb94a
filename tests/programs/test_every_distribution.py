"""Every distribution of Pyro with a pathwise gradient: its density, draws and gradient agree."""

import inspect

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.nn.functional import softplus

from pyro_mcvae.programs.mended_draws import mended
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
WITHOUT = {
    "a wrapper": {
        "ExpandedDistribution",
        "Independent",
        "MaskedDistribution",
        "TransformedDistribution",
    },
    "no density": {"Delta", "LinearHMM", "Stable"},
    "a density of one value only": {"GaussianScaleMixture"},
    "a density that is the user's": {"Rejector"},
    "ends that move": {"Uniform"},
    "no gradient to its draws": {"LKJ"},
    "draws that are changed in place": {"Wishart"},
    "rounded draws": {
        "OneHotCategoricalStraightThrough",
        "RelaxedBernoulliStraightThrough",
        "RelaxedOneHotCategoricalStraightThrough",
    },
}


def test_every_distribution_is_here():
    found = {
        name
        for name, cls in vars(dist).items()
        if inspect.isclass(cls)
        and issubclass(cls, torch.distributions.Distribution)
        and inspect.getattr_static(cls, "has_rsample", False) is not False
    }
    assert found == MADE.keys() | set().union(*WITHOUT.values())


def statistic(z, fn):
    """A smooth one, of every entry of a value."""
    z = torch.tanh(z.reshape(*z.shape[: z.dim() - fn.event_dim], -1))
    return (z * (1 + torch.arange(z.shape[-1]) / 2)).sum(-1)


@pytest.mark.parametrize("name", sorted(MADE))
def test_density_draws_and_pathwise_gradient_agree(name):
    pyro.set_rng_seed(0)
    with pyro.validation_enabled(False):
        a, b = one(0.05).requires_grad_(), one(0.1).requires_grad_()
        through, score, weights = [], [], []
        for _ in range(40):
            fn, other = mended(MADE[name](a, b)), MADE[name](one(0.15), one(0.0))
            z = fn.rsample((2000,))
            still, log_q = z.detach(), fn.log_prob(z.detach())
            h = statistic(still, fn)
            parts = [statistic(z, fn).mean(), ((h - h.mean()) * log_q).mean() * 2000 / 1999]
            for kept, part in zip((through, score), parts, strict=True):
                found = torch.autograd.grad(part, [a, b], retain_graph=True, allow_unused=True)
                kept.append(torch.stack([one(0.0) if g is None else g for g in found]))
            weights.append((other.log_prob(still) - log_q.detach()).exp().mean())
    assert_mean(torch.stack(weights), one(1.0))
    assert_mean(torch.stack(through) - torch.stack(score), one(0.0))
    assert torch.stack(score).any(), "nothing to compare"
