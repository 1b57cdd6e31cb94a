"""How often the programs of a user run, and what they see when they do."""

import itertools
import random
import threading
from array import array as array_of_numbers
from collections import OrderedDict, UserDict, deque
from contextvars import ContextVar
from queue import Queue
from weakref import WeakKeyDictionary

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn

from pyro_mcvae import (
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    WakeSleep,
    compare,
)
from tests.cases import every
from tests.params import in_turn
from tests.tally import Tally

X = torch.linspace(-1.0, 1.0, 30, dtype=torch.float64).reshape(10, 3)

RUNS = Tally()


class Pair(nn.Module):
    """A model and guide that write down what they see."""

    def __init__(self, activation=nn.Tanh):
        super().__init__()
        self.decoder = nn.Sequential(nn.Linear(2, 8), activation(), nn.Linear(8, 3))
        self.encoder = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.register_buffer("count", torch.zeros(()))
        self.seen, self.coefficient = [], 1.0

    def _see(self, program, *values):
        RUNS.add(program)
        self.count += 1
        buffers = self.encoder[1].running_mean, self.encoder[1].running_var
        self.seen.append((program, [v.detach().clone() for v in (*values, *buffers)]))

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            self._see("model", z, self.decoder[0].weight)
            pyro.sample("x", dist.Normal(self.decoder(z), 1.0).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        loc, scale = self.encoder(x).chunk(2, -1)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(loc, scale.exp()).to_event(1))
            self._see("guide", z, self.encoder[0].weight)

    def step_counts(self, loss, num_steps):
        """Return the runs of model and guide in each step."""
        pyro.clear_param_store()
        svi = SVI(self.model, self.guide, pyro.optim.Adam({"lr": 0.01}), loss)
        result = []
        for _ in range(num_steps):
            RUNS.take()
            svi.step(X)
            counts = RUNS.take()
            result.append((counts["model"], counts["guide"]))
        return result


LOSSES = {
    "sgvb": lambda: TraceSGVB_ELBO(5),
    "iwae": lambda: TraceIWAE_ELBO(5),
    "rb": TraceRaoBlackwell_ELBO,
    "wake-sleep": lambda: WakeSleep(5),
    "sis": lambda: TraceSIS_ELBO(3),
    "ais": lambda: TraceAIS_ELBO(3),
}
# Runs of model and guide in a step without an analysis. A chain of K steps evaluates the model at
# each of its positions; the guide, of independent draws, runs once.
STEADY = {"sis": (4, 1), "ais": (5, 1), "wake-sleep": (2, 2)}


# Only chains smooth kinks.
@pytest.mark.parametrize(
    ("name", "activation"),
    [
        *((n, nn.Tanh) for n in ("sgvb", "iwae", "rb")),
        *(pytest.param(n, nn.Tanh, marks=pytest.mark.slow) for n in ("wake-sleep", "sis", "ais")),
        pytest.param("sis", nn.ReLU, marks=pytest.mark.slow),
        ("ais", nn.ReLU),
    ],
)
def test_programs_run_twice_more_at_uses_one_two_four_eight(name, activation):
    """Once more in the first step, to smooth kinks or to find the nesting of plates."""
    counts = Pair(activation).step_counts(LOSSES[name](), 9)
    model, guide = STEADY.get(name, (1, 1))
    for step, (of_model, of_guide) in enumerate(counts, 1):
        is_due = step & (step - 1) == 0
        extra = 3 if step == 1 else 2 if is_due else 0
        assert model <= of_model <= model + extra, (step, counts)
        assert guide <= of_guide <= guide + extra, (step, counts)


@pytest.mark.parametrize("name", every(2, ["sgvb", "iwae", "sis", "ais"]))
def test_extra_runs_see_what_the_step_shows(name):
    """No latent is NaN; parameters and buffers are those of the step."""
    pair = Pair()
    before = {n: v.clone() for n, v in pair.state_dict().items()}
    pyro.clear_param_store()
    svi = SVI(pair.model, pair.guide, pyro.optim.Adam({"lr": 0.01}), LOSSES[name]())
    for _ in range(5):
        weights = {"model": pair.decoder[0].weight, "guide": pair.encoder[0].weight}
        shown = {n: w.detach().clone() for n, w in weights.items()}
        start = [b.clone() for b in (pair.encoder[1].running_mean, pair.encoder[1].running_var)]
        pair.seen.clear()
        svi.step(X)
        end = [pair.encoder[1].running_mean, pair.encoder[1].running_var]
        for program, (z, weight, *buffers) in pair.seen:
            assert bool(z.isfinite().all())
            assert torch.equal(weight, shown[program])
            for buffer, first, last in zip(buffers, start, end, strict=True):
                assert torch.equal(buffer, first) or torch.equal(buffer, last)
    assert set(pair.state_dict()) == set(before)


