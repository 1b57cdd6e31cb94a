"""Closed-form parameters: where the gradient of the free energy vanishes."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import BernoulliPrior, GaussianNoise, TruncatedPosterior

N, H, D = 20, 3, 4
MADE = torch.Generator().manual_seed(0)
X = torch.randn(N, D, generator=MADE, dtype=torch.float64)
WEIGHT = torch.randn(H, D, generator=MADE, dtype=torch.float64)
KNOWN = torch.rand(N, D, generator=MADE) > 0.3


def make(missing, shape):
    pi, sigma = torch.full((H,), 0.3), torch.full(shape, 0.8)

    def model(index):
        with pyro.plate("data", N, subsample=index):
            z = pyro.sample("z", dist.Bernoulli(pi).to_event(1))
            pixels = dist.Normal(z @ WEIGHT, sigma)
            pixels = pixels.mask(KNOWN[index]) if missing else pixels
            x = torch.where(KNOWN, X, torch.tensor(float("nan"))) if missing else X
            x = x.nan_to_num(77.0)
            pyro.sample("x", pixels.to_event(1), obs=x[index])

    return model, pi, sigma


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("shape", [(), (D,)])
def test_updates_are_the_m_step_of_the_free_energy(missing, shape):
    model, pi, sigma = make(missing, shape)
    guide = TruncatedPosterior(model, 2**H)
    updates = [BernoulliPrior("z", pi), GaussianNoise("x", sigma)]
    joint = guide.posterior(torch.arange(N))
    q, states = joint.weights, joint.values["z"]
    for index in torch.randperm(N).split(6):
        posterior = guide.posterior(index)
        for update in updates:
            update.add(posterior)
    for update in updates:
        update.update()
    p, s = pi.clone().requires_grad_(), sigma.clone().requires_grad_()
    prior = dist.Bernoulli(p).log_prob(states).sum(-1)
    weight = KNOWN.to(X) if missing else torch.ones_like(X)
    pixels = (dist.Normal(states @ WEIGHT, s).log_prob(X) * weight).sum(-1)
    (q * (prior + pixels)).sum().backward()
    assert torch.allclose(p.grad, torch.zeros_like(p), atol=1e-8)
    assert torch.allclose(s.grad, torch.zeros_like(s), atol=1e-8)


def test_alternating_updates_raise_the_free_energy():
    model, pi, sigma = make(True, ())
    guide = TruncatedPosterior(model, 5)
    updates = [BernoulliPrior("z", pi), GaussianNoise("x", sigma)]
    everything, before = torch.arange(N), -torch.inf
    for _ in range(6):
        now = guide.fit(everything).sum()
        assert now >= before - 1e-9
        before = now
        for update in updates:
            update.add(guide.posterior(everything))
            update.update()


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="site 'z' has a closed form and requires gradients"):
        BernoulliPrior("z", torch.ones(3, requires_grad=True))
    with pytest.raises(ValueError, match="no statistics yet"):
        GaussianNoise("x", torch.ones(())).update()
    model, _, sigma = make(False, ())
    posterior = TruncatedPosterior(model, 4).posterior(torch.arange(N))
    with pytest.raises(ValueError, match="no site 'y'"):
        GaussianNoise("y", sigma).add(posterior)
    with pytest.raises(ValueError, match="is Bernoulli, and not Normal"):
        GaussianNoise("z", sigma).add(posterior)
