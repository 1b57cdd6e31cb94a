"""Laws of the importance weighted bound: exact values, exact gradients, identities."""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_mcvae import TraceIWAE_ELBO, TraceRenyi_ELBO
from pyro_mcvae.ops.weights import log_mean_exp
from pyro_mcvae.programs.run import Programs
from tests.cases import some_slow
from tests.estimates import assert_gradient, assert_mean, gradients, values
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
from tests.params import in_turn

PER_DATUM = [
    lambda: ConjugateGaussian(N=5),
    lambda: ProbabilisticPCA(N=3, p=4, d=2, family="full"),
    lambda: GammaPoisson(N=4),
    lambda: DiscreteMixture(N=4, C=3),
    lambda: NestedGaussian(G=3, M=2),
    lambda: LinearGaussianChain(N=3, T=3),
    lambda: SequentialPlate(N=3),
]
NAMES = ["gaussian", "ppca", "gamma", "mixture", "nested", "chain", "sequential"]
per_datum = pytest.mark.parametrize("make", PER_DATUM, ids=NAMES)
modes = pytest.mark.parametrize("vectorize", [False, True], ids=["looped", "vectorized"])


@per_datum
def test_weights_average_to_the_evidence_per_datum(make):
    exact = make()
    count = 4000
    elbo = TraceIWAE_ELBO(num_particles=count, vectorize_particles=True)
    sample = elbo._sample(programs(exact))
    evidence = exact.log_evidence_per_datum()
    ratio = (sample.log_weight - evidence.reshape(sample.log_weight.shape[1:])).exp()
    assert ratio.shape[0] == count
    assert_mean(ratio, 1.0)
    assert (ratio.std(0) / count**0.5 < 0.1).all(), "the guide is too poor to tell"


@pytest.mark.parametrize(
    ("make", "vectorize"), [(m, bool(i % 2)) for i, m in enumerate(PER_DATUM)], ids=NAMES
)
def test_an_exact_guide_makes_the_bound_the_evidence(make, vectorize):
    exact = make()
    exact.set_guide("exact")
    elbo = TraceIWAE_ELBO(num_particles=3, vectorize_particles=vectorize)
    bounds = elbo.bounds(exact.model, exact.guide)
    evidence = exact.log_evidence_per_datum()
    assert torch.allclose(bounds.per_datum.reshape(evidence.shape), evidence)
    assert torch.allclose(bounds.total, exact.log_evidence())
    assert abs(elbo.loss(exact.model, exact.guide) + exact.log_evidence()) < 1e-6


@pytest.mark.parametrize(
    ("size", "vectorize"), [pytest.param(None, True, marks=pytest.mark.slow), (4, False)]
)
def test_global_latent_drawn_once_with_discrete_local_ones(size, vectorize):
    exact = BetaBernoulli(N=8, subsample_size=size)
    exact.set_guide(log_beta=exact.values["log_beta"] + 1.0)  # far off: gradients that stand out
    elbo = TraceIWAE_ELBO(3, vectorize_particles=vectorize)
    losses = []
    assert_gradient(elbo, exact, exact.grad(exact.iwae, 3), 130, losses=losses)
    assert_mean(-torch.tensor(losses), exact.iwae(3))


@modes
@pytest.mark.parametrize("size", [None, 3])
def test_exact_local_posteriors_leave_the_bound_of_the_global_latent(size, vectorize):
    """At each draw of it, for any local latents."""
    exact = HierarchicalGaussian(N=6, subsample_size=size)
    exact.set_guide("conditional")
    elbo = TraceIWAE_ELBO(4, vectorize_particles=vectorize)
    for seed in range(3):
        pyro.set_rng_seed(seed)
        sample = elbo._sample(programs(exact))
        pyro.set_rng_seed(seed)
        loss = elbo.loss(exact.model, exact.guide)
        theta, rows = sample.global_values()["theta"], sample.subsamples["data"]
        noise = (exact.tau**2 + exact.sigma**2).sqrt()
        likelihood = dist.Normal(theta, noise).log_prob(exact.x[rows])
        assert torch.allclose(sample.log_weight, likelihood.expand_as(sample.log_weight))
        p = exact.params()
        shared = dist.Normal(0.0, exact.tau0).log_prob(theta)
        shared = shared - dist.Normal(p["m"], p["log_s"].exp()).log_prob(theta)
        assert torch.allclose(-torch.tensor(loss), shared + 6 / len(rows) * likelihood.sum())