def trained(loss):
    """The buffers and counters after ten steps."""
    pyro.set_rng_seed(0)
    pair = Pair()
    counts = pair.step_counts(loss, 10)
    return pair, counts


def test_counters_and_running_means_are_those_of_plain_svi():
    """State that extra runs change is put back: ten steps are ten updates."""
    plain, _ = trained(Trace_ELBO())
    ours, _ = trained(TraceSGVB_ELBO())
    assert float(ours.count) == float(plain.count) == 20
    assert ours.encoder[1].num_batches_tracked == plain.encoder[1].num_batches_tracked == 10
    assert bool(ours.encoder[1].running_var.isfinite().all())


@pytest.mark.parametrize("loss", [TraceSGVB_ELBO, TraceRaoBlackwell_ELBO, TraceIWAE_ELBO])
def test_masked_sites_that_the_model_sums_cost_no_further_run(loss):
    """Only latents of the guide have priors that a mask may remove."""
    runs, mask = Tally(), torch.tensor([True, True, False])

    def model():
        runs.add()
        p = pyro.sample("p", dist.Beta(torch.tensor(2.0), torch.tensor(3.0)))
        with pyro.plate("data", 6, 3) as batch, pyro.poutine.mask(mask=mask):
            logits = torch.stack([p.log(), (1 - p).log()], -1)
            y = pyro.sample("y", dist.Categorical(logits=logits), infer={"enumerate": "parallel"})
            pyro.sample("x", dist.Normal(2.0 * y, 1.0), obs=X[:, 0].float()[batch])

    def guide():
        a = pyro.param("a", torch.tensor(2.0))
        pyro.sample("p", dist.Beta(a, torch.tensor(3.0)))

    elbo, counts, losses = loss(), [], []
    for _ in range(6):
        runs.take()
        pyro.set_rng_seed(0)
        losses.append(elbo.loss(model, guide))
        counts.append(runs.take()["run"])
    assert {counts[i] for i in (2, 4, 5)} == {1}
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-6)


def mean_field(x):
    """A guide of two latents for each datum."""
    loc = pyro.param("loc", torch.zeros(len(x), 2))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(loc, 0.7).to_event(1))


def training(model, name):
    """The training of a model with that guide, from the beginning."""
    pyro.clear_param_store()
    return SVI(model, mean_field, pyro.optim.Adam({"lr": 0.01}), LOSSES[name]())


class Schedule:
    """An object with a counter, and a class with one."""

    of_all = 0

    def __init__(self):
        self.calls = 0


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


GLOBAL_CALLS = 0


def counters():
    """Ways to keep a counter: each returns a function that counts a call and returns the number."""
    in_dict, in_list, in_object, in_slot, cell = {"calls": 0}, [0], Schedule(), Slotted(), 0
    array, numbers, deep = np.zeros(1), array_of_numbers("d", [0.0]), torch.zeros(())
    tensor = {"calls": torch.zeros(())}
    places, user_dict, queue = [torch.zeros(2)], UserDict(calls=0), Queue()
    queue.put(0)
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=1.0)

    def of_dict():
        in_dict["calls"] += 1
        return in_dict["calls"]

    def of_list():
        in_list[0] += 1
        return in_list[0]

    def of_object():
        in_object.calls += 1
        return in_object.calls

    def of_cell():
        nonlocal cell
        cell += 1
        return cell

    def of_global():
        global GLOBAL_CALLS
        GLOBAL_CALLS += 1
        return GLOBAL_CALLS

    def of_tensor():
        tensor["calls"] = tensor["calls"] + 1
        return float(tensor["calls"])

    def of_array():
        array[0] += 1
        return float(array[0])

    def of_slot():
        in_slot.calls += 1
        return in_slot.calls

    def of_class():
        Schedule.of_all += 1
        return in_object.of_all

    def of_tensor_in_place():
        deep.add_(1.0)
        return float(deep)

    def of_view_in_place():
        places[0][1:] += 1.0
        return float(places[0].sum())

    def of_attribute_of_a_class():
        in_object.of_all += 1
        return in_object.of_all

    def of_function():
        of_function.calls = getattr(of_function, "calls", 0) + 1
        return of_function.calls

    def of_new_global():
        global NEW_CALLS
        try:
            NEW_CALLS += 1
        except NameError:
            NEW_CALLS = 1
        return NEW_CALLS

    def of_new_slot():
        new_slot.calls = getattr(new_slot, "calls", 0) + 1
        return new_slot.calls

    def of_numbers():
        numbers[0] += 1
        return numbers[0]

    def of_user_dict():
        user_dict["calls"] += 1
        return user_dict["calls"]

    def of_queue():
        queue.put(queue.get() + 1)
        return queue.queue[0]

    def of_optimizer():
        parameter.grad = -torch.ones(1)
        optimizer.step()
        return round(float(parameter.detach()), 6)

    new_slot = Slotted.__new__(Slotted)
    kept = of_dict, of_list, of_object, of_cell, of_global, of_tensor, of_array, of_slot, of_class
    in_place = of_tensor_in_place, of_view_in_place, of_numbers
    new = of_attribute_of_a_class, of_function, of_new_global, of_new_slot
    return (*kept, *in_place, *new, of_user_dict, of_queue, of_optimizer)


