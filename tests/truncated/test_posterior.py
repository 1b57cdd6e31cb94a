"""Expectations under truncated posteriors: each datum by its own weights, in any plates."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import TruncatedPosterior

# As many members as groups: nothing but the place of a dim distinguishes them.
X = torch.tensor([[1.5, 0.2, 2.0], [1.1, 0.1, 0.9], [0.2, 1.0, 0.0]], dtype=torch.float64)


def nested():
    with pyro.plate("groups", 3, dim=-1):
        a = pyro.sample("a", dist.Bernoulli(0.5))
        with pyro.plate("members", 3, dim=-2):
            b = pyro.sample("b", dist.Bernoulli(0.3 + 0.4 * a))
            pyro.sample("x", dist.Normal(a + b, 0.7), obs=X)


def exact():
    """P(a, b_m | x) of each member and group, by Bayes: ``[a, b, members, groups]``."""
    a, b = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1), torch.tensor([0.0, 1.0]).reshape(2, 1, 1)
    each = dist.Bernoulli(0.3 + 0.4 * a).log_prob(b) + dist.Normal(a + b, 0.7).log_prob(X)
    member = each.logsumexp(1, keepdim=True)
    of_a = member.sum(2, keepdim=True).softmax(0)
    return of_a * (each - member).exp()


def test_expectations_in_nested_plates_are_the_exact_ones():
    posterior = TruncatedPosterior(nested, 16).posterior()
    q = exact()
    for function, wanted in (
        (lambda v: v["a"], q[1].sum(0)[:1]),
        (lambda v: v["b"], q[:, 1].sum(0)),
        (lambda v: v["a"] * v["b"], q[1, 1]),
        (lambda v: v["b"].sum(1, keepdim=True), q[:, 1].sum((0, 1), keepdim=True)[0]),
        (
            lambda v: torch.stack([v["a"] * v["b"], v["b"]], -1),
            torch.stack([q[1, 1], q[:, 1].sum(0)], -1),
        ),
    ):
        torch.testing.assert_close(posterior.expectation(function), wanted)
    for name in ("a", "b"):
        result = posterior.expectation(lambda v, name=name: v[name])
        torch.testing.assert_close(result, posterior.marginals()[name])


RESULTS = {
    "members summed": lambda v: v["b"].sum(1),
    "groups summed": lambda v: v["b"].sum(2),
    "other data": lambda v: v["b"][:, :, :2],
    "other states": lambda v: v["b"][:5],
}


@pytest.mark.parametrize("function", RESULTS.values(), ids=RESULTS)
def test_results_that_would_meet_other_weights_are_refused(function):
    posterior = TruncatedPosterior(nested, 16).posterior()
    with pytest.raises(ValueError, match=r"the function returned shape .*keepdim=True"):
        posterior.expectation(function)


def test_closed_forms_by_expectations_raise_the_free_energy():
    """The recipe of ``docs/api/truncated.md``: an M-step of the probabilities and of the noise."""
    x, weight = torch.randn(20, 3), torch.randn(4, 3)
    pi, sigma = torch.full((4,), 0.5), torch.tensor(2.0)

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Bernoulli(pi).to_event(1))
            pyro.sample("x", dist.Normal(z @ weight, sigma).to_event(1), obs=x)

    guide = TruncatedPosterior(model, num_states=16)
    before = guide.posterior(x)
    for _ in range(5):
        pi.copy_(before.marginals()["z"].mean(0).clamp(1e-4, 1 - 1e-4))
        squares = before.expectation(lambda values: (x - values["z"] @ weight).square())
        sigma.copy_(squares.mean().sqrt())
        after = guide.posterior(x)
        assert after.free_energy.sum() > before.free_energy.sum()
        before = after