def test_joint_weight_is_exact_where_the_joint_guide_is():
    exact = HierarchicalGaussian(N=6)
    exact.set_guide("exact")
    elbo = TraceIWAE_ELBO(3, joint=True, vectorize_particles=True)
    assert abs(elbo.loss(exact.model, exact.guide) + exact.log_evidence()) < 1e-6


@pytest.mark.slow
def test_joint_bound_rises_above_that_of_a_single_global_draw():
    exact = HierarchicalGaussian(N=3)
    joint = values(TraceIWAE_ELBO(200, joint=True, vectorize_particles=True), exact, 60)
    once = values(TraceIWAE_ELBO(200, vectorize_particles=True), exact, 150)
    assert joint.mean() < exact.log_evidence() + 3 * joint.std() / 60**0.5
    assert joint.mean() > once.mean() + 3 * once.std() / 150**0.5
    assert_mean(once, exact.global_bound(), sigmas=6)


@pytest.mark.slow
def test_doubly_reparameterized_signal_grows_with_particles_where_the_plain_one_falls():
    # Rainforth et al. (2018): the guide's gradient has signal-to-noise 1/sqrt(K) with reparam,
    # Tucker et al. (2019): sqrt(K) with dreg.
    def signal_to_noise(estimator, num_particles):
        exact = ConjugateGaussian(N=100)
        elbo = TraceIWAE_ELBO(num_particles, gradient_estimator=estimator, vectorize_particles=True)
        grad = gradients(elbo, exact, 60)["a"]
        return (grad.mean() / grad.std()).abs()

    ratios = {e: [signal_to_noise(e, k) for k in (5, 200)] for e in ("reparam", "dreg")}
    assert ratios["dreg"][1] > 3 * ratios["dreg"][0]
    assert ratios["reparam"][1] < ratios["reparam"][0] / 2


@pytest.mark.parametrize(
    ("objective", "estimator", "vectorize"),
    [
        (TraceIWAE_ELBO, "stl", True),
        (functools.partial(TraceRenyi_ELBO, 0.5), "dreg", False),
        (TraceIWAE_ELBO, "vimco", True),
        (TraceIWAE_ELBO, "auto", True),
        (functools.partial(TraceRenyi_ELBO, 0.5), "auto", True),
    ],
)
def test_the_models_gradient_is_that_of_the_bound(objective, estimator, vectorize):
    # Its prior has parameters too, at the sites whose gradient is another one for the guide.
    x = torch.tensor([0.5, -1.0, 2.0, 0.1, 1.3, -0.4])

    def model():
        loc, slope = (pyro.param(n, torch.tensor(v)) for n, v in (("loc", 0.7), ("slope", 1.2)))
        with pyro.plate("data", 6):
            z = pyro.sample("z", dist.Normal(loc, 1.1))
            w = pyro.sample("w", dist.Normal(loc * z, 0.8))
            pyro.sample("x", dist.Normal(slope * w, 0.7), obs=x)

    def guide():
        a = pyro.param("a", torch.tensor(0.2))
        with pyro.plate("data", 6):
            pyro.sample("z", dist.Normal(a * x, 0.9))
            pyro.sample("w", dist.Normal(a + 0.5 * x, 0.6))

    result = []
    for name in ("reparam", estimator):
        elbo = objective(num_particles=6, gradient_estimator=name, vectorize_particles=vectorize)
        elbo.loss(model, guide)
        pyro.set_rng_seed(0)
        elbo.loss_and_grads(model, guide)
        params = dict(pyro.get_param_store().named_parameters())
        result.append([params[n].grad.clone() for n in ("loc", "slope")])
        for p in params.values():
            p.grad = None
    torch.testing.assert_close(*result)


def test_particles_of_weight_zero_carry_no_gradient():
    def model():
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.Uniform(0.0, 1.0, validate_args=False))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.zeros(2))

    def guide():
        loc = pyro.param("loc", torch.tensor(0.5))
        with pyro.plate("data", 2):
            pyro.sample("z", dist.Normal(loc, 0.5))

    for estimator in ("reparam", "dreg", "stl", "vimco", "auto"):
        elbo = TraceIWAE_ELBO(50, gradient_estimator=estimator, vectorize_particles=True)
        assert torch.isfinite(torch.tensor(elbo.loss_and_grads(model, guide)))
        grad = dict(pyro.get_param_store().named_parameters())["loc"].grad
        assert torch.isfinite(grad), estimator