@in_turn((6, 8, 9, 12, 13, 14, 17, 18), place=range(19), name=["sgvb", "iwae", "rb", "sis", "ais"])
def test_a_schedule_that_counts_calls_does_not_run_ahead(name, place):
    """The coefficients of KL annealing are those of one run per step, as under plain SVI."""
    global GLOBAL_CALLS
    GLOBAL_CALLS = Schedule.of_all = 0
    globals().pop("NEW_CALLS", None)
    count, coefficients = counters()[place], []

    def model(x):
        beta = min(1.0, count() / 50)
        coefficients.append(beta)
        with pyro.plate("data", len(x)):
            with pyro.poutine.scale(scale=beta):
                z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x[:, 0])

    svi = training(model, name)
    for step in range(1, 6):
        coefficients.clear()
        svi.step(X)
        shown = {coefficients[0]} if step & (step - 1) == 0 else {*coefficients}
        assert shown == {step / 50}  # a comparison after the step sees the next one


@pytest.mark.parametrize("name", ["sgvb", "iwae", "sis"])
def test_a_network_made_in_the_first_run_is_made_once(name):
    """What a run makes is kept, and so are the flags and counters that tell of it."""
    state, made = {"ready": False, "calls": 0}, []

    def model(x):
        if not state["ready"]:
            made.append(nn.Linear(2, 3).to(X.dtype))
            state["net"], state["ready"] = made[-1], True
        pyro.module("net", state["net"])
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(state["net"](z), 1.0).to_event(1), obs=x)

    svi = training(model, name)
    svi.step(X)
    before = state["net"].weight.detach().clone()
    svi.step(X)
    assert len(made) == 1
    assert bool((state["net"].weight != before).all())
    assert pyro.get_param_store()["net$$$weight"] is state["net"].weight


