"""Enumerated sites are drawn from their joint posterior."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.ops.indexing import Vindex

from pyro_mcvae.programs.enumeration import StateMessenger, draw_states

PARALLEL = {"enumerate": "parallel"}
DRAWS = 20_000


def chain(mask=True):
    y, transit = 0, torch.tensor([[0.8, 0.2], [0.3, 0.7]])
    for t in pyro.markov(range(3)):
        with poutine.mask(mask=mask if t == 1 else True):
            y = pyro.sample(f"y_{t}", dist.Categorical(Vindex(transit)[y, :]), infer=PARALLEL)
            mean = torch.tensor([-0.5, 0.9])[y]
            pyro.sample(f"x_{t}", dist.Normal(mean, 0.8), obs=torch.tensor([0.2, -0.4, 1.0])[t])


def one_hot():
    pi = torch.tensor([0.5, 0.2, 0.3])
    a = pyro.sample("y_0", dist.OneHotCategorical(pi), infer=PARALLEL)
    mean = (a * torch.tensor([0.0, 1.0, -1.0])).sum(-1)
    b = pyro.sample("y_1", dist.Bernoulli(0.5 + 0.4 * mean), infer={**PARALLEL, "expand": True})
    pyro.sample("x", dist.Normal(mean + b, 1.0), obs=torch.tensor(0.7))


def masked_chain():
    chain(torch.tensor(False))


def exact(model, sites):
    """The probability of each combination of values, by Bayes' rule."""
    supports = [list(s["fn"].enumerate_support(expand=False)) for s in sites.values()]
    result = []
    for values in itertools.product(*supports):
        with poutine.condition(data=dict(zip(sites, values, strict=True))):
            trace = poutine.trace(model).get_trace()
        # A mask takes no state out of the model.
        result.append(
            sum(
                s["fn"].log_prob(s["value"])
                for n, s in trace.nodes.items()
                if s["type"] == "sample" and not _is_masked(s, n in sites)
            )
        )
    return torch.stack(result).softmax(0)


def _is_masked(site, is_state):
    return not is_state and site["mask"] is not None and not bool(torch.as_tensor(site["mask"]))


@pytest.mark.parametrize("model", [chain, masked_chain, one_hot])
def test_draws_have_the_frequencies_of_the_posterior(model):
    trace = poutine.trace(model).get_trace()
    sites = {n: s for n, s in trace.nodes.items() if n.startswith("y_")}
    probabilities = exact(model, sites)
    with (
        poutine.trace() as tracer,
        StateMessenger(poutine.Trace(), -2),
        pyro.plate("draws", DRAWS, dim=-1),
    ):
        model()
    drawn = draw_states(tracer.trace)
    index = torch.zeros(DRAWS, dtype=torch.long)
    for name, site in sites.items():
        support = site["fn"].enumerate_support(expand=False)
        assert drawn[name].shape == (DRAWS, *site["fn"].event_shape)
        equal = drawn[name].unsqueeze(1) == support
        equal = equal.flatten(2).all(-1) if equal.dim() > 2 else equal
        index = index * len(support) + equal.long().argmax(-1)
    result = torch.bincount(index, minlength=len(probabilities)) / DRAWS
    error = (probabilities * (1 - probabilities) / DRAWS).sqrt()
    assert ((result - probabilities).abs() < 4.5 * error + 1e-12).all()
