"""States answer for the data that they were searched for, and for no others in their place."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import TraceTruncated_ELBO, TruncatedPosterior

N, H = 6, 4
MADE = torch.Generator().manual_seed(0)
WEIGHT = 2 * torch.randn(H, 3, generator=MADE, dtype=torch.float64)
X, OTHER = (3 * torch.randn(N, 3, generator=MADE, dtype=torch.float64) for _ in range(2))
MESSAGE = "datum {} of plate 'data' has other values than before at the observed sites 'x'"


def model(x, index=None, full=N):
    with pyro.plate("data", full, subsample=index):
        z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(H)).to_event(1))
        pyro.sample("x", dist.Normal(z @ WEIGHT, 1.0).to_event(1), obs=x)


def questions(guide):
    elbo = TraceTruncated_ELBO()
    yield guide.posterior
    yield guide
    for ask in (elbo.loss, elbo.bounds):
        yield lambda *args, ask=ask: ask(model, guide, *args)
    yield lambda *args: elbo.loss_and_grads(model, guide, *args)
    yield guide.fit
    yield lambda *args: elbo.loss_and_grads(model, guide.eval(), *args)


@pytest.mark.parametrize("minibatch", [False, True])
def test_other_data_in_the_same_places_are_refused(minibatch):
    guide = TruncatedPosterior(model, 3)
    guide.fit(X, num_steps=3)
    index = torch.tensor([4, 1]) if minibatch else torch.tensor([0, 1, 2, 3, 5, 4])
    other = X[index]
    other[1] = OTHER[1]  # one of them only
    for ask in questions(guide):
        ask(X[index], index)  # in any order
        with pytest.raises(ValueError, match=MESSAGE.format(1)):
            ask(other, index)


@pytest.mark.slow
def test_where_nothing_was_searched_or_all_states_are_kept_any_data_will_do():
    guide = TruncatedPosterior(model, 3)
    guide.posterior(X)
    guide.posterior(OTHER)
    everything = TruncatedPosterior(model, 2**H)
    everything.fit(X)
    fresh = TruncatedPosterior(model, 2**H)
    result, wanted = (g.posterior(OTHER).free_energy for g in (everything, fresh))
    assert torch.allclose(result, wanted)
    drawn_anew = TruncatedPosterior(model, 3, fixed_data=False)
    drawn_anew.fit(X)
    drawn_anew.posterior(OTHER)
    guide.fit(X)
    guide.forget()
    guide.posterior(OTHER)


def test_what_the_model_draws_or_computes_from_parameters_is_no_other_data():
    shift = torch.nn.Parameter(torch.zeros(()))

    def program():
        with pyro.plate("data", N):
            z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(H)).to_event(1))
            pyro.sample("x", dist.Normal(z @ WEIGHT, 1.0).to_event(1), obs=X + shift)
            pyro.sample("y", dist.Bernoulli(0.5), obs=torch.bernoulli(0.5 * torch.ones(N)))

    guide = TruncatedPosterior(program, 3)
    guide.fit()
    with torch.no_grad():
        shift += 1.0
    guide.fit()
    guide.posterior()