def test_scale_and_mask_of_the_user_act_inside_the_weights():
    x = torch.tensor([0.5, -1.0, 2.0])
    mask = torch.tensor([True, False, True])

    def programs_of(scale):
        def model():
            with (
                pyro.plate("data", 3),
                pyro.poutine.scale(scale=scale),
                pyro.poutine.mask(mask=mask),
            ):
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
                pyro.sample("x", dist.Normal(z, 1.0), obs=x)

        def guide():
            with (
                pyro.plate("data", 3),
                pyro.poutine.scale(scale=scale),
                pyro.poutine.mask(mask=mask),
            ):
                pyro.sample("z", dist.Normal(x / 3, 0.8))

        return model, guide

    for scale in (1.0, 0.3, torch.tensor([0.2, 1.0, 3.0])):
        pyro.set_rng_seed(0)
        bounds = TraceIWAE_ELBO(5, vectorize_particles=True).bounds(*programs_of(scale))
        pyro.set_rng_seed(0)
        eps = torch.randn(5, 3)
        z = x / 3 + 0.8 * eps
        log_w = dist.Normal(0.0, 1.0).log_prob(z) + dist.Normal(z, 1.0).log_prob(x)
        log_w = scale * (log_w - dist.Normal(x / 3, 0.8).log_prob(z))
        expected = torch.where(mask, log_mean_exp(log_w), torch.zeros(3))
        assert torch.allclose(bounds.per_datum, expected)


def programs(exact):
    return Programs(exact.model, exact.guide, (), {})


@pytest.mark.parametrize("estimator", ["auto", "stl", "vimco"])
def test_straight_through_draws_keep_their_gradient(estimator):
    def model():
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.RelaxedBernoulliStraightThrough(torch.tensor(0.5), 0.4))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.ones(2))

    def guide():
        probs = pyro.param("probs", torch.tensor(0.5))
        with pyro.plate("data", 2):
            pyro.sample("z", dist.RelaxedBernoulliStraightThrough(torch.tensor(0.5), probs))

    result = []
    for name in ("reparam", estimator):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        TraceIWAE_ELBO(4, gradient_estimator=name, vectorize_particles=True).loss_and_grads(
            model, guide
        )
        result.append(dict(pyro.get_param_store().named_parameters())["probs"].grad.clone())
    assert torch.isfinite(result[0])
    assert torch.allclose(*result)


@pytest.mark.parametrize("estimator", ["stl", "dreg", "vimco", "auto"])
def test_a_learned_scale_has_the_gradient_of_reparam(estimator):
    # No draw depends on it, so that one seed has one gradient; what takes the score of log q out
    # took its scale's gradient out as well, 87.7 instead of 6.2 in sixty data.
    x, result = torch.tensor([0.5, 1.5, -1.0]), []

    def latent(loc, s):
        with pyro.poutine.scale(scale=pyro.param("temper", torch.tensor(0.7))):
            return pyro.sample("z", dist.Normal(loc, s))

    def model():
        with pyro.plate("data", 3):
            pyro.sample("x", dist.Normal(latent(torch.zeros(3), 1.0), 1.0), obs=x)

    def guide():
        slope = pyro.param("slope", torch.tensor(0.4))
        with pyro.plate("data", 3):
            latent(slope * x, 0.8)

    for name in ("reparam", estimator):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        TraceIWAE_ELBO(3, gradient_estimator=name, vectorize_particles=True).loss_and_grads(
            model, guide
        )
        result.append(dict(pyro.get_param_store().named_parameters())["temper"].grad.clone())
    assert torch.allclose(*result)
    assert result[0].abs() > 0.1


@pytest.mark.parametrize(
    ("estimator", "vectorize", "size"),
    [("reparam", False, None), ("dreg", True, None), ("vimco", True, None), ("auto", None, 80)],
)
def test_gradient_is_exact_for_a_gaussian_guide(estimator, vectorize, size):
    exact = ConjugateGaussian(N=250, subsample_size=size)
    elbo = TraceIWAE_ELBO(2, gradient_estimator=estimator, vectorize_particles=vectorize)
    target = exact.grad(exact.iwae_per_datum, 2)
    assert_gradient(elbo, exact, target, 80 if size else 20)


# Guides whose gradients an estimator could get wrong, each with the mean of another one.


