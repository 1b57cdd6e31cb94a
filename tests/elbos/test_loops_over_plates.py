"""Loops over plates: entered twice, or in another order in the guide, they are the same plates."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    MALA,
    ULA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSIS_ELBO,
)

X = torch.tensor([[0.3, -1.0, 2.0], [0.5, -0.2, 1.1]])
LOCS = torch.tensor([-1.0, 0.0, 2.0])


def axes(batch):
    return pyro.plate("rows", 2), pyro.plate("columns", 3, batch)


def once(batch):
    rows, columns = axes(batch)
    for i in rows:
        for j in columns:
            z = pyro.sample(f"z_{i}_{j}", dist.Normal(0.0, 1.0))
            pyro.sample(f"x_{i}_{j}", dist.Normal(z, 1.0), obs=X[i, j])


def twice(batch):
    rows, columns = axes(batch)
    z = {}
    for i in rows:
        for j in columns:
            z[i, j] = pyro.sample(f"z_{i}_{j}", dist.Normal(0.0, 1.0))
    for i in rows:
        for j in columns:
            pyro.sample(f"x_{i}_{j}", dist.Normal(z[i, j], 1.0), obs=X[i, j])


def draw(i, j):
    pyro.sample(f"z_{i}_{j}", dist.Normal(X[i, j] / 2, 1.6 * math.sqrt(0.5)))


def swapped(batch):
    rows, columns = axes(batch)
    for j in columns:
        for i in rows:
            draw(i, j)


def losses(elbo, model, guide, count=1):
    pyro.set_rng_seed(0)
    return torch.tensor([elbo.loss(model, guide, 2) for _ in range(count)], dtype=torch.float64)


def test_elements_of_swapped_loops_have_weights_of_their_own():
    """With many particles each minibatch has its evidence."""
    evidence = dist.Normal(0.0, math.sqrt(2.0)).log_prob(X).sum(0)
    pairs = [1.5 * sum(pair).item() for pair in itertools.combinations(evidence, 2)]
    result = -losses(TraceIWAE_ELBO(20_000), once, swapped)
    assert min(abs(result.item() - pair) for pair in pairs) < 0.05


def labelled(batch):
    for i in pyro.plate("data", 3, batch):
        k = pyro.sample(f"k_{i}", dist.Categorical(torch.ones(3) / 3))
        z = pyro.sample(f"z_{i}", dist.Normal(LOCS[k], 1.0))
        pyro.sample(f"x_{i}", dist.Normal(z, 1.0), obs=X[0, i])


def posterior(batch):
    for i in pyro.plate("data", 3, batch):
        logits = dist.Normal(LOCS, math.sqrt(2.0)).log_prob(X[0, i])
        k = pyro.sample(f"k_{i}", dist.Categorical(logits=logits))
        pyro.sample(f"z_{i}", dist.Normal((LOCS[k] + X[0, i]) / 2, math.sqrt(0.5)))


@pytest.mark.parametrize(
    "elbo",
    [
        pytest.param(TraceIWAE_ELBO(2), id="iwae"),
        pytest.param(TraceSIS_ELBO(2, ULA(1e-6)), id="sis", marks=pytest.mark.slow),
        pytest.param(
            TraceSIS_ELBO(2, ULA(1e-6), num_categories=1),
            id="sis, one summed",
            marks=pytest.mark.slow,
        ),
        pytest.param(TraceAIS_ELBO(2, MALA(0.1)), id="ais", marks=pytest.mark.slow),
        pytest.param(TraceRaoBlackwell_ELBO(1), id="rao-blackwell"),
    ],
)
def test_discrete_sites_that_data_name(elbo):
    """Each minibatch shows other sites; at the posterior its bound is its evidence, every time."""
    evidence = dist.Normal(LOCS, math.sqrt(2.0)).log_prob(X[0, :, None]).logsumexp(-1)
    pairs = [1.5 * (sum(p) - 2 * math.log(3)) for p in itertools.combinations(evidence, 2)]
    result = -losses(elbo, labelled, posterior, 12)
    distance = (result[:, None] - torch.stack(pairs)).abs()
    assert distance.min(1).values.max() < 2e-3
    assert len(distance.argmin(1).unique()) == 3
