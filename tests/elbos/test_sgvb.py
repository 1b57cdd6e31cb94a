"""Laws of the SGVB estimators: exact ELBO and gradient, closed-form KL where it is valid."""

import warnings
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from torch.distributions import kl_divergence

from pyro_mcvae import TraceIWAE_ELBO, TraceSGVB_ELBO
from pyro_mcvae.programs.run import Programs
from tests.estimates import assert_gradient, assert_mean, values
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


def mixture_without_rare_draws():
    """Whose weight no sample of a few hundred would show."""
    exact = DiscreteMixture(N=3, C=3)
    exact.set_guide(
        guide_logits=torch.tensor([[0.5, 0.0, -0.5], [0.0, 0.3, 0.0], [-0.4, 0.2, 0.1]])
    )
    return exact


EXACT = {
    "gaussian": lambda: ConjugateGaussian(N=5),
    "gaussian-subsampled": lambda: ConjugateGaussian(N=6, subsample_size=2),
    "ppca": lambda: ProbabilisticPCA(N=3, p=4, d=2),
    "gamma": lambda: GammaPoisson(N=4),
    "mixture": lambda: mixture_without_rare_draws(),
    "beta-bernoulli": lambda: BetaBernoulli(N=4),
    "hierarchical": lambda: HierarchicalGaussian(N=4),
    "hierarchical-subsampled": lambda: HierarchicalGaussian(N=6, subsample_size=2),
    "nested": lambda: NestedGaussian(G=3, M=2),
    "chain": lambda: LinearGaussianChain(N=3, T=3),
    "sequential": lambda: SequentialPlate(N=3),
}
analytic = pytest.mark.parametrize("analytic_kl", [False, True], ids=["A", "B"])


def averaged(particles, **options):
    """The mean over many particles: as many draws in one step; looped ones are compared below."""
    return TraceSGVB_ELBO(num_particles=particles, vectorize_particles=True, **options)


@pytest.mark.parametrize(
    ("name", "analytic_kl"),
    # Every second model with one estimator; the others among the slow tests.
    [
        pytest.param(n, b, marks=() if i % 8 == 4 * b + 1 else pytest.mark.slow)
        for i, n in enumerate(EXACT)
        for b in (False, True)
    ],
)
def test_value_and_gradient_are_those_of_the_exact_elbo(name, analytic_kl):
    exact = EXACT[name]()
    elbo = averaged(30, analytic_kl=analytic_kl)
    count = 200 if "subsampled" in name else 40  # minibatches differ from step to step only
    losses = []
    assert_gradient(elbo, exact, exact.grad(exact.elbo), count, losses=losses)
    assert_mean(-torch.tensor(losses), exact.elbo())