class Annealed(nn.Module):
    """A model with a frozen network and a buffer."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(2, 3, dtype=X.dtype).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(3, dtype=X.dtype))

    def model(self, x, beta):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        with pyro.plate("data", len(x)):
            with pyro.poutine.scale(scale=beta):
                z = pyro.sample("z", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.frozen(z) + self.mean, 1.0).to_event(1), obs=x)


@pytest.mark.parametrize("name", ["sgvb", "iwae", "rb"])
def test_a_schedule_beside_a_frozen_network_does_not_run_ahead(name):
    state, pair = {"calls": 0}, Annealed()

    def model(x):
        state["calls"] += 1
        pair.model(x, state["calls"] / 50)

    svi, mean = training(model, name), 0.0
    for step in range(1, 6):
        svi.step(X)
        mean = 0.9 * mean + 0.1 * X.mean(0)
        assert state["calls"] == step
        assert torch.allclose(pair.mean, mean)


@pytest.mark.parametrize(
    ("name", "flat"), [("sgvb", False), ("sgvb", True), ("iwae", True), ("rb", True)]
)
def test_memory_banks_hold_what_a_step_leaves(name, flat):
    """No entry of an extra run, and no tensor of a vmap that is over."""
    bank, recent, latest = [], deque(maxlen=3), {}

    def model(x):
        prior = torch.stack(list(recent)).mean() if recent else torch.zeros(())
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(prior, 1.0).expand([2]).to_event(1))
            loc = z.reshape(len(x), 2).sum(-1) if flat else z.sum(-1)
            pyro.sample("x", dist.Normal(loc, 1.0), obs=x[:, 0])
        bank.append(z.detach())
        recent.append(z.detach().mean())
        latest["z"] = z.detach()

    svi = training(model, name)
    per_step = 1 if not flat or name == "rb" else 5
    for step in range(1, 6):
        svi.step(X)
        assert len(bank) == per_step * step
        assert bool(torch.stack(list(recent)).isfinite().all())
        assert torch.equal(latest["z"], bank[-1])


def takes_the_oldest(queue):
    """A dict that hands out its first key and drops it."""
    return queue.pop(next(iter(queue)))


def uses_the_oldest(cache):
    """A cache of what was used last, at its end."""
    key = next(iter(cache))
    cache.move_to_end(key)
    return cache[key]


@pytest.mark.parametrize("size", [50, 100])
@pytest.mark.parametrize(
    ("kind", "take"), [(dict, takes_the_oldest), (OrderedDict, uses_the_oldest)]
)
def test_dicts_keep_their_order(kind, take, size):
    """Long dicts are compared as one value, and short ones key by key."""
    held, shown = kind((i, float(i)) for i in range(size)), []

    def model(x):
        shown.append(take(held))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x[:, 0])

    svi = training(model, "sgvb")
    for step in range(9):
        shown.clear()
        svi.step(X)
        assert shown[0] == step
        assert [*held] == [
            *range(step + 1, size),
            *(range(step + 1) if take is uses_the_oldest else ()),
        ]


class Lazy(nn.Module):
    """A module that sets itself up in its first run, as PyTorch's lazy modules do."""

    def __init__(self):
        super().__init__()
        self.net, self.ready = nn.LazyLinear(3), False

    def forward(self, z):
        if not self.ready:
            self.scale, self.ready = torch.ones(3, dtype=z.dtype), True
        return self.net(z) * self.scale


@pytest.mark.parametrize("name", ["sgvb", "iwae", "sis"])
def test_modules_that_set_themselves_up_are_trained(name):
    decoder = Lazy()

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
            loc = decoder(z)
            pyro.module("decoder", decoder)
            pyro.sample("x", dist.Normal(loc, 1.0).to_event(1), obs=x)

    svi = training(model, name)
    svi.step(X)
    before = decoder.net.weight.detach().clone()
    for _ in range(4):
        svi.step(X)
    assert decoder.ready
    assert bool((decoder.net.weight != before).all())


class FromNone(nn.Module):
    """A module that makes its parts in its first run, in the place of None."""

    def __init__(self):
        super().__init__()
        self.shift = self.net = None

    def forward(self, z):
        if self.net is None:
            self.net, self.shift = nn.Linear(2, 3), nn.Parameter(z.detach().mean())
        return self.net(z) + self.shift


class Built(nn.Module):
    """A module with a flag beside the parts that it has made."""

    def __init__(self):
        super().__init__()
        self.built = False

    def forward(self, z):
        if not self.built:
            self.net, self.built = nn.Linear(2, 3), True
        return self.net(z)


class InDict(nn.Module):
    """A module that makes its parameters in a container of PyTorch."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterDict()

    def forward(self, z):
        if "weight" not in self.parts:
            self.parts["weight"] = nn.Parameter(torch.randn(2, 3))
        return z @ self.parts["weight"]


class InList(nn.Module):
    """As InDict, but in a list."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList()

    def forward(self, z):
        if not len(self.parts):
            self.parts.append(nn.Parameter(torch.randn(2, 3)))
        return z @ self.parts[0]


@in_turn(kind=[FromNone, Built, InDict, InList], name=["sgvb", "iwae"])
def test_parts_that_a_module_makes_in_its_first_run_are_made_once(kind, name):
    decoder, made = kind(), []

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
            loc = decoder(z)
            pyro.module("decoder", decoder)
            made.append(tuple(decoder.parameters()))
            pyro.sample("x", dist.Normal(loc, 1.0).to_event(1), obs=x)

    svi = training(model, name)
    for _ in range(4):
        svi.step(X)
    assert len({(*map(id, parts),) for parts in made}) == 1
    assert all(pyro.get_param_store()[f"decoder$$${n}"] is p for n, p in decoder.named_parameters())


