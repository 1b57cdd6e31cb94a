"""Custom objectives, written as in docs/extend.md: the base class does the rest."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import Estimate, MonteCarloELBO, local_estimate
from tests.estimates import assert_mean


class TraceVRMax_ELBO(MonteCarloELBO):
    def estimate(self, programs):
        sample = self.sampler.sample(programs)
        best = sample.log_weight.max(0).values
        return local_estimate(sample, best.detach(), best)


class ByHand(TraceVRMax_ELBO):
    def estimate(self, programs):
        sample = self.sampler.sample(programs)
        best = sample.log_weight.max(0).values.sum()
        return Estimate(best.detach(), best, sample.runs)


LOGITS = (0.4, -0.3, 0.1)
SIZE = 400


def model():
    with pyro.plate("data", 2 * SIZE, subsample=torch.arange(SIZE)):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.2, 0.5, 0.3])))
        pyro.sample("x", dist.Normal(k + 0.0, 0.7), obs=torch.tensor(1.4))


def guide():
    logits = pyro.param("logits", torch.tensor(LOGITS))
    with pyro.plate("data", 2 * SIZE, subsample=torch.arange(SIZE)):
        pyro.sample("k", dist.Categorical(logits=logits))


def exact_gradient():
    """Of E max(log w_1, log w_2), over all nine pairs of draws."""
    logits = torch.tensor(LOGITS, requires_grad=True)
    log_q, k = logits.log_softmax(0), torch.arange(3) + 0.0
    log_p = torch.tensor([0.2, 0.5, 0.3]).log() + dist.Normal(k, 0.7).log_prob(torch.tensor(1.4))
    log_w, q = log_p - log_q, log_q.exp()
    bound = (q[:, None] * q * torch.maximum(log_w[:, None], log_w)).sum()
    return torch.autograd.grad(bound, logits)[0]


@pytest.mark.parametrize("vectorize", [False, True])
def test_discrete_draws_have_their_score(vectorize):
    elbo = TraceVRMax_ELBO(2, vectorize_particles=vectorize)
    grads = []
    for _ in range(60):
        elbo.loss_and_grads(model, guide)
        param = pyro.param("logits")
        grads.append(-param.grad / (2 * SIZE))
        param.grad = None
    exact = exact_gradient()
    assert exact.abs().max() > 0.1
    assert_mean(torch.stack(grads), exact)


def test_an_estimate_without_scores_is_refused():
    elbo = ByHand(2)
    with pytest.raises(ValueError, match=r"site 'k'.*ByHand does not say.*scored=True"):
        elbo.loss_and_grads(model, guide)
    assert elbo.loss(model, guide) < 1e4  # without a gradient nothing is wrong
    with pytest.raises(ValueError, match=r"site 'k'.*scored=True"):
        elbo.differentiable_loss(model, guide)
    assert pyro.param("logits").grad is None


def minibatch_model(x):
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x), subsample_size=5) as i:
        pyro.sample("x", dist.Normal(z, 1.0), obs=x[i])


def minibatch_guide(x):
    pyro.sample("z", dist.Normal(pyro.param("mean", torch.tensor(0.3)), 0.4))


@pytest.mark.parametrize("vectorize", [pytest.param(False, marks=pytest.mark.slow), True])
def test_without_a_weight_it_is_the_plain_elbo(vectorize):
    """Global latents on minibatches: there were no weights to join."""
    elbo, x = TraceVRMax_ELBO(3, vectorize_particles=vectorize), torch.full((20,), 0.7)
    costs, grads = [], []
    for _ in range(80):
        costs.append(elbo.loss_and_grads(minibatch_model, minibatch_guide, x))
        grads.append(pyro.param("mean").grad.clone())
        pyro.param("mean").grad = None
    square = {at: 0.4**2 + (at - 0.3) ** 2 for at in (0.0, 0.7)}
    log_two_pi = math.log(2 * math.pi)
    cost = 20 * (log_two_pi + square[0.7]) / 2 + square[0.0] / 2 - math.log(0.4) - 0.5
    assert_mean(torch.tensor(costs), torch.tensor(cost))
    assert_mean(torch.stack(grads), torch.tensor(20 * (0.3 - 0.7) + 0.3))
    bounds = elbo.bounds(minibatch_model, minibatch_guide, x)
    assert bounds.per_datum.shape == (0,)
    assert bounds.total == bounds.shared


class Unreduced(MonteCarloELBO):
    """Forgets the particles' dim: its loss was K times too high."""

    def estimate(self, programs):
        sample = self.sampler.sample(programs)
        return local_estimate(sample, sample.log_weight.detach(), sample.log_weight)


def test_bounds_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"the bound must .*: shape \[400\], got \[3, 400\]"):
        Unreduced(3).loss(model, guide)
    with pytest.raises(NotImplementedError, match="ByHand has no bounds per datum"):
        ByHand(2).bounds(model, guide)


@pytest.mark.parametrize(("result", "kind"), [(torch.zeros(3), "Tensor"), (None, "NoneType")])
def test_another_result_than_an_estimate_is_refused(result, kind):
    elbo = type("TraceMine_ELBO", (MonteCarloELBO,), {"estimate": lambda self, programs: result})(2)
    message = rf"TraceMine_ELBO.estimate must return an Estimate, .*local_estimate.* got {kind}"
    for call in (elbo.loss, elbo.loss_and_grads, elbo.differentiable_loss, elbo.bounds):
        with pytest.raises(TypeError, match=message):
            call(model, guide)
