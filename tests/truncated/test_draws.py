"""A truncated posterior as a Pyro guide: its draws are those of q(w) q(z | w, x)."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_mcvae import TraceTruncated_ELBO, TruncatedPosterior

N = 5
X = torch.tensor([2.7, -0.8, 0.4, 3.9, 1.1], dtype=torch.float64)


def model(size=None):
    """The data tell exactly that z differs from s where w is even, and is s elsewhere."""
    s = pyro.sample("s", dist.Bernoulli(0.5))
    with pyro.plate("data", N, subsample_size=size):
        w = pyro.sample("w", dist.Categorical(torch.ones(4)))
        z = pyro.sample("z", dist.Bernoulli(0.5))
        loc = (s + z + w) % 2
        pyro.sample("x", dist.Normal(loc, 0.01), obs=torch.ones(()))


def guide(size=None):
    pyro.sample("s", dist.Bernoulli(0.5))
    with pyro.plate("data", N, subsample_size=size):
        pyro.sample("w", dist.Categorical(torch.ones(4)))


@pytest.mark.parametrize("size", [None, 2])
def test_states_are_drawn_given_the_draws_beside_them(size):
    truncated = TruncatedPosterior(model, 2, guide=guide)
    count = 12
    drawn = Predictive(model, guide=truncated, num_samples=count)(size)
    s = drawn["s"].reshape(count, 1)
    rows = size or N
    assert drawn["w"].shape == drawn["z"].shape == (count, rows)
    assert torch.equal((s + drawn["w"] + drawn["z"]) % 2, torch.ones(count, rows))
    # And all values are drawn: s and w from the guide, so that z takes both.
    assert len({*s.flatten().tolist()}) == len({*drawn["z"].flatten().tolist()}) == 2


def test_draws_beside_the_states_are_one_at_a_time():
    truncated = TruncatedPosterior(model, 2, guide=guide)
    with pytest.raises(RuntimeError, match=r"draws site 's' with shape \(12, 1\) .*parallel=False"):
        Predictive(model, guide=truncated, num_samples=12, parallel=True)()


@pytest.mark.parametrize("size", [None, 2])
def test_the_elbo_of_any_draw_is_its_free_energy(size):
    """log p(x, s, w, z) - log q is the same for all z with weight: here for all draws at all."""
    truncated = TruncatedPosterior(model, 2, guide=guide)
    result = Trace_ELBO(num_particles=3).loss(model, truncated, size)
    assert math.isclose(result, TraceTruncated_ELBO().loss(model, truncated, size), rel_tol=1e-9)


def weighted(index=None):
    groups = pyro.plate("groups", 3, dim=-2)
    with groups:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", N, subsample=index, dim=-1) as i:
        z = pyro.sample("z", dist.Bernoulli(0.4))
        with groups:
            pyro.sample("x", dist.Normal(z + a, 0.5), obs=X[i])


@pytest.mark.parametrize("index", [None, torch.tensor([3, 1])])
def test_plates_of_an_autoguide_are_made_once(index):
    """Given its draws, log p - log q of the discrete part is their exact log evidence."""
    other = AutoNormal(poutine.block(weighted, hide=["z"]), init_scale=0.7)
    truncated = TruncatedPosterior(weighted, 2, guide=other)
    truncated.posterior(index)
    trace = poutine.trace(truncated).get_trace(index)
    a, z = trace.nodes["a"]["value"], trace.nodes["z"]["value"]
    log_q = trace.nodes["_data_state"]["fn"].log_prob(trace.nodes["_data_state"]["value"])
    x = X if index is None else X[index]

    def joint(z):
        return dist.Normal(z + a, 0.5).log_prob(x).sum(-2, True) + dist.Bernoulli(0.4).log_prob(z)

    exact = torch.logaddexp(*(joint(torch.tensor(v)) for v in (0.0, 1.0)))
    assert torch.allclose(joint(z) - log_q.reshape(z.shape), exact)
    assert a.shape == (3, 1)


def components():
    with pyro.plate("c", 2):
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0))
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7])))
        pyro.sample("x", dist.Normal(loc[..., z], 1.0), obs=X)


@pytest.mark.parametrize("vectorize", [False, True])
def test_components_of_a_mixture_may_lie_in_a_plate(vectorize):
    """The loss at given components: their log p - log q, and the evidence of the mixture."""
    mean = torch.tensor([0.3, 2.0], requires_grad=True)

    def other():
        with pyro.plate("c", 2):
            pyro.sample("loc", dist.Normal(mean, 0.2))

    truncated = TruncatedPosterior(components, 2, guide=other)
    elbo = TraceTruncated_ELBO(vectorize_particles=vectorize)
    elbo.loss(components, truncated)
    pyro.set_rng_seed(3)
    result = elbo.differentiable_loss(components, truncated)
    pyro.set_rng_seed(3)
    loc = dist.Normal(mean, 0.2).rsample()
    parts = dist.Categorical(torch.tensor([0.3, 0.7])), dist.Normal(loc, 1.0)
    evidence = dist.MixtureSameFamily(*parts).log_prob(X).sum()
    ratio = dist.Normal(0.0, 3.0).log_prob(loc) - dist.Normal(mean, 0.2).log_prob(loc)
    wanted = -(evidence + ratio.sum())
    gradients = [torch.autograd.grad(v, mean)[0] for v in (result, wanted)]
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close(*gradients)
