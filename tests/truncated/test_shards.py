"""Each rank of a distributed run keeps the states of its own data, and those only."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import EvolutionaryUpdate, TraceTruncated_ELBO, TruncatedPosterior
from pyro_mcvae.ops import ranks
from pyro_mcvae.ops.shards import Shard
from pyro_mcvae.training.parts import ModulePart
from pyro_mcvae.truncated.saved_shards import put_whole_states

N, D, H = 7, 3, 4
WEIGHT = torch.linspace(-1, 1, H * D, dtype=torch.float64).sin().reshape(H, D)
X = torch.linspace(-3, 3, N * D, dtype=torch.float64).cos().reshape(N, D)


def model(x, index=None):
    with pyro.plate("data", N, subsample=index):
        z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(H)).to_event(1))
        pyro.sample("x", dist.Normal(z @ WEIGHT, 0.5).to_event(1), obs=x)


def crossed(x, index=None, size=N):
    """One latent for each pair of a group and a datum, of which the data are dealt out."""
    a = pyro.plate("groups", 3, dim=-2)
    b = pyro.plate("data", size, subsample=index, dim=-1)
    with a, b:
        z = pyro.sample("z", dist.Categorical(torch.ones(5)))
        pyro.sample("x", dist.Normal(z.to(x.dtype), 1.0), obs=x)


@pytest.fixture
def on(monkeypatch):
    """Be a rank of several, as far as nobody sends anything."""

    def be(rank, num_ranks):
        monkeypatch.setattr(ranks, "rank", lambda: rank)
        monkeypatch.setattr(ranks, "num_ranks", lambda: num_ranks)
        return torch.arange(rank, N, num_ranks)

    return be


def kept(guide):
    (found,) = (kept for _, kept in guide._shards.values())
    return found


@pytest.mark.parametrize("sizes", [(7,), (3, 7), (7, 3), (2, 7, 3)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 9])
def test_shards_divide_a_table_among_them(sizes, num_ranks):
    axis = sizes.index(7)
    table = torch.randn(*sizes, 2).flatten(0, -2)
    rows, seen = torch.arange(len(table)), torch.zeros(len(table))
    whole = torch.empty_like(table)
    for rank in range(num_ranks):
        shard = Shard(sizes, axis, rank, num_ranks)
        assert Shard.parse(shard.name) == shard
        own = rows[shard.owns(rows)]
        data = torch.tensor([torch.unravel_index(r, sizes)[axis] for r in rows])
        assert torch.equal(shard.datum(rows), data)
        assert torch.equal(own, rows[data % num_ranks == rank])
        assert len(own) == shard.num_rows
        assert torch.equal(shard.take(table)[shard.place(own)], table[own])
        # What is kept elsewhere is nowhere here.
        assert (shard.place(rows[~shard.owns(rows)]) == shard.num_rows).all()
        shard.put(whole, shard.take(table))
        seen[own] += 1
    assert (seen == 1).all()
    assert torch.equal(whole, table)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_with_all_states_each_rank_has_the_exact_evidence_of_its_data(on, num_ranks):
    wanted = TruncatedPosterior(model, 2**H).posterior(X)
    for rank in range(num_ranks):
        own = on(rank, num_ranks)
        guide = TruncatedPosterior(model, 2**H, shard="data")
        for index in (own, own.flip(0), own[1:2]):
            found = guide.posterior(X[index], index)
            assert torch.allclose(found.free_energy, wanted.free_energy[index])
            assert torch.allclose(found.marginals()["z"], wanted.marginals()["z"][index])
        assert kept(guide).shape[0] == len(own)
        assert not list(guide.buffers())


def test_the_search_never_loses_and_states_stay_distinct(on):
    own = on(1, 2)
    guide = TruncatedPosterior(model, 3, EvolutionaryUpdate(2, 2), shard="data")
    first = guide.posterior(X[own], own).free_energy
    before = first
    for _ in range(8):
        index = own[torch.randperm(len(own))[:2]]
        guide.fit(X[index], index)
        now = guide.posterior(X[own], own).free_energy
        assert (now >= before - 1e-12).all()
        before = now
    assert (before > first).any()
    assert all(len(row.unique(dim=0)) == 3 for row in kept(guide))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_loads_its_own_from_all_states(on, num_ranks):
    x = torch.randn(3, N)
    one = TruncatedPosterior(crossed, 2)
    one.fit(x, num_steps=2)
    wanted, state = one.posterior(x).free_energy, one.state_dict()
    for called in (False, True):
        for rank in range(num_ranks):
            own = on(rank, num_ranks)
            guide = TruncatedPosterior(crossed, 2, shard="data")
            if called:
                guide.posterior(x[:, own], own)
            guide.load_state_dict(state)
            found = guide.posterior(x[:, own], own)
            assert torch.equal(found.free_energy, wanted[:, own])
            shard = Shard((3, N), 1, rank, num_ranks)
            assert torch.equal(kept(guide), shard.take(state["states_groups_data"]))
            # And what it finds goes to the same places.
            guide.fit(x[:, own[:1]], own[:1], num_steps=3)
            rest = guide.posterior(x[:, own[1:]], own[1:]).free_energy
            assert torch.equal(rest, wanted[:, own[1:]])


def test_other_ranks_data_are_refused_by_index(on):
    own = on(1, 3)
    guide = TruncatedPosterior(model, 4, shard="data")
    guide.fit(X[own], own)
    before = kept(guide).clone()
    message = (
        r"plate 'data' was given index 5, whose states are kept by rank 2 of 3, and this is rank "
        r"1: .* indices 1, 4, 7, ... only. .*RankBatches\(7, batch_size, fixed=True\)"
    )
    wrong = torch.tensor([4, 5])
    elbo = TraceTruncated_ELBO()
    for ask in (
        lambda: guide.posterior(X[wrong], wrong),
        lambda: guide.fit(X[wrong], wrong),
        lambda: elbo.differentiable_loss(model, guide, X[wrong], wrong),
        lambda: elbo.bounds(model, guide, X[wrong], wrong),
        lambda: guide(X[wrong], wrong),
    ):
        for validation in (True, False):
            with pyro.validation_enabled(validation), pytest.raises(ValueError, match=message):
                ask()
    with pytest.raises(ValueError, match="index 0, whose states are kept by rank 0 of 3"):
        guide.posterior(X)
    assert torch.equal(kept(guide), before)


def test_a_state_dict_of_one_rank_is_its_own(on):
    own = on(0, 2)
    guide = TruncatedPosterior(model, 4, shard="data")
    guide.fit(X[own], own)
    state = {name: value.clone() for name, value in guide.state_dict().items()}
    assert list(state) == ["states_data.of_rank0of2_axis0of7"]
    guide.fit(X[own], own, num_steps=3)
    live = kept(guide)
    guide.load_state_dict(state)
    assert kept(guide) is live
    for other in (copy.deepcopy(guide), TruncatedPosterior(model, 4, shard="data")):
        other.load_state_dict(state)
        assert torch.equal(kept(other), next(iter(state.values())))
        other.posterior(X[own], own)
    for rank, num_ranks in ((1, 2), (0, 1), (0, 3)):
        on(rank, num_ranks)
        other = TruncatedPosterior(model, 4, shard="data")
        message = f"rank 0 of 2, and this is rank {rank} of {num_ranks}: each rank loads what it"
        with pytest.raises(RuntimeError, match=message):
            other.load_state_dict(state)
        with pytest.raises(ValueError, match=r"those of rank 0 of 2 .* this is rank"):
            guide.posterior(X[own], own)


def test_a_guide_may_be_called_before_the_ranks_join(on):
    guide = TruncatedPosterior(model, 4, shard="data")
    guide.fit(X, num_steps=2)
    assert list(guide.state_dict()) == ["states_data"]
    wanted = guide.posterior(X).free_energy
    own = on(1, 2)
    assert torch.equal(guide.posterior(X[own], own).free_energy, wanted[own])
    assert not list(guide.buffers())


def test_states_move_with_the_module(on):
    own = on(1, 2)
    guide = TruncatedPosterior(model, 4, shard="data")
    guide.posterior(X[own], own)
    guide.to(torch.float16)
    assert kept(guide).dtype == torch.uint8
    assert kept(guide.to("meta")).device.type == "meta"


def test_other_numbers_of_data_are_refused(on):
    own = on(0, 2)
    x = torch.randn(3, N)
    guide = TruncatedPosterior(crossed, 2, shard="data")
    guide.posterior(x[:, own], own)
    # As many rows on this rank, but of other data.
    with pytest.raises(ValueError, match="has 8 data, and states are kept for 7"):
        guide.posterior(x[:, own], own, size=8)
    with pytest.raises(ValueError, match="plate 'data' has 24 data, and states are kept for 21"):
        TraceTruncated_ELBO().loss(crossed, guide, x[:, own], own, size=8)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (3, "shard must be the name of a data plate, or several, got 3"),
        (("data", 1), r"got \('data', 1\): pass shard='data' for pyro.plate\('data', N"),
        ("", "shard must be the name"),
        ("images", "shard='images' is no data plate .* those that have states are 'data', 'gro"),
        (("data", "groups"), r"each pair of plates 'groups' and 'data', and shard=.* name one"),
    ],
)
def test_names_are_checked(on, shard, message):
    own = on(0, 2)
    with pytest.raises(ValueError, match=message):
        TruncatedPosterior(crossed, 2, shard=shard).posterior(torch.zeros(3, len(own)), own)


def test_a_load_that_fails_leaves_the_states(on):
    own = on(0, 2)
    guide, other = (TruncatedPosterior(model, 4, shard="data") for _ in range(2))
    guide.fit(X[own], own)
    other.fit(X[own], own)
    live, before = kept(guide), kept(guide).clone()
    part = ModulePart(guide)
    for state in (other.state_dict(), {"states_data": torch.zeros(9, 4, 1, dtype=torch.uint8)}, {}):
        undo = part.undo()
        part.load(state)
        undo()
        assert kept(guide) is live
        assert torch.equal(live, before)
        assert not list(guide.buffers())
    with pytest.raises(ValueError, match=r"rank 1 of 2, and this is rank 0 of 2"):
        part.load({"states_data.of_rank1of2_axis0of7": before})


def test_ranks_that_keep_different_plates_do_not_save(on, monkeypatch):
    own = on(0, 2)
    guide = TruncatedPosterior(model, 4, shard="data")
    guide.posterior(X[own], own)
    monkeypatch.setattr(ranks, "gather", lambda value: [value, {}])
    with pytest.raises(ValueError, match=r"rank 1 keeps states of \[\], and rank 0 of \['states_"):
        put_whole_states(guide, {}, "")


@pytest.mark.parametrize("shard", [("a", "b"), ["a"], "b"])
def test_of_several_plates_each_may_be_dealt_out(on, shard):
    sizes = {"a": 5, "b": 7}

    def both(x, index):
        for name, size in sizes.items():
            with pyro.plate(name, size, subsample=index[name]):
                z = pyro.sample(f"z_{name}", dist.Categorical(torch.ones(6)))
                pyro.sample(f"x_{name}", dist.Normal(z.to(X), 1.0), obs=x[name])

    x = {name: torch.randn(size) for name, size in sizes.items()}
    index = {name: torch.arange(size) for name, size in sizes.items()}
    whole = TruncatedPosterior(both, 3)
    whole.fit(x, index, num_steps=2)
    wanted = whole.posterior(x, index).marginals()
    for rank in range(2):
        on(rank, 2)
        own = {n: i[rank::2] if n in shard else i for n, i in index.items()}
        guide = TruncatedPosterior(both, 3, shard=shard)
        guide.load_state_dict(whole.state_dict())
        found = guide.posterior({n: x[n][i] for n, i in own.items()}, own).marginals()
        for name, i in own.items():
            assert torch.allclose(found[f"z_{name}"], wanted[f"z_{name}"][i])
        assert sorted(guide._shards) == [f"states_{n}" for n in sizes if n in shard]
        assert [n for n, _ in guide.named_buffers()] == [
            f"states_{n}" for n in sizes if n not in shard
        ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_loaded_states_go_where_the_model_draws(on, num_ranks):
    own = on(0, num_ranks)
    first = TruncatedPosterior(model, 4)
    first.posterior(X[own], own)
    state = first.state_dict()
    guide = TruncatedPosterior(model, 4, shard="data")
    guide.load_state_dict(state)
    layouts = guide._layouts(model, guide._own, (X[own], own), {})
    # As another device than that of the loaded states, which no machine lacks.
    guide._prepare(layouts.blocks[0], layouts.bank[0].to("meta"))
    assert guide._states(layouts.blocks[0]).device.type == "meta"
