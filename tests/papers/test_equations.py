"""The equations and algorithms of the four papers, against a few lines of the paper itself."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    MALA,
    ULA,
    BernoulliPrior,
    EvolutionaryUpdate,
    GaussianNoise,
    LinearSchedule,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    UniformFlips,
)
from pyro_mcvae.chains.annealing import anneal, evaluator
from tests.chains.densities import correlated, frozen
from tests.estimates import assert_mean

N, M = 12, 3
X = torch.linspace(-1, 2, N).double()


def model(index):
    with pyro.plate("data", N, subsample=index):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(torch.sin(z), 0.5), obs=X[index])


def guide(index):
    with pyro.plate("data", N, subsample=index):
        pyro.sample("z", dist.Normal(0.7 * X[index], 0.6))


def draws(index, count=None):
    """The draws of the guide under the seed of the losses."""
    pyro.set_rng_seed(5)
    shape = index.shape if count is None else (count, *index.shape)
    return dist.Normal(0.7 * X[index], 0.6).expand(shape).rsample()


def log_q(z, index):
    return dist.Normal(0.7 * X[index], 0.6).log_prob(z)


def log_p(z, index):
    prior = dist.Normal(0.0, 1.0).log_prob(z)
    return prior, dist.Normal(torch.sin(z), 0.5).log_prob(X[index])


# Kingma and Welling (2014)


@pytest.mark.parametrize("analytic_kl", [False, True])
def test_estimators_a_and_b_on_a_minibatch(analytic_kl):
    """Eq. 6 and 7, with the Gaussian KL of appendix B, times N/M as in eq. 8."""
    index = torch.tensor([1, 4, 10])
    z = draws(index)
    prior, likelihood = log_p(z, index)
    loc, variance = 0.7 * X[index], torch.tensor(0.6**2)
    negative_kl = 0.5 * (1 + variance.log() - loc**2 - variance)
    bound = likelihood + (negative_kl if analytic_kl else prior - log_q(z, index))
    elbo = TraceSGVB_ELBO(analytic_kl=analytic_kl, max_plate_nesting=1)
    pyro.set_rng_seed(5)
    assert elbo.loss(model, guide, index) == pytest.approx(-N / M * bound.sum().item())


def test_full_variational_bayes_of_the_weights():
    """Eq. 21 and 24: N/M times the data, and the KL divergence of the weights once."""
    index = torch.tensor([1, 4, 10])
    loc, scale = torch.tensor([0.8, -0.3]).double(), torch.tensor([0.3, 0.2]).double()

    def full_model(index):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("data", N, subsample=index):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(w[0] * torch.sin(z) + w[1], 0.5), obs=X[index])

    def full_guide(index):
        pyro.sample("w", dist.Normal(loc, scale).to_event(1))
        guide(index)

    pyro.set_rng_seed(5)
    w = dist.Normal(loc, scale).rsample()
    z = dist.Normal(0.7 * X[index], 0.6).rsample()
    mean = 0.7 * X[index]
    of_latents = 0.5 * (1 + math.log(0.6**2) - mean**2 - 0.6**2)
    of_weights = 0.5 * (1 + (scale**2).log() - loc**2 - scale**2).sum()
    likelihood = dist.Normal(w[0] * torch.sin(z) + w[1], 0.5).log_prob(X[index])
    bound = N / M * (likelihood + of_latents).sum() + of_weights
    pyro.set_rng_seed(5)
    loss = TraceSGVB_ELBO(max_plate_nesting=1).loss(full_model, full_guide, index)
    assert loss == pytest.approx(-bound.item())


# Burda et al. (2016), and the notation of Thin et al. (2021)


def test_the_bound_of_importance_weights():
    index = torch.arange(N)
    z = draws(index, 4)
    prior, likelihood = log_p(z, index)
    log_weight = prior + likelihood - log_q(z, index)
    bound = (log_weight.logsumexp(0) - math.log(4)).sum()
    elbo = TraceIWAE_ELBO(4, vectorize_particles=True, max_plate_nesting=1)
    pyro.set_rng_seed(5)
    assert elbo.loss(model, guide, index) == pytest.approx(-bound.item())


# Thin et al. (2021)


def bridge(z, beta):
    """Eq. 2: log gamma_k and its gradient."""
    z = z.detach().requires_grad_()
    log_base, log_weight = correlated(z)
    value = log_base + beta * log_weight
    return value.detach(), torch.autograd.grad(value.sum(), z)[0]


def log_move(new, old, eta, beta):
    """Eq. 11: the density of a Langevin move."""
    return dist.Normal(old + eta * bridge(old, beta)[1], (2 * eta) ** 0.5).log_prob(new).sum(-1)


def test_algorithm_1(monkeypatch):
    """W of L-MCVAE: kernel k targets gamma_k, and the last one the joint density."""
    eta, steps = 0.1, 3
    z, noise = torch.randn(6, 2), torch.randn(3, 6, 2)
    betas = [0.0, 1 / 3, 2 / 3, 1.0]
    weight, path = -correlated(z)[0], z
    for k in range(1, steps + 1):
        new = path + eta * bridge(path, betas[k])[1] + (2 * eta) ** 0.5 * noise[k - 1]
        backward, forward = (log_move(a, b, eta, betas[k]) for a, b in ((path, new), (new, path)))
        weight, path = weight + backward - forward, new
    weight = weight + sum(correlated(path))
    frozen(monkeypatch, *noise)
    evaluate = evaluator(correlated)
    chain = anneal(evaluate(z), LinearSchedule(steps)(), ULA(eta), evaluate)
    assert torch.allclose(chain.log_weight.detach(), weight)


def test_algorithm_2(monkeypatch):
    """W of A-MCVAE sums the differences of the bridges at the states before each move."""
    eta, steps = 0.4, 3
    z, noise, uniform = torch.randn(50, 2), torch.randn(3, 50, 2), 0.6
    betas = [0.0, 1 / 3, 2 / 3, 1.0]
    weight, path, accepted = torch.zeros(50), z, []
    for k in range(1, steps + 1):
        weight = weight + bridge(path, betas[k])[0] - bridge(path, betas[k - 1])[0]
        new = path + eta * bridge(path, betas[k])[1] + (2 * eta) ** 0.5 * noise[k - 1]
        # Eq. 20 and 21, with the 2 eta that the paper's text leaves out.
        ratio = bridge(new, betas[k])[0] - bridge(path, betas[k])[0]
        ratio = ratio + log_move(path, new, eta, betas[k]) - log_move(new, path, eta, betas[k])
        accepted.append(uniform < ratio.exp())
        path = torch.where(accepted[-1].unsqueeze(-1), new, path)
    frozen(monkeypatch, *noise, uniform=uniform)
    evaluate = evaluator(correlated)
    chain = anneal(evaluate(z), LinearSchedule(steps)(), MALA(eta), evaluate)
    assert torch.allclose(chain.log_weight.detach(), weight)
    assert 0 < torch.stack(accepted).double().mean() < 1


# Liu et al. (2019)


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_rao_blackwellization_of_three_bernoullis(k):
    """Eq. 8 is unbiased, and Prop. 1 bounds its variance: section 5.1 at eta = -1."""
    p, count = torch.tensor([0.6, 0.51, 0.48]).double(), 800
    eta = torch.nn.Parameter(torch.full((count,), -1.0).double())

    def model():
        with pyro.plate("data", count):
            prior = dist.Bernoulli(0.5 * torch.ones(3).double()).to_event(1)
            z = pyro.sample("z", prior.mask(False))
            pyro.factor("f", -((z - p) ** 2).sum(-1))

    def guide():
        # The mask removes the entropy, so that the loss is E[f].
        with pyro.plate("data", count):
            q = dist.Bernoulli(logits=eta.unsqueeze(-1).expand(count, 3)).to_event(1)
            pyro.sample("z", q.mask(False))

    q = torch.tensor(-1.0).double().sigmoid()
    exact = (q * (1 - q) * (1 - 2 * p)).sum()

    def gradients(k):
        eta.grad = None
        TraceRaoBlackwell_ELBO(k, max_plate_nesting=1).loss_and_grads(model, guide)
        return eta.grad.clone()

    result = gradients(k)
    assert_mean(result, exact)
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * 3)
    mass = dist.Bernoulli(q).log_prob(states).sum(-1).exp()
    rest = 1 - mass.sort(descending=True).values[:k].sum()
    # The variance of a sample variance is estimated from its fourth moment.
    plain = ((states - p) ** 2).sum(-1) * (states - q).sum(-1)
    variance = (mass * plain**2).sum() - exact**2
    squares = (result - exact) ** 2
    assert squares.mean() <= rest * variance + 4.5 * squares.std() / count**0.5 + 1e-12


# Guiraud et al. (2021)


def test_the_free_energy_its_gradient_and_the_closed_forms():
    """Eq. 4, 5, 6 and 12, by a sum over all states."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 4, generator=generator).double()
    weight = torch.randn(3, 4, generator=generator).double().requires_grad_()
    pi, sigma = torch.tensor([0.2, 0.5, 0.4]).double(), torch.tensor(0.8).double()

    def program():
        with pyro.plate("data", 7):
            z = pyro.sample("z", dist.Bernoulli(pi).to_event(1))
            pyro.sample("x", dist.Normal(z @ weight, sigma).to_event(1), obs=x)

    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * 3)
    prior = dist.Bernoulli(pi).log_prob(states).sum(-1)
    joint = prior[:, None] + dist.Normal((states @ weight)[:, None], sigma).log_prob(x).sum(-1)
    free_energy = joint.logsumexp(0).sum()
    (expected,) = torch.autograd.grad(free_energy, weight)
    truncated = TruncatedPosterior(program, 8)
    loss = TraceTruncated_ELBO().loss_and_grads(program, truncated)
    assert loss == pytest.approx(-free_energy.item())
    assert torch.allclose(weight.grad, -expected)
    q = joint.detach().softmax(0)
    updates = BernoulliPrior("z", pi), GaussianNoise("x", sigma)
    for update in updates:
        update.add(truncated.posterior())
    for update in updates:
        update.update()
    assert torch.allclose(pi, (q.sum(1) @ states) / 7)
    residual = (x - (states @ weight.detach())[:, None]).square().mean(-1)
    assert torch.allclose(sigma, ((q * residual).sum() / 7).sqrt())


@pytest.mark.slow
def test_algorithm_1_of_tvae_never_lowers_the_free_energy():
    """With the paper's parents, flips, crossover and generations."""
    weight = torch.randn(6, 4).double()
    x = torch.randn(5, 4).double()

    def program():
        with pyro.plate("data", 5):
            z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(6)).to_event(1))
            pyro.sample("x", dist.Normal(z @ weight, 0.7).to_event(1), obs=x)

    paper = EvolutionaryUpdate(4, 2, 3, mutation=UniformFlips(), crossover=True, elitist=False)
    truncated = TruncatedPosterior(program, 5, evolution=paper)
    exact = TruncatedPosterior(program, 64).posterior().free_energy
    before = truncated.posterior().free_energy
    for _ in range(40):
        after = truncated.fit()
        assert (after >= before - 1e-9).all()
        assert (after <= exact + 1e-9).all()
        before = after
    # The five best of 64 states, by a search of all.
    everything = TruncatedPosterior(program, 64).posterior().log_joint
    best = everything.topk(5, dim=0).values.logsumexp(0)
    assert (after > best - 0.5).all()
