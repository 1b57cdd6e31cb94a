"""Two processes train as one that has both of their minibatches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyro_mcvae import RankBatches
from tests.training import distributed

ROOT = Path(__file__).parents[2]


def on_ranks(name, num_ranks, out, objectives):
    """Run a script of this folder on several processes."""
    done = subprocess.run(
        [sys.executable, "tests/training/forked.py", name, str(num_ranks), str(out)],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "OBJECTIVES": ",".join(objectives),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def both_ranks(out, objectives):
    on_ranks("distributed", 2, out, objectives)
    return [
        {**torch.load(out / f"rank{r}.pt", weights_only=True), "path": out / "run.pt"}
        for r in range(2)
    ]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return both_ranks(tmp_path_factory.mktemp("ranks"), distributed.JOINED)


def close(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.allclose(value.double(), second[name].double(), rtol=1e-9, atol=1e-10), name


@pytest.mark.parametrize("name", distributed.JOINED)
def test_gradients_and_states_are_those_of_the_union(ranks, name):
    single = distributed.train(name)
    first, second = (r[name] for r in ranks)
    assert len(single) == distributed.STEPS
    for one, a, b in zip(single, first, second, strict=True):
        assert torch.allclose(one[0], (a[0] + b[0]) / 2, rtol=1e-10)
        assert not torch.allclose(a[0], b[0])  # their minibatches are different
        for part in (1, 2):
            close(a[part], b[part])
            if name == "rb-nvil":
                # Learned baselines see costs with N/B, of another B on a rank: another control
                # variate, of the same mean, from the second step on.
                model = [{n: v for n, v in s[part].items() if "model" in n} for s in (one, a)]
                close(*model)
                continue
            close(one[part], a[part])
        if name == "rb-nvil":
            break


@pytest.mark.slow
def test_gradients_and_states_of_further_objectives_are_those_of_the_union(tmp_path):
    ranks = both_ranks(tmp_path, distributed.ALSO)
    for name in distributed.ALSO:
        test_gradients_and_states_are_those_of_the_union(ranks, name)


def test_a_run_on_two_ranks_resumes(ranks):
    for result in ranks:
        (losses, state), (again, end) = result["continued"]
        assert str(losses) == str(again)
        assert all(torch.allclose(v, end[n], rtol=1e-12) for n, v in state.items())
    # Every rank has the states of all data, also those that it drew by itself in the beginning.
    close(*(result["continued"][0][1] for result in ranks))
    # Each rank has its own data and its own noise.
    (first, _), (second, _) = (result["continued"][0] for result in ranks)
    for (_, a, x), (_, b, y) in zip(first, second, strict=True):
        assert not set(a.tolist()) & set(b.tolist())
        assert x != y


def test_it_also_loads_in_one_process(ranks, tmp_path_factory):
    losses, state = distributed.continued(ranks[0]["path"], again=True)
    (first, _), (second, _) = (result["continued"][0] for result in ranks)
    # The epoch goes on after what both ranks had seen.
    seen = sorted(i for run in (first, second) for i in run[0][1].tolist())
    assert sorted(i for _, index, _ in losses[:2] for i in index.tolist()) == seen
    assert state.keys() == ranks[0]["continued"][0][1].keys()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_no_datum_comes_twice_in_an_epoch(num_ranks, shuffle):
    many = [
        RankBatches(20, 3, shuffle=shuffle, rank=r, num_ranks=num_ranks) for r in range(num_ranks)
    ]
    epochs = []
    for _ in range(3):
        steps = list(zip(*many, strict=True))  # every rank has the same number of steps
        assert len(steps) == len(many[0])
        assert all(len({len(i) for i in step}) == 1 for step in steps)
        indices = torch.cat([i for step in steps for i in step])
        assert len(indices.unique()) == len(indices) > 20 - num_ranks
        epochs.append(indices)
    assert shuffle == any(not torch.equal(e, epochs[0]) for e in epochs)


def test_batches_go_on_where_others_stopped_on_any_number_of_ranks():
    batches = RankBatches(20, 3, rank=0, num_ranks=2)
    other = RankBatches(20, 3, rank=1, num_ranks=2)
    for _ in batches:
        next(iter(other))
        break
    wanted = torch.cat([*batches, *other])
    state = {**batches.state_dict(), "epoch": 0, "position": 6}
    alone = RankBatches(20, 4, seed=8, rank=0, num_ranks=1)
    alone.load_state_dict(state)
    assert sorted(torch.cat(list(alone)).tolist()) == sorted(wanted.tolist())
    assert (alone.epoch, alone.position) == (1, 0)
    with pytest.raises(ValueError, match="of 20 data, but now num_data=21"):
        RankBatches(21, 3).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_data": 0}, "num_data must be an int of at least 1, got 0"),
        ({"batch_size": 2.0}, "batch_size must be an int of at least 1, got 2.0"),
        ({"rank": 2, "num_ranks": 2}, r"rank must be in 0..1, got 2"),
        ({"num_data": 2, "num_ranks": 3}, "num_data=2 leaves some of the 3 ranks without data"),
    ],
)
def test_batches_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        RankBatches(**{"num_data": 9, "batch_size": 2, **arguments})
