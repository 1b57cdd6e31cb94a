"""Several draws of the global latents inside of the logarithm: values, gradients, refusals."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import TraceIWAE_ELBO
from tests.estimates import assert_mean, gradients, values
from tests.models import ConjugateGaussian, HierarchicalGaussian

AUXILIARY = {"is_auxiliary": True}
modes = pytest.mark.parametrize("vectorize", [False, True])


def nested(M, K, estimator="auto", **options):
    options = {"vectorize_particles": True, "max_plate_nesting": 1, **options}
    return TraceIWAE_ELBO(K, estimator, num_global_particles=M, **options)


def over_theta(exact, M, params=None, nodes=24):
    """E log mean_m p(theta_m, x) / q(theta_m) of M = 2 draws, by quadrature over both."""
    assert M == 2
    p = exact.resolve(params)
    t = torch.linspace(-7.0, 7.0, 8 * nodes)
    log_h = -0.5 * t**2 - 0.5 * math.log(2 * math.pi) + (t[1] - t[0]).log()
    theta = p["m"] + p["log_s"].exp() * t
    v = exact.tau**2 + exact.sigma**2
    log_p = dist.Normal(0.0, exact.tau0).log_prob(theta)
    log_p = log_p + dist.Normal(theta[:, None], v.sqrt()).log_prob(exact.x).sum(-1)
    log_w = log_p - dist.Normal(p["m"], p["log_s"].exp()).log_prob(theta)
    pairs = torch.logaddexp(log_w[:, None], log_w) - math.log(2)
    return ((log_h[:, None] + log_h).exp() * pairs).sum()


@modes
def test_mean_weight_is_the_evidence(vectorize):
    exact = HierarchicalGaussian(N=3)
    elbo = nested(2, 2, vectorize_particles=vectorize)
    found = values(elbo, exact, 150)
    assert_mean((found - exact.log_evidence()).exp(), 1.0)


def test_exact_guides_give_the_evidence():
    exact = HierarchicalGaussian(N=3)
    exact.set_guide("exact")
    bounds = nested(3, 2).bounds(exact.model, exact.guide)
    assert bounds.per_datum.shape == ()
    assert math.isclose(bounds.total, exact.log_evidence(), rel_tol=1e-12)


def test_value_and_gradient_are_exact_where_the_local_guide_is():
    exact = HierarchicalGaussian(N=4)
    exact.set_guide("conditional")
    assert_mean(values(nested(2, 2), exact, 80), over_theta(exact, 2))
    target = exact.grad(lambda M, params=None: over_theta(exact, M, params), 2)
    found = gradients(nested(2, 2), exact, 120)
    for name in ("m", "log_s"):
        assert_mean(found[name], target[name])


def discrete_pair(local_logits):
    """A coin for all data, and one for each; the guide's coins of the data follow the first."""
    x = torch.tensor([0.3, 1.4])

    def model():
        a = pyro.sample("a", dist.Bernoulli(0.3))
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.Bernoulli(0.2 + 0.5 * a))
            pyro.sample("x", dist.Normal(z + 0.5 * a, 0.7), obs=x)

    def guide():
        a = pyro.sample("a", dist.Bernoulli(logits=pyro.param("a_logit", torch.tensor(0.2))))
        slope = pyro.param("slope", torch.tensor(0.4))
        with pyro.plate("data", 2):
            logits = pyro.param("logits", lambda: local_logits.clone())
            pyro.sample("z", dist.Bernoulli(logits=logits + slope * a))

    return model, guide, x


def enumerated(x, a_logit, slope, logits, M, K):
    """The bound's expectation, over all M * (1 + 2 K) coins."""
    coins = torch.tensor([0.0, 1.0])
    q_a = dist.Bernoulli(logits=a_logit).log_prob(coins)
    p_a = dist.Bernoulli(0.3).log_prob(coins) - q_a
    # For each a: all K-tuples of z of one datum, with the log of their mean weight.
    tuples = torch.tensor(list(itertools.product([0.0, 1.0], repeat=K)))
    a, z = coins[:, None, None, None], tuples[None, None]
    q_z = dist.Bernoulli(logits=logits[:, None, None] + slope * a)
    log_q = q_z.log_prob(z)
    log_w = dist.Bernoulli(0.2 + 0.5 * a).log_prob(z) - log_q
    log_w = log_w + dist.Normal(z + 0.5 * a, 0.7).log_prob(x[:, None, None])
    bound, log_q = log_w.logsumexp(-1) - math.log(K), log_q.sum(-1)  # [a, datum, tuple]
    total = p_a[:, None, None] + bound[:, 0, :, None] + bound[:, 1, None, :]
    prob = q_a[:, None, None] + log_q[:, 0, :, None] + log_q[:, 1, None, :]
    total, prob = total.flatten(), prob.flatten()
    draws = torch.cartesian_prod(*[torch.arange(len(total))] * M)
    mean = total[draws].logsumexp(-1) - math.log(M)
    return (prob[draws].sum(-1).exp() * mean).sum()