def test_a_site_whose_prior_depends_on_a_later_draw_keeps_estimator_a():
    # The guide draws b first and a given b; in the model b depends on a. The divergence at b would
    # hold a fixed, which is not distributed independently of b: Pyro's mean-field loss is wrong.
    slope = torch.tensor(0.8)

    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(a, 1.0))
        pyro.sample("x", dist.Normal(b, 1.0), obs=torch.tensor(1.0))

    def guide():
        b = pyro.sample("b", dist.Normal(pyro.param("m", torch.tensor(0.5)), 0.8))
        pyro.sample("a", dist.Normal(slope * b, 0.6))

    both = Programs(model, guide, (), {})
    # E log p - E log q in closed form.
    m, s, t = torch.tensor(0.5), 0.8, 0.6
    second_b = m**2 + s**2
    log_2pi = torch.log(torch.tensor(2 * torch.pi))
    expected_p = -1.5 * log_2pi - 0.5 * (
        slope**2 * second_b + t**2 + (1 - slope) ** 2 * second_b + t**2 + (m - 1) ** 2 + s**2
    )
    entropy = log_2pi + 1 + torch.log(torch.tensor(s * t))
    assert_mean(values(averaged(100), both, 40), expected_p + entropy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = TraceMeanField_ELBO(100, max_plate_nesting=0, vectorize_particles=True)
        theirs = values(theirs, both, 40)
    assert abs(theirs.mean() - expected_p - entropy) > 20 * theirs.std() / 40**0.5


def kl_of_folded(q, p):
    """By quadrature, of densities on the positive numbers."""
    z = torch.linspace(1e-4, 12.0, 4001)
    log_q = q.log_prob(z)
    return torch.trapezoid(log_q.exp() * (log_q - p.log_prob(z)), z)


def shifted(a, loc):
    shift = torch.distributions.AffineTransform(a, 1.0)
    return dist.TransformedDistribution(dist.Normal(loc, 1.0), [shift])


def wishart(a):
    return dist.Wishart(torch.tensor(4.0), covariance_matrix=a.exp() * torch.eye(2))


# The guide's distribution at a parameter, the prior, and the divergence of the two.
NOT_IN_CLOSED_FORM = {
    "folded": (
        lambda a: dist.FoldedDistribution(dist.Normal(a, 1.0)),
        lambda: dist.FoldedDistribution(dist.Normal(0.0, 1.5)),
        kl_of_folded,
    ),
    "folded and half": (
        lambda a: dist.FoldedDistribution(dist.Normal(a, 1.0)),
        lambda: dist.HalfNormal(1.5),
        kl_of_folded,
    ),
    # 0.5 - 0.5 = 0: the transforms are equal, until the parameter has moved.
    "equal transforms": (
        lambda a: shifted(a - 0.5, 1.0),
        lambda: shifted(0.0, 0.0),
        lambda q, p: 0.5 * (1.0 + q.transforms[0].loc).square(),
    ),
    "wishart": (
        wishart,
        lambda: wishart(torch.tensor(0.0)),
        # df / 2 (tr(P^-1 Q) - dim - log det P^-1 Q), of a multiple of the identity.
        lambda q, p: 4 * (q.covariance_matrix[0, 0] - 1 - q.covariance_matrix[0, 0].log()),
    ),
}


@pytest.mark.filterwarnings("ignore:Singular sample")
@pytest.mark.parametrize("name", NOT_IN_CLOSED_FORM)
def test_a_divergence_that_pytorch_gets_wrong_is_sampled(name):
    """Of many-to-one transforms its value, of two others the gradient."""
    make, prior, divergence = NOT_IN_CLOSED_FORM[name]
    at = torch.tensor(0.5)

    def model():
        pyro.sample("z", prior())

    def guide():
        pyro.sample("z", make(pyro.param("a", at)))

    both = Programs(model, guide, (), {})
    a = at.clone().requires_grad_()
    kl = divergence(make(a), prior())
    (gradient,) = torch.autograd.grad(-kl, a)
    assert_mean(values(averaged(300), both, 10), -kl.detach())
    result = [averaged(300).loss_and_grads(model, guide) and gradient_of("a") for _ in range(10)]
    assert_mean(torch.stack(result), gradient)


def gradient_of(name):
    param = pyro.param(name).unconstrained()
    result, param.grad = -param.grad, None
    return result


@analytic
def test_scale_and_mask_that_differ_between_model_and_guide(analytic_kl):
    x = torch.tensor([0.5, -1.0, 2.0])
    kept = torch.tensor([True, False, True])

    def model():
        with pyro.plate("data", 3):
            with pyro.poutine.scale(scale=0.3), pyro.poutine.mask(mask=kept):
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(x / 3, 0.8))

    q, p = dist.Normal(x / 3, 0.8), dist.Normal(0.0, 1.0)
    cross = -kl_divergence(q, p) - q.entropy()
    likelihood = dist.Normal(x / 3, 1.0).log_prob(x) - 0.5 * 0.8**2
    exact = (0.3 * cross * kept + q.entropy() + likelihood).sum()
    result = values(averaged(100, analytic_kl=analytic_kl), Programs(model, guide, (), {}), 40)
    assert_mean(result, exact)


@pytest.mark.parametrize("scale", [0.3, torch.tensor([0.3, 1.0, 2.0])], ids=["float", "tensor"])
def test_annealed_kl(scale):
    x = torch.tensor([0.5, -1.0, 2.0])

    def model():
        with pyro.plate("data", 3):
            with pyro.poutine.scale(scale=scale):
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide():
        with pyro.plate("data", 3), pyro.poutine.scale(scale=scale):
            pyro.sample("z", dist.Normal(x / 3, 0.8))

    q, p = dist.Normal(x / 3, 0.8), dist.Normal(0.0, 1.0)
    likelihood = dist.Normal(x / 3, 1.0).log_prob(x) - 0.5 * 0.8**2
    exact = (likelihood - scale * kl_divergence(q, p)).sum()
    both = Programs(model, guide, (), {})
    for analytic_kl in (False, True):
        assert_mean(values(averaged(100, analytic_kl=analytic_kl), both, 40), exact)


@pytest.mark.parametrize("loss", [TraceSGVB_ELBO(), TraceIWAE_ELBO(1)], ids=["sgvb", "iwae"])
@pytest.mark.parametrize("event", [0, 1])
def test_a_masked_draw_that_steers_the_model_is_scored(loss, event):
    """Its density is in no weight; log p(x | draw) has a gradient through it all the same."""
    mask, x, count = torch.tensor([True, False]), torch.tensor([1.0, 2.0]), 4000

    def draw(fn):
        return pyro.sample("k", fn.expand([2]).mask(mask).to_event(event))

    def program(fn, obs):
        with pyro.plate("copies", count, dim=-2), pyro.plate("data", 1 if event else 2):
            k = draw(fn)
            if obs:
                pyro.sample("x", dist.Normal(2 * k, 1).to_event(event), obs=x.expand(k.shape))

    logits = pyro.param("logits", torch.tensor([0.3, -0.4]))
    guide = partial(program, dist.Bernoulli(logits=logits), False)
    loss.loss_and_grads(partial(program, dist.Bernoulli(0.5), True), guide)

    free = logits.detach().clone().requires_grad_()
    q = dist.Bernoulli(logits=free)
    kl = kl_divergence(q, dist.Bernoulli(torch.full((2,), 0.5))) * mask
    likelihood = [dist.Normal(2.0 * k, 1).log_prob(x) for k in (0, 1)]
    (kl - (1 - q.probs) * likelihood[0] - q.probs * likelihood[1]).sum().backward()
    # Of one draw the standard deviation is below 1.7.
    torch.testing.assert_close(logits.grad / count, free.grad, rtol=0, atol=4 * 1.7 / count**0.5)
