"""Which states a search can reach: parents, moves, and where it ends."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    EvolutionaryUpdate,
    InformedFlips,
    TruncatedPosterior,
    UniformFlips,
)
from pyro_mcvae.truncated.search import choose_parents

N, H = 4, 5
MADE = torch.Generator().manual_seed(3)
X = torch.randn(N, 3, generator=MADE, dtype=torch.float64)
WEIGHT = torch.randn(H, 3, generator=MADE, dtype=torch.float64)


def model():
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(H)).to_event(1))
        pyro.sample("x", dist.Normal(z @ WEIGHT, 0.7).to_event(1), obs=X)


def test_every_possible_state_becomes_a_parent_as_often_as_it_should():
    log_joint = torch.tensor([[-9.0, -5.0, -torch.inf, -3.0]])
    fitness = torch.tensor([0.0, 4.0, 0.0, 6.0])
    fraction = (fitness + 0.1 * fitness.mean() * torch.tensor([1.0, 1.0, 0.0, 1.0])).double()
    fraction /= fraction.sum()
    count = 40_000
    result = choose_parents(log_joint, count)[0].bincount(minlength=4) / count
    assert ((result - fraction).abs() <= 4.5 * (fraction * (1 - fraction) / count).sqrt()).all()
    assert result[0] > 0
    assert result[2] == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
@pytest.mark.parametrize("mutation", [UniformFlips(), InformedFlips(uniform=0.5)])
def test_a_search_ends_where_no_move_of_any_state_improves_the_set(seed, mutation):
    """By a look at every neighbour of every state that is kept: the worst one's, too."""
    pyro.set_rng_seed(seed)
    guide = TruncatedPosterior(model, 2, evolution=EvolutionaryUpdate(6, H, 1, mutation=mutation))
    guide.fit(num_steps=40)
    everything = TruncatedPosterior(model, 2**H).posterior()
    place = 2 ** torch.arange(H)
    code = (everything.values["z"].long() * place).sum(-1)
    by_code = everything.log_joint.gather(0, code.argsort(0))  # [2^H, N]
    kept = (guide.posterior().values["z"].long() * place).sum(-1)
    worst = by_code.gather(0, kept).amin(0)
    for flip in place.tolist():
        neighbour = kept ^ flip
        inside = (neighbour.unsqueeze(1) == kept).any(1)
        assert (inside | (by_code.gather(0, neighbour) <= worst)).all()


@pytest.mark.parametrize("prior_draws", [0, 4])
def test_draws_from_the_prior_find_what_single_moves_cannot(prior_draws):
    """Between 0...0 and 1...1 all is worse: one state ends at either, by moves alone."""

    def trap():
        with pyro.plate("data", 8):
            z = pyro.sample("z", dist.Bernoulli(0.5 * torch.ones(H)).to_event(1))
            on = z.sum(-1)
            pyro.factor("trap", torch.where(on == H, 3.0, -on))

    update = EvolutionaryUpdate(2, H, 1, mutation=UniformFlips())
    guide = TruncatedPosterior(trap, 1, evolution=update, prior_draws=prior_draws)
    guide.posterior()
    guide.states_data.zero_()
    result = guide.fit(num_steps=40)
    best = 3.0 if prior_draws else 0.0
    assert torch.allclose(result, torch.full((8,), best) - H * torch.tensor(2.0).log())