@pytest.mark.parametrize(("M", "K"), [(2, 1), (2, 2), (3, 1)])
def test_gradient_is_exact_for_discrete_guides(M, K):
    model, guide, x = discrete_pair(torch.tensor([0.5, -0.6]))
    guide()
    names = ("a_logit", "slope", "logits")
    params = [pyro.param(n).detach().clone().requires_grad_() for n in names]
    target = enumerated(x, *params, M, K)
    target.backward()
    elbo, found = nested(M, K), []
    for i in range(100):
        with pyro.validation_enabled(i == 0):
            loss = elbo.loss_and_grads(model, guide)
        grads = [-pyro.param(n).unconstrained().grad for n in names]
        found.append(torch.cat([torch.tensor([-loss]), *(g.flatten() for g in grads)]))
        for n in names:
            pyro.param(n).unconstrained().grad = None
    exact = torch.cat([target.detach().view(1), *(p.grad.flatten() for p in params)])
    assert_mean(torch.stack(found), exact)


def test_dreg_squares_the_product_of_both_weights():
    """Of a local draw z_mk ~ N(c, 1): the gradient is sum_mk (v_m w_mk)^2 d log w_mk / d z_mk."""
    x, seen = torch.tensor(1.3), []

    def model():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 1):
            z = pyro.sample("z", dist.Normal(0.5 * theta, 1.0))
            seen.append((theta.detach(), z.detach().squeeze()))
            pyro.sample("x", dist.Normal(z, 0.8), obs=x)

    def guide():
        pyro.sample("theta", dist.Normal(0.4, 1.2))
        c = pyro.param("c", torch.tensor(0.2))
        with pyro.plate("data", 1):
            pyro.sample("z", dist.Normal(c, torch.ones(1)))

    elbo = nested(3, 4, "dreg")
    for _ in range(4):  # which also find out about the programs
        elbo.loss(model, guide)
    seen.clear()
    elbo.loss_and_grads(model, guide)
    theta, z = torch.stack([t for t, _ in seen[-3:]]), torch.stack([z for _, z in seen[-3:]])
    theta, z = theta.reshape(3, 1), z.clone().requires_grad_()
    log_p = dist.Normal(0.5 * theta, 1.0).log_prob(z) + dist.Normal(z, 0.8).log_prob(x)
    log_w = log_p - dist.Normal(0.2, 1.0).log_prob(z)
    outer = dist.Normal(0.0, 1.0).log_prob(theta) - dist.Normal(0.4, 1.2).log_prob(theta)
    weight = (log_w.logsumexp(1) + outer.squeeze(1)).softmax(0)[:, None] * log_w.softmax(1)
    (slope,) = torch.autograd.grad(log_w.sum(), z)
    expected = (weight.detach().square() * slope).sum()
    torch.testing.assert_close(-pyro.param("c").grad, expected)


def test_it_is_tighter_than_one_draw_of_the_globals():
    exact = HierarchicalGaussian(N=4)
    one, more = (values(nested(M, 5), exact, 80) for M in (1, 8))
    assert more.mean() > one.mean() + 4 * one.std().hypot(more.std()) / 80**0.5
    assert more.mean() < exact.log_evidence()


@pytest.mark.parametrize("M", [1, 5])
def test_without_global_latents_it_is_the_default(M):
    exact = ConjugateGaussian(N=5)
    found = []
    for elbo in (nested(M, 3), TraceIWAE_ELBO(3, vectorize_particles=True)):
        pyro.set_rng_seed(0)
        found.append(elbo.loss(exact.model, exact.guide))
    assert found[0] == found[1]


def test_what_a_guide_observes_stays_outside_of_the_average():
    exact = HierarchicalGaussian(N=3)
    exact.set_guide("exact")

    def guide():
        exact.guide()
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(1.5), infer=AUXILIARY)

    extra = float(dist.Normal(0.0, 1.0).log_prob(torch.tensor(1.5)))
    found = -nested(3, 2).loss(exact.model, guide)
    plain = -TraceIWAE_ELBO(2).loss(exact.model, guide)
    assert math.isclose(found, exact.log_evidence() - extra, rel_tol=1e-12)
    assert math.isclose(plain, exact.log_evidence() - extra, rel_tol=1e-12)


def test_minibatches_and_joint_weights_are_refused():
    exact = HierarchicalGaussian(N=10, subsample_size=4)
    with pytest.raises(ValueError, match=r"num_global_particles .*subsampled \(4 of 10\)"):
        nested(2, 2).loss(exact.model, exact.guide)
    with pytest.raises(ValueError, match="num_global_particles=2 is for joint=False"):
        nested(2, 2, joint=True)
    with pytest.raises(ValueError, match="num_global_particles must be an int of at least 1"):
        nested(0, 2)