@pytest.mark.parametrize("name", ["sgvb", "iwae", "rb"])
def test_masks_that_change_leave_counters_as_one_run_does(name):
    """A step that finds other priors to count is repeated, and each length is shown once."""
    shown, lengths = [], [3, 3, 1, 2, 3, 1]
    log_scale = torch.zeros(3, requires_grad=True)

    def model(x):
        length = lengths[len(shown)]
        shown.append(length)
        with pyro.plate("data", 3), pyro.poutine.mask(mask=torch.arange(3) < length):
            z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(torch.zeros(3), log_scale.exp()))

    loss = LOSSES[name]()
    for _ in lengths:
        loss.loss_and_grads(model, guide, X[0])
    assert shown == lengths


@in_turn((0, 2, 5), name=LOSSES, guide_counts=[False, True])
def test_masked_latents_need_no_runs_of_their_own(name, guide_counts):
    """If the guide counts more, the first step is made and analyzed twice."""
    kept = torch.tensor([True, True, False])

    def model(x):
        RUNS.add("model")
        with pyro.plate("data", 3), pyro.poutine.mask(mask=kept):
            z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        RUNS.add("guide")
        loc = pyro.param("loc", torch.zeros(3))
        with pyro.plate("data", 3), pyro.poutine.mask(mask=guide_counts or kept):
            pyro.sample("z", dist.Normal(loc + x / 2, 1.0))

    loss, steady = LOSSES[name](), STEADY.get(name, (1, 1))
    for step in range(1, 6):
        RUNS.take()
        loss.loss_and_grads(model, guide, X[0])
        counts = RUNS.take()
        is_due = step & (step - 1) == 0
        for program, least in zip(("model", "guide"), steady, strict=True):
            most = least + (3 if step == 1 else 2 if is_due else 0)
            if guide_counts:
                most += most if step == 1 else is_due
            assert counts[program] <= most, (step, counts)


def of_arguments(batch):
    batch["calls"] += 1
    batch["bank"].append(batch["calls"])
    batch["sums"].add_(1.0)
    return len(batch["bank"]) + batch["calls"] + float(batch["sums"])


CALLS = ContextVar("calls")
OF_THREAD = threading.local()


def of_contexts(batch):
    CALLS.set(CALLS.get() + 1)
    OF_THREAD.calls += 1
    batch["weak"][batch["key"]] += 1
    return CALLS.get() + OF_THREAD.calls + batch["weak"][batch["key"]]


@in_turn(name=["sgvb", "iwae", "rb", "sis"], count=[of_arguments, of_contexts])
def test_what_arguments_and_contexts_hold_is_changed_once_a_step(name, count):
    CALLS.set(0)
    OF_THREAD.calls, key = 0, Schedule()
    batch = {"calls": 0, "bank": [], "sums": torch.zeros(()), "key": key}
    batch["weak"], shown = WeakKeyDictionary({key: 0}), []

    def model(x, batch):
        shown.append(count(batch))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0 + shown[-1]), obs=x[:, 0])

    pyro.clear_param_store()
    guide = lambda x, batch: mean_field(x)  # noqa: E731
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), LOSSES[name]())
    for step in range(1, 6):
        shown.clear()
        svi.step(X, batch)
        assert shown[0] == 3 * step


def generators():
    of_torch = torch.Generator().manual_seed(3)
    of_numpy, of_python = np.random.default_rng(3), random.Random(3)
    return {
        "torch": lambda: float(torch.randn((), generator=of_torch)),
        "numpy": lambda: float(of_numpy.normal()),
        "python": lambda: of_python.gauss(0.0, 1.0),
    }


@in_turn(
    kind=["torch", "numpy", "python"], loss=[TraceSGVB_ELBO, TraceRaoBlackwell_ELBO, LOSSES["sis"]]
)
def test_generators_of_programs_give_each_step_its_numbers(loss, kind):
    """Those of one run per step."""
    draw, again, shown = generators()[kind], generators()[kind], []

    def model(x):
        shown.append(draw())
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1) + shown[-1], 1.0), obs=x[:, 0])

    pyro.clear_param_store()
    svi = SVI(model, mean_field, pyro.optim.Adam({"lr": 0.01}), loss())
    for _ in range(5):
        shown.clear()
        svi.step(X)
        assert shown[0] == again()


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_particles_do_not_share_numbers_of_the_programs_generators(kind):
    draw, shown = generators()[kind], []

    def model(x):
        shown.append(draw())
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1) + shown[-1], 1.0), obs=x[:, 0])

    loss = LOSSES["iwae"]()
    for _ in range(3):
        shown.clear()
        loss.loss(model, mean_field, X)
        assert len(set(shown)) >= 5


