"""What is masked out is kept at zero, so nothing may read it."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_mcvae import TraceTruncated_ELBO, TruncatedPosterior

SEEN, ALIVE = 0.4, 0.7
CAPTURED = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 0]]).bool()


def survival(mask_states):
    """Pyro's capture and recapture: a state counts from the first capture on."""
    with pyro.plate("animals", 3):
        z, met = torch.ones(3), torch.zeros(3, dtype=torch.bool)
        for t in pyro.markov(range(3)):
            mean = torch.where(met, ALIVE * z, torch.ones(()))
            with poutine.mask(mask=met | (not mask_states)):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(mean))
            with poutine.mask(mask=met):
                pyro.sample(f"x_{t}", dist.Bernoulli(SEEN * z), obs=CAPTURED[:, t].double())
            met = met | CAPTURED[:, t]


def test_entries_that_steer_others_are_not_taken_out():
    with pytest.raises(ValueError, match=r"site 'z_0' is masked out .* site 'z_1' reads them"):
        TruncatedPosterior(survival, num_states=2).fit(True)
    bounds = TraceTruncated_ELBO().bounds(survival, TruncatedPosterior(survival, 8), False)
    unseen = 1 - SEEN
    exact = [
        ALIVE * unseen * ALIVE * SEEN,
        ALIVE * SEEN * (ALIVE * unseen + 1 - ALIVE),
        ALIVE * unseen + 1 - ALIVE,
    ]
    torch.testing.assert_close(bounds.per_datum, torch.tensor([math.log(p) for p in exact]))


def test_padding_that_only_padding_reads_is_taken_out():
    lengths, x = torch.tensor([3, 1]), torch.tensor([[0.2, -0.5, 1.0], [1.2, 9.0, 9.0]])

    def model():
        with pyro.plate("sequences", 2):
            z = torch.zeros(2)
            for t in range(3):
                with poutine.mask(mask=t < lengths):
                    z = pyro.sample(f"z_{t}", dist.Bernoulli(0.3 + 0.4 * z))
                    pyro.sample(f"x_{t}", dist.Normal(z, 1.0), obs=x[:, t])

    guide = TruncatedPosterior(model, num_states=2)
    for _ in range(3):
        free_energy = guide.fit()
    first = dist.Normal(torch.tensor([0.0, 1.0]), 1.0).log_prob(x[1, 0])
    exact = (torch.tensor([0.7, 0.3]).log() + first).logsumexp(0)
    torch.testing.assert_close(free_energy[1], exact)
