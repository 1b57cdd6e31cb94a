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
from pyro_mcvae.truncated.search import choose_parents, cross_over

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


def test_crossover_exchanges_the_ends_of_pairs():
    """All points are equally likely, and an odd last parent is left alone."""
    count = 4000
    states = torch.arange(3).reshape(1, 3, 1).expand(count, 3, H)
    first, second, odd = cross_over(states).unbind(1)
    assert (odd == 2).all()
    assert (first + second == 1).all()
    point = (first == 0).sum(-1)
    assert (first.diff(dim=-1) >= 0).all()  # one exchange at a single point
    frequency = point.bincount(minlength=H + 1)[1:H] / count
    chance = 1 / (H - 1)
    assert ((frequency - chance).abs() < 4.5 * (chance * (1 - chance) / count) ** 0.5).all()
    assert frequency.sum() == 1
    single = torch.ones(2, 4, 1)
    assert torch.equal(cross_over(single), single)


class Recorded(UniformFlips):
    def __init__(self):
        self.parents, self.children = [], []

    def __call__(self, parents, count):
        result = super().__call__(parents, count)
        self.parents.append(parents.states)
        self.children.append(result.flatten(1, 2))
        return result


def contains(sets, states):
    """Whether each state, [E, P, D], is in the set of its datum, [E, C, D]."""
    return (states.unsqueeze(2) == sets.unsqueeze(1)).all(-1).any(-1)


@pytest.mark.parametrize("elitist", [False, True])
def test_parents_of_a_generation(elitist):
    """Algorithm 1 takes them from the children before; an elitist search from the best so far."""
    mutation = Recorded()
    update = EvolutionaryUpdate(3, 2, 3, mutation=mutation, elitist=elitist)
    guide = TruncatedPosterior(model, 4, evolution=update)
    before = guide.posterior()
    guide.fit(num_steps=1)
    start = before.values["z"].movedim(0, 1)
    assert contains(start, mutation.parents[0]).all()
    later = zip(mutation.children[:-1], mutation.parents[1:], strict=True)
    among_children = [contains(children, parents).all() for children, parents in later]
    assert all(among_children) is not elitist
    assert (guide.posterior().free_energy >= before.free_energy - 1e-9).all()


def test_crossover_mixes_two_states_before_the_mutation():
    """A child differs from a crossing of two parents by one flip."""
    mutation = Recorded()
    update = EvolutionaryUpdate(2, 1, 1, mutation=mutation, crossover=True)
    guide = TruncatedPosterior(model, 2, evolution=update)
    start = guide.posterior().values["z"].movedim(0, 1)
    guide.fit(num_steps=1)
    for datum, crossed in zip(start, mutation.parents[0], strict=True):
        options = [
            torch.cat([a[:point], b[point:]]) for a in datum for b in datum for point in range(1, H)
        ]
        assert contains(torch.stack(options)[None], crossed[None]).all()