class Pair(NamedTuple):
    """
    A model and a guide.

    :ivar values: what the guide's parameters start at.
    """

    model: Callable[[], None]
    guide: Callable[[], None]
    values: dict[str, Tensor]

    @staticmethod
    def of(program, **values):
        def params():
            return [pyro.param(n, v.clone()) for n, v in values.items()]

        return Pair(lambda: program(None), lambda: program(params()), values)


def categories_and_normals():
    x = torch.tensor([-1.0, 0.5, 2.0]).repeat(200)

    def program(params):
        with pyro.plate("data", len(x)):
            fn = dist.Bernoulli(0.4) if params is None else dist.Bernoulli(logits=params[0] + x)
            c = pyro.sample("c", fn)
            loc = 2 * c - 1 if params is None else params[1][c.long()] + 0.3 * x
            z = pyro.sample("z", dist.Normal(loc, 1.0 if params is None else 0.9))
            if params is None:
                pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    return Pair.of(program, logit=torch.tensor(0.3), loc=torch.tensor([-1.5, 2.0]))


def behind_a_normal():
    """The distribution of c depends on z: the score of c sends a gradient through z."""
    x = torch.tensor([1.2, -0.4]).repeat(2400)

    def program(params):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(*((0.0, 1.0) if params is None else (params[0], 0.6))))
            logits = torch.tensor(-0.85) if params is None else 2 * z
            c = pyro.sample("c", dist.Bernoulli(logits=logits))
            if params is None:
                pyro.sample("x", dist.Normal(z + 2 * c, 0.7), obs=x)

    return Pair.of(program, loc=torch.tensor(0.3))


def inverted_flow():
    torch.manual_seed(0)
    x, flow = torch.randn(200, 2), dist.transforms.affine_coupling(2, [8])

    def program(params):
        with pyro.plate("data", 200):
            if params is None:
                z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
                pyro.sample("x", dist.Normal(z, 0.7).to_event(1), obs=x)
            else:
                base = dist.Normal(params[0] * x + params[1], 1.0).to_event(1)
                pyro.sample("z", dist.TransformedDistribution(base, [flow]))

    return Pair.of(program, slope=torch.tensor(0.1), shift=torch.ones(2))


def weighted(**around):
    """Under a scale or a mask, with one latent of two numbers, or an inner plate of two."""
    x = torch.tensor([0.5, -1.0, 2.0]).repeat(200).unsqueeze(-1)
    kept = around.get("mask", torch.ones(600, 2, dtype=torch.bool))

    def program(params):
        with pyro.plate("data", 600, dim=-2), pyro.poutine.scale(scale=around.get("scale", 1.0)):
            with pyro.plate("pair", 2), pyro.poutine.mask(mask=kept):
                fn = dist.Normal(torch.zeros(600, 2), 1.0)
                if params is not None:
                    fn = dist.Normal(params[0] * x, params[1].exp())
                z = pyro.sample("z", fn)
            if params is None:
                total = torch.where(kept, z, 0.0).sum(-1, keepdim=True)
                pyro.sample("x", dist.Normal(total, 1.0), obs=x)

    return Pair.of(program, slope=torch.tensor([0.6, 0.1]), log_s=torch.tensor([0.3, 0.0]))


def relaxed():
    """Draws whose logarithms are kept apart from their values."""
    soft = partial(dist.RelaxedOneHotCategorical, torch.tensor(0.5))

    def program(params):
        with pyro.plate("data", 2000):
            logits = torch.zeros(3) if params is None else params[0]
            z = pyro.sample("z", soft(logits=logits.expand(2000, 3)))
            if params is None:
                x = torch.full((2000,), 0.3)
                pyro.sample("x", dist.Normal(z[..., 0].tanh(), 1.0), obs=x)

    return Pair.of(program, logits=torch.tensor([0.3, -0.2, 0.5]))


SCALES = torch.tensor([0.3, 1.0, 3.0]).repeat(200).unsqueeze(-1)
MASK = torch.tensor([[True, False], [True, True], [False, True]]).repeat(200, 1)
# The programs, and the estimators to be compared with "reparam".
SAME_MEANS = {
    "categories and normals": (categories_and_normals, ("auto", "vimco")),
    "behind a normal": (behind_a_normal, ("auto",)),
    "chain": (lambda: LinearGaussianChain(N=90, T=2), ("dreg", "auto")),
    "flow": (inverted_flow, ("dreg",)),
    "scales": (lambda: weighted(scale=SCALES), ("auto", "vimco")),
    "mask": (lambda: weighted(mask=MASK), ("auto", "vimco")),
    "relaxed": (relaxed, ("dreg",)),
    "order": (lambda: ConjugateGaussian(N=500), ("dreg", "auto")),
}


