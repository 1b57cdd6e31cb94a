"""Other data in the arguments of a call: every way in which an argument holds the data."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_mcvae.programs.messengers import Minibatch
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.substitute import substitute


def observing(*values, plates=()):
    """The observed sites x_0, x_1, ... of a model, and new values for them."""

    def model():
        with poutine.trace() as trace:
            entered = [
                pyro.plate(name, size, subsample=index, dim=dim)
                for name, size, index, dim in plates
            ]
            for plate in entered:
                plate.__enter__()
            for i, value in enumerate(values):
                fn = dist.Normal(torch.zeros(value.shape), 1.0)
                pyro.sample(f"x_{i}", fn.to_event(value.dim() - len(plates)), obs=value)
            for plate in reversed(entered):
                plate.__exit__(None, None, None)
        return trace.trace

    with pyro.validation_enabled(False):
        nodes = model().nodes
    sites = {f"x_{i}": nodes[f"x_{i}"] for i in range(len(values))}
    new = {name: 100 + torch.randn(s["value"].shape).to(s["value"]) for name, s in sites.items()}
    return sites, new


def call(sites, new, *args, subsamples=None, **kwargs):
    programs = Programs(lambda: None, lambda: None, args, kwargs)
    return substitute(programs, sites, new, Minibatch(subsamples or {}))


X = torch.arange(12.0).reshape(4, 3)
VIEWS = {
    "itself": lambda x: x,
    "a row": lambda x: x[2],
    "a column": lambda x: x[:, 1],
    "transposed": lambda x: x.T,
    "flat": lambda x: x.reshape(-1),
    "every second": lambda x: x[::2, 1:],
    "a copy": lambda x: x.clone(),
    "flat copy": lambda x: x.clone().reshape(2, 6),
    "double": lambda x: x.double(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "part"])
def test_every_view_of_an_argument(view, layout):
    x = {
        "contiguous": X.float().clone(),
        "transposed": X.float().T.contiguous().T,
        "part": torch.arange(40.0, dtype=torch.float32).reshape(8, 5)[2:6, 1:4],
    }[layout]
    before = x.clone()
    value = view(x)
    sites, new = observing(value)
    result = call(sites, new, 3, {"batch": [x]}, other=torch.zeros(2))
    dreamt = result.args[1]["batch"][0]
    assert (x == before).all()
    assert (view(dreamt) == new["x_0"].to(dreamt.dtype)).all()
    assert dreamt.dtype == x.dtype
    changed = (dreamt != before).sum()
    assert changed == value.numel()  # and nothing else
    assert result.args[0] == 3
    assert result.kwargs["other"].sum() == 0


def test_several_sites_in_one_argument_and_arguments_that_share_memory():
    x = X.clone()
    sites, new = observing(x[:, 0], x[:, 2])
    past, future, whole = call(sites, new, x[:, :-1], x[:, 1:], x).args
    assert (whole[:, 0] == new["x_0"]).all()
    assert (past[:, 0] == new["x_0"]).all()
    assert (future[:, 1] == new["x_1"]).all()
    assert (whole[:, 1] == x[:, 1]).all()


def test_one_tensor_given_twice_stays_one():
    x = X.clone()
    sites, new = observing(x)
    first, second = call(sites, new, x, x).args
    assert first is second


def test_rows_of_a_plate():
    x, index = X.clone(), torch.tensor([3, 1])
    sites, new = observing(x[index], plates=[("data", 4, index, -1)])
    (result,) = call(sites, new, x, subsamples={"data": index}).args
    assert (result[index] == new["x_0"]).all()
    assert (result[[0, 2]] == x[[0, 2]]).all()


def test_rows_of_two_plates():
    x, rows, columns = torch.randn(5, 6, 2), torch.tensor([4, 0]), torch.tensor([5, 2, 3])
    plates = [("columns", 6, columns, -1), ("rows", 5, rows, -2)]
    sites, new = observing(x[rows[:, None], columns], plates=plates)
    (result,) = call(sites, new, x, subsamples={"rows": rows, "columns": columns}).args
    assert (result[rows[:, None], columns] == new["x_0"]).all()
    assert (result != x).sum() == new["x_0"].numel()


def test_missing_values_are_compared_as_equal():
    x = X.clone()
    x[1, 1] = torch.nan
    sites, new = observing(x.clone())
    assert (call(sites, new, x).args[0] == new["x_0"]).all()


def test_integers_and_numbers():
    x = torch.tensor([2, 0, 1])
    sites, _ = observing(x)
    (result,) = call(sites, {"x_0": torch.tensor([1.0, 1.0, 0.0])}, x).args
    assert result.tolist() == [1, 1, 0]
    assert result.dtype == torch.int64


def test_data_in_no_argument_or_in_two():
    sites, new = observing(X.clone())
    with pytest.raises(ValueError, match=r"site 'x_0'.*are in none of them.*dream_args"):
        call(sites, new, X + 1)
    with pytest.raises(ValueError, match=r"site 'x_0'.*may come from 2 of them"):
        call(sites, new, X, X.clone())


def test_sites_that_share_their_data():
    x = X.clone()
    sites, new = observing(x, x)
    with pytest.raises(ValueError, match=r"'x_0' and 'x_1' observe the same tensor"):
        call(sites, new, x)


def test_expanded_data():
    x = torch.zeros(3).expand(4, 3)
    sites, new = observing(x)
    with pytest.raises(ValueError, match=r"site 'x_0' observes an expanded tensor"):
        call(sites, new, x)