@pytest.mark.parametrize("name", ["sgvb", "iwae", "rb", "sis"])
def test_a_log_that_a_run_makes_has_an_entry_for_each_step(name):
    logged = {}

    def model(x):
        logged.setdefault("mean", []).append(float(x.mean()))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x[:, 0])

    svi = training(model, name)
    for step in range(1, 6):
        svi.step(X)
        assert len(logged["mean"]) == step


ITERATORS = {
    "list": lambda: iter([*range(100)]),
    "generator": lambda: (number for number in range(100)),
    "cycle": lambda: itertools.cycle(range(7)),
    "zip": lambda: (a + b for a, b in zip(range(100), itertools.count(), strict=False)),
    "loader": lambda: map(int, iter(torch.utils.data.DataLoader(range(100)))),
}


@in_turn(kind=ITERATORS, name=["sgvb", "iwae", "rb", "sis"])
def test_each_step_takes_one_item_of_an_iterator(name, kind):
    items, again, shown = {"next": ITERATORS[kind]()}, ITERATORS[kind](), []

    def model(x):
        shown.append(next(items["next"]))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1) + shown[-1], 1.0), obs=x[:, 0])

    svi = training(model, name)
    for step in range(1, 6):
        shown.clear()
        svi.step(X)
        item = next(again)
        assert shown[0] == item
        assert step & (step - 1) == 0 or set(shown) == {item}


def test_a_file_is_warned_of_once(tmp_path, caplog):
    (tmp_path / "numbers").write_text("1\n" * 100)

    def model(x):
        float(next(lines))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x[:, 0])

    with (tmp_path / "numbers").open() as lines:
        svi = training(model, "iwae")
        for _ in range(4):
            svi.step(X)
    (text,) = [r.getMessage() for r in caplog.records if "iterator" in r.getMessage()]
    assert "'lines'" in text


@pytest.mark.slow
def test_losses_that_are_compared_begin_with_the_same_counters():
    state, total, shown = {"calls": 0}, torch.zeros(()), Tally()

    def model(x):
        state["calls"] += 1
        shown.add(state["calls"])
        total.add_(1.0)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x[:, 0])

    def last(*names):
        """The highest count that a model saw."""
        svi = training(model, "sgvb")
        state["calls"] = 0
        total.zero_()
        for _ in range(5):
            svi.step(X)
        losses = {name: TraceSGVB_ELBO() for name in names}
        optim = pyro.optim.Adam({"lr": 0.01})
        shown.take()
        compare(model, mean_field, X, losses=losses, optim=optim, num_steps=3, seed=0)
        assert state["calls"] == float(total) == 5
        return max(shown.take())

    assert last("ELBO") == last("ELBO", "again")


class Attributes(dict):
    """A config whose missing attributes raise a KeyError."""

    __getattr__ = dict.__getitem__


class Settings:
    """A config whose missing attributes raise another error."""

    def __init__(self, scale):
        self.scale = scale

    def __getattr__(self, name):
        raise RuntimeError(f"there is no setting {name}")


@in_turn((1, 3, 4), name=LOSSES, kind=[Attributes, Settings])
def test_missing_attributes_of_a_config_may_raise_any_error(name, kind):
    config = kind(scale=1.5)

    def model(x, scale=None):
        with pyro.plate("data", len(x)):
            loc = torch.zeros(2)
            z = pyro.sample("z", dist.Normal(loc, scale or config.scale).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1, keepdim=True), 1.0).to_event(1), obs=x[:, :1])

    def guide(x, scale=None):
        loc = pyro.param("loc", torch.zeros(2))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(loc + 0.1 * x[:, :2], scale or config.scale).to_event(1))

    losses = []
    for scale in (1.5, None):
        pyro.set_rng_seed(0)
        pyro.clear_param_store()
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), LOSSES[name]())
        losses.append([svi.step(X, scale) for _ in range(2)])
    assert losses[0] == losses[1]