@pytest.mark.parametrize("name", some_slow(SAME_MEANS, "scales", "chain", "flow", "mask", "order"))
def test_every_estimator_has_the_mean_of_reparam(name):
    make, estimators = SAME_MEANS[name]
    programs, count, means = make(), 20, {}
    for estimator in ("reparam", *estimators):
        kind = partial(TraceRenyi_ELBO, 0.5) if name == "order" else TraceIWAE_ELBO
        elbo = kind(num_particles=4, gradient_estimator=estimator, vectorize_particles=True)
        means[estimator] = gradients(elbo, programs, count)
    for key, plain in means["reparam"].items():
        for estimator in estimators:
            other = means[estimator][key]
            error = ((plain.var(0) + other.var(0)) / count).sqrt()
            assert ((plain.mean(0) - other.mean(0)).abs() <= 4.8 * error + 1e-9).all(), estimator
            # A factor that is missing or too much would be seen.
            assert (other.mean(0).abs() > 5 * other.std(0) / count**0.5).any()


# Supports that move have a score with another mean than zero, on which all but reparam rest: dreg
# and auto were 20 and 48 standard errors off. The second distribution is a part of the unit
# interval on a part of the line, with ends where loc and scale put them.
LOGIT = dist.transforms.SigmoidTransform().inv
LOW, HIGH = torch.tensor(0.1), torch.tensor(0.9)
MOVING = {
    "ends": ([-1.0, 2.0], dist.Uniform, lambda a, b, u: a + (b - a) * u, dist.Uniform(-2.0, 3.0)),
    "truncated": (
        [0.1, 1.2],
        lambda a, b: dist.TransformedDistribution(
            dist.Uniform(LOW, HIGH), [LOGIT, dist.transforms.AffineTransform(a, b)]
        ),
        lambda a, b, u: a + b * LOGIT(LOW + (HIGH - LOW) * u),
        dist.Normal(0.0, 1.5),
    ),
}


@in_turn(estimator=["reparam", "dreg", "vimco", "auto"], name=MOVING)
def test_a_support_that_moves_has_the_exact_gradient(name, estimator):
    start, make, draw, prior = MOVING[name]
    x, size, values = torch.tensor(0.7), 5000, torch.tensor(start)

    def program(params):
        with pyro.plate("data", size):
            z = pyro.sample("z", prior if params is None else make(*params[0]))
            if params is None:
                pyro.sample("x", dist.Normal(z, 0.8), obs=x.expand(size))

    leaf = values.clone().requires_grad_()
    z = draw(*leaf, (torch.arange(400) + 0.5) / 400)
    log_weight = prior.log_prob(z) + dist.Normal(z, 0.8).log_prob(x) - make(*leaf).log_prob(z)
    pair = torch.stack(torch.broadcast_tensors(log_weight[:, None], log_weight))
    (exact,) = torch.autograd.grad(log_mean_exp(pair).mean(), leaf)
    elbo = TraceIWAE_ELBO(2, gradient_estimator=estimator, vectorize_particles=True)
    result = gradients(elbo, Pair.of(program, values=values), 12)["values"] / size
    assert_mean(result, exact)
    assert (exact.abs() > 0.01).all()


@pytest.mark.slow
def test_a_mean_of_bounds_inside_the_logarithm_has_its_own_gradient_with_reparam():
    """The third bound of docs/special_cases.md; its value at fixed noise has this slope."""
    exact, step = HierarchicalGaussian(N=3), 1e-6
    elbo = TraceIWAE_ELBO(4, gradient_estimator="reparam")

    def bound():
        pyro.set_rng_seed(1)
        bounds = [-elbo.differentiable_loss(exact.model, exact.guide) for _ in range(3)]
        return torch.stack(bounds).logsumexp(0) - math.log(3)

    bound()  # makes the parameters
    parameters = [p for _, p in pyro.get_param_store().named_parameters()]
    gradients = torch.autograd.grad(bound(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        values = []
        for change in (step, -2 * step, step):
            parameter.data += change
            values.append(bound().detach())
        slope = float(values[0] - values[1]) / (2 * step)
        assert float(gradient.sum()) == pytest.approx(slope, rel=1e-5)
