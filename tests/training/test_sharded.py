"""States that are dealt out over processes: two or three of them, and files from one to another."""

import pytest
import torch

from pyro_mcvae import RankBatches, load_checkpoint, save_checkpoint
from tests.training import sharded
from tests.training.distributed import SIZE, STEPS, NoiseByDatum
from tests.training.test_distributed import close, on_ranks


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """What one process began, two took on, and three were given."""
    folder, dtype = tmp_path_factory.mktemp("sharded"), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    run, x = sharded.begin()
    everything = torch.arange(SIZE)
    with NoiseByDatum(everything, 0):
        run.elbo(x, everything, SIZE)
    save_checkpoint(folder / "1.pt", {"elbo": run.elbo})
    torch.set_default_dtype(dtype)
    on_ranks("sharded", 3, folder)
    return folder


def found(out, num_ranks):
    return [
        torch.load(out / f"{num_ranks}-rank{r}.pt", weights_only=True) for r in range(num_ranks)
    ]


def states(out, num_ranks):
    """All states, in the file that so many ranks have written."""
    return saved(out, num_ranks)["guide.states_data"]


def saved(out, num_ranks):
    return torch.load(out / f"{num_ranks}.pt", weights_only=False)["parts"]["elbo"]


def loaded(path):
    """A single process that goes on."""
    run, x = sharded.begin()
    own = sharded.batches(0, 1)
    load_checkpoint(path, {"elbo": run.elbo} if path.name == "1.pt" else sharded.parts(run, own))
    return run, x, own


def test_two_ranks_train_as_one_process_on_the_union(out):
    run, x, _ = loaded(out / "1.pt")
    single = sharded.train(run, run.elbo, x, sharded.unions(2))
    first, second = (f["trained"] for f in found(out, 2))
    assert len(single) == STEPS
    for (index, loss, gradients, means), a, b in zip(single, first, second, strict=True):
        assert torch.equal(index, torch.cat([a[0], b[0]]))
        assert (a[0] % 2 == 0).all()
        assert (b[0] % 2 == 1).all()
        assert torch.allclose(loss, (a[1] + b[1]) / 2, rtol=1e-10)
        close(a[2], b[2])
        close(gradients, a[2])
        assert torch.allclose(means, torch.cat([a[3], b[3]]))
    # The very same states, parameters and closed forms.
    assert torch.equal(run.guide.states_data, states(out, 2))
    close(dict(run.elbo.state_dict()), saved(out, 2))


def test_each_keeps_its_part_only(out):
    for num_ranks in (2, 3):
        for rank, one in enumerate(found(out, num_ranks)):
            (key,) = (k for k in one["kept"] if "states" in k)
            assert key == f"guide.states_data.of_rank{rank}of{num_ranks}_axis0of{SIZE}"
            assert one["buffers"] == []
            assert len(one["kept"][key]) == len(range(rank, SIZE, num_ranks))
    for rank, one in enumerate(found(out, 3)):
        (kept,) = (v for k, v in one["kept"].items() if "states" in k)
        assert torch.equal(kept, states(out, 2)[rank::3])


def test_a_run_on_two_ranks_resumes(out):
    for one in found(out, 2):
        assert str(one["then"]) == str(one["again"])


def test_two_write_what_three_and_one_read(out):
    assert torch.equal(states(out, 3), states(out, 2))
    run, x, own = loaded(out / "3.pt")
    assert torch.equal(run.guide.states_data, states(out, 2))
    # The epoch goes on after what both ranks had seen, on however many.
    seen = torch.cat([step[0] for one in found(out, 2) for step in one["trained"][2:]])
    rest = sorted(set(range(SIZE)) - set(seen.tolist()))
    assert sorted(torch.cat(list(own)).tolist()) == rest
    left = [one["left"] for one in found(out, 3)]
    assert len({len(part) for part in left}) == 1
    assert all((part % 3 == rank).all() for rank, part in enumerate(left))
    assert set(torch.cat(left).tolist()) <= set(rest)
    # And a single process trains on.
    sharded.train(run, run.elbo, x, own)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_fixed_batches_stay_with_their_rank(num_ranks, shuffle):
    options = {"shuffle": shuffle, "fixed": True, "num_ranks": num_ranks}
    many = [RankBatches(20, 3, rank=r, **options) for r in range(num_ranks)]
    epochs = []
    for _ in range(3):
        steps = list(zip(*many, strict=True))  # every rank has the same number of steps
        assert len(steps) == len(many[0])
        assert all(len({len(i) for i in step}) == 1 for step in steps)
        assert all((i % num_ranks == r).all() for step in steps for r, i in enumerate(step))
        indices = torch.cat([i for step in steps for i in step])
        assert len(indices.unique()) == len(indices) > 20 - num_ranks
        epochs.append(indices)
    assert shuffle == any(not torch.equal(e, epochs[0]) for e in epochs)


def test_fixed_batches_go_on_in_other_runs():
    def run(num_ranks, fixed=True, size=2):
        each = range(num_ranks)
        return [RankBatches(40, size, fixed=fixed, rank=r, num_ranks=num_ranks) for r in each]

    def begin(many, steps):
        return [next(iter(one)) for _ in range(steps) for one in many]

    first = run(2)
    seen = begin(first, 2)
    state = first[0].state_dict()
    assert state == first[1].state_dict()
    # As if it had never stopped.
    for one, again in zip(first, run(2), strict=True):
        again.load_state_dict(state)
        assert [i.tolist() for i in one] == [i.tolist() for i in again]
    # From two ranks to three, to one, to two that are not fixed: nothing comes twice.
    for num_ranks, fixed in ((3, True), (1, True), (2, False)):
        many = run(num_ranks, fixed)
        for one in many:
            one.load_state_dict(state)
        assert all(one.epoch == 0 for one in many)
        seen += begin(many, 1)
        state = many[0].state_dict()
    rest = [i for one in many for i in one]
    indices = torch.cat([*seen, *rest])
    assert len(indices.unique()) == len(indices) == 40
    assert [one.epoch for one in many] == [1, 1]
    with pytest.raises(ValueError, match="fixed must be True or False, got 'data'"):
        RankBatches(9, 2, fixed="data")
