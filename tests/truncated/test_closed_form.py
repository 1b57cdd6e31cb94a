"""Closed-form parameters: where the gradient of the free energy vanishes."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_mcvae import (
    BernoulliPrior,
    GaussianNoise,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    load_checkpoint,
    save_checkpoint,
)

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


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize(("missing", "shape"), [(False, ()), (True, (D,)), (True, ())])
def test_updates_are_the_m_step_of_the_free_energy(missing, shape, vectorize):
    model, pi, sigma = make(missing, shape)
    guide = TruncatedPosterior(model, 2**H, vectorize=vectorize)
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


SCALE = torch.tensor([1.0, 1.0, 9.0, 4.0, 0.5])


def scaled(pi, sigma):
    with pyro.plate("data", 5), poutine.scale(scale=SCALE):
        z = pyro.sample("z", dist.Bernoulli(pi))
        pyro.sample("x", dist.Normal(2 * z, sigma), obs=X[:5, 0])


def masked_by_states(pi, sigma):
    with pyro.plate("data", 5):
        z = pyro.sample("z", dist.Bernoulli(pi))
        with poutine.mask(mask=z == 0):
            pyro.sample("x", dist.Normal(0.5, sigma), obs=X[:5, 0])


@pytest.mark.parametrize("program", [scaled, masked_by_states])
def test_updates_go_where_the_gradient_of_the_loss_says(program):
    """A Bernoulli's and a Normal's gradient are linear in the moments that an update matches."""
    pi, sigma = torch.tensor(0.4), torch.tensor(0.8)
    posterior = TruncatedPosterior(lambda: program(pi, sigma), 2).posterior()
    updates = BernoulliPrior("z", pi), GaussianNoise("x", sigma)
    for update in updates:
        update.add(posterior)
    counts = [update.count for update in updates]
    p, s = pi.clone().requires_grad_(), sigma.clone().requires_grad_()
    trained = TruncatedPosterior(lambda: program(p, s), 2)
    TraceTruncated_ELBO().loss_and_grads(trained.model, trained)
    for update in updates:
        update.update()
    assert abs(pi - p) > 1e-3
    torch.testing.assert_close(p.grad, counts[0] * (p - pi) / (p * (1 - p)), check_dtype=False)
    torch.testing.assert_close(s.grad, counts[1] * (s**2 - sigma**2) / s**3, check_dtype=False)


@pytest.mark.parametrize(
    ("family", "update", "message"),
    [
        (dist.LogNormal, lambda: GaussianNoise("x", torch.ones(())), "'x' is LogNormal, and not N"),
        (
            lambda loc, scale: dist.FoldedDistribution(dist.Normal(loc, scale)),
            lambda: GaussianNoise("x", torch.ones(())),
            "'x' is FoldedDistribution, and not Normal",
        ),
        (dist.Normal, lambda: BernoulliPrior("z", torch.ones(())), "'z' is Binomial, and not B"),
        (dist.Normal, lambda: BernoulliPrior("x", torch.ones(())), "'x' is Normal, and not B"),
    ],
)
def test_other_distributions_are_refused(family, update, message):
    def program():
        with pyro.plate("data", N):
            z = pyro.sample("z", dist.Binomial(2, 0.4))
            pyro.sample("x", family(z, 1.0), obs=X[:, 0].exp())

    with pytest.raises(ValueError, match=message):
        update().add(TruncatedPosterior(program, 3).posterior())


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="site 'z' has a closed form and requires gradients"):
        BernoulliPrior("z", torch.ones(3, requires_grad=True))
    with pytest.raises(ValueError, match="floor must be at least 0"):
        BernoulliPrior("z", torch.ones(3), floor=0.5)
    with pytest.raises(ValueError, match="floor must be a positive number"):
        GaussianNoise("x", torch.ones(()), floor=0.0)
    with pytest.raises(ValueError, match="no statistics yet"):
        GaussianNoise("x", torch.ones(())).update()
    model, _, sigma = make(False, ())
    posterior = TruncatedPosterior(model, 4).posterior(torch.arange(N))
    with pytest.raises(ValueError, match="no site 'y'"):
        GaussianNoise("y", sigma).add(posterior)
    with pytest.raises(ValueError, match="is Bernoulli, and not Normal"):
        GaussianNoise("z", sigma).add(posterior)
    noise = GaussianNoise("x", torch.tensor(2.0))
    with pytest.raises(ValueError, match=r"site 'x' has a parameter of shape .* with other v"):
        noise.add(posterior)
    assert noise.total is None


def test_a_parameter_with_an_entry_per_datum_is_refused():
    sigma = torch.ones(N)

    def program():
        with pyro.plate("data", N):
            z = pyro.sample("z", dist.Bernoulli(0.4))
            pyro.sample("x", dist.Normal(z, sigma), obs=X[:, 0])

    with pytest.raises(ValueError, match="'x' has an entry for each datum"):
        GaussianNoise("x", sigma).add(TruncatedPosterior(program, 2).posterior())


def test_a_missing_observation_that_is_not_masked_is_refused():
    sigma = torch.ones(())

    def program(x):
        with pyro.plate("data", N):
            z = pyro.sample("z", dist.Bernoulli(0.4))
            pyro.sample("x", dist.Normal(z, sigma), obs=x)

    pyro.enable_validation(False)
    x = X[:, 0].clone()
    x[3] = torch.nan
    noise = GaussianNoise("x", sigma)
    posterior = TruncatedPosterior(program, 2).posterior(X[:, 0])
    posterior.particles.runs[0].model_trace.nodes["x"]["value"] = x
    with pytest.raises(ValueError, match="statistics of site 'x' are not finite"):
        noise.add(posterior)


def test_a_checkpoint_continues_an_epoch(tmp_path):
    """As an epoch that was not interrupted."""
    model, pi, _ = make(True, ())
    guide, first, second = TruncatedPosterior(model, 5), torch.arange(8), torch.arange(8, N)
    prior = BernoulliPrior("z", pi)
    prior.add(guide.posterior(first))
    save_checkpoint(tmp_path / "epoch.pt", {"prior": prior})
    prior.add(guide.posterior(second))
    resumed = BernoulliPrior("z", pi)
    load_checkpoint(tmp_path / "epoch.pt", {"prior": resumed})
    resumed.add(guide.posterior(second))
    assert torch.equal(resumed.total, prior.total)
    assert torch.equal(resumed.count, prior.count)
    prior.update()
    assert not torch.allclose(pi, torch.full((H,), 0.3))
