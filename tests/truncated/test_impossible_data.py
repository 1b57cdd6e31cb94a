"""States that make the data impossible, as fewer animals than were seen, need a factor."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_mcvae import TraceTruncated_ELBO, TruncatedPosterior

SEEN = torch.tensor([[2.0, 3.0, 1.0], [0.0, 0.0, 0.0], [5.0, 4.0, 6.0]])


def log_evidence_of(seen, rate, p, mask=None):
    """The N-mixture's evidence, by a sum over the number of animals."""
    n = torch.arange(0.0, 150.0)[:, None, None]
    each = dist.Binomial(torch.maximum(n, seen), p).log_prob(seen)
    each = each.masked_fill(n < seen, -torch.inf)
    if mask is not None:
        each = torch.where(mask, each, 0.0)
    return (dist.Poisson(rate).log_prob(n[..., 0]) + each.sum(-1)).logsumexp(0)


def in_an_event(seen, rate, p, mask):
    with pyro.plate("sites", len(seen)):
        n = pyro.sample("n", dist.Poisson(rate)).unsqueeze(-1)
        impossible = mask & (seen > n)
        pyro.factor("possible", torch.where(impossible.any(-1), -torch.inf, 0.0))
        visits = dist.Binomial(torch.maximum(n, seen), p * torch.ones(3)).mask(mask)
        pyro.sample("y", visits.to_event(1), obs=seen)


def in_a_plate(seen, rate, p, mask):
    with pyro.plate("sites", len(seen), dim=-2):
        n = pyro.sample("n", dist.Poisson(rate))
        with pyro.plate("visits", 3, dim=-1), poutine.mask(mask=mask):
            pyro.sample("y", dist.Binomial(torch.maximum(n, seen), p), obs=seen)
            pyro.factor("possible", torch.where(seen > n, -torch.inf, 0.0))


def one_by_one(seen, rate, p, mask):
    with pyro.plate("sites", len(seen)):
        n = pyro.sample("n", dist.Poisson(rate * torch.ones(3)))
        n = torch.stack([n, n, n], 1)  # counts dims from the left
        impossible = mask & (seen > n)
        pyro.factor("possible", torch.where(impossible.any(-1), -torch.inf, 0.0))
        visits = dist.Binomial(torch.maximum(n, seen), p * torch.ones(3)).mask(mask)
        pyro.sample("y", visits.to_event(1), obs=seen)


@pytest.mark.parametrize(
    ("model", "validates"),
    [
        (in_an_event, True),
        pytest.param(in_a_plate, False, marks=pytest.mark.slow),
        pytest.param(one_by_one, True, marks=pytest.mark.slow),
    ],
)
def test_n_mixtures_have_their_evidence_and_its_gradient(model, validates):
    rate = torch.tensor(3.0, requires_grad=True)
    p = torch.tensor(0.5, requires_grad=True)
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[0, 1] = mask[2, 2] = False
    seen = torch.where(mask, SEEN, 99.0)
    exact = log_evidence_of(seen, rate, p, mask)
    with pyro.validation_enabled(validates):
        guide = TruncatedPosterior(model, num_states=30)
        guide.fit(seen, rate, p, mask, num_steps=80)
        loss = TraceTruncated_ELBO()(model, guide)(seen, rate, p, mask)
    torch.testing.assert_close(-loss, exact.sum(), rtol=0, atol=1e-4)
    expected = torch.autograd.grad(-exact.sum(), [rate, p])
    result = torch.autograd.grad(loss, [rate, p])
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-3)


def counted(seen, rate=2.0):
    with pyro.plate("sites", len(seen)):
        n = pyro.sample("n", dist.Poisson(rate))
        pyro.sample("y", dist.Binomial(torch.maximum(n, seen), 0.5), obs=seen)
        pyro.factor("possible", torch.where(seen > n, -torch.inf, 0.0))


@pytest.mark.parametrize("num_states", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_counts_that_the_prior_never_draws_are_found(num_states):
    seen = torch.tensor([40.0, 0.0])
    guide = TruncatedPosterior(counted, num_states=num_states)
    result = guide.fit(seen, num_steps=100)
    # Seen and unseen animals are independent Poisson variables.
    exact = dist.Poisson(1.0).log_prob(seen)
    assert ((result < exact + 1e-9) & (result > exact - 0.6)).all()


@pytest.mark.slow
def test_nearly_all_states_have_nearly_all_of_the_evidence():
    seen = SEEN[:, 0]
    exact = dist.Poisson(1.0).log_prob(seen)
    wide = TruncatedPosterior(counted, num_states=30)
    torch.testing.assert_close(wide.fit(seen, num_steps=100), exact, rtol=0, atol=1e-6)


def test_what_no_state_makes_possible_is_named_with_the_remedy():
    def model(seen):
        with pyro.plate("sites", len(seen)):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(z, 1.0), obs=seen)
            pyro.factor("possible", torch.where(seen > 10, -torch.inf, 0.0))

    guide = TruncatedPosterior(model, num_states=2)
    with pytest.raises(ValueError, match=r"site 'possible' of the model.*\n.*prior_draws="):
        TraceTruncated_ELBO().loss(model, guide, torch.tensor([11.0, 2.0]))


@pytest.mark.parametrize("step", ["guide", "loss"])
def test_a_state_that_makes_the_data_impossible_is_named_with_the_remedy(step):
    def model(seen):
        with pyro.plate("sites", len(seen)):
            n = pyro.sample("n", dist.Poisson(2.0))
            pyro.sample("y", dist.Binomial(n, 0.5), obs=seen)

    guide, seen = TruncatedPosterior(model, num_states=2), torch.tensor([40.0, 0.0])
    message = r"(?s)site 'y' of the model \(Binomial.*pyro.factor\('possible', torch.where\(obs > "
    with pytest.raises(ValueError, match=message):
        guide.fit(seen) if step == "guide" else TraceTruncated_ELBO()(model, guide)(seen)


def test_data_that_are_no_counts_are_refused():
    guide = TruncatedPosterior(counted, num_states=2)
    for wrong in (torch.nan, 0.5):
        with pytest.raises(ValueError, match="distribution Binomial"):
            guide.fit(torch.tensor([wrong, 2.0]), num_steps=20)
