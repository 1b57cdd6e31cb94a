"""What is known about programs does not outlive a change of them."""

import copy
import enum
import gc
import logging
import math
import pickle
import sys
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_mcvae import ULA, CompiledELBO, TraceIWAE_ELBO, TraceRaoBlackwell_ELBO, TraceSIS_ELBO
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.structure import marked
from pyro_mcvae.structure.cache import Analyses
from tests.cases import every
from tests.compiled.test_dependencies import PLACES, inner, outer
from tests.params import in_turn
from tests.tally import Tally
from tests.zoo import EXAMPLES

MAKERS = {
    "iwae": lambda: TraceIWAE_ELBO(3, vectorize_particles=True),
    "sis": lambda: TraceSIS_ELBO(3, ULA(0.1), num_particles=2, vectorize_particles=True),
}


def model(tied):
    with pyro.plate("left", 3):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("right", 3):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(a + b if tied else b, 0.3), obs=torch.tensor([1.0, 2.0, 3.0]))


def guide(tied):
    with pyro.plate("left", 3):
        a = pyro.sample("a", dist.Normal(pyro.param("loc", torch.tensor(0.3)), 1.0))
    with pyro.plate("right", 3):
        pyro.sample("b", dist.Normal(-a if tied else 0.5, 0.8))


class Owner:
    def __init__(self):
        self.tied = False

    def model(self):
        model(self.tied)

    def guide(self):
        guide(self.tied)


def by_argument(tied):
    return model, guide, (tied,)


def by_closure():
    tied = False

    def run_model():
        model(tied)

    def run_guide():
        guide(tied)

    def programs(now):
        nonlocal tied
        tied = now
        return run_model, run_guide, ()

    return programs


def by_attribute():
    owner = Owner()

    def programs(tied):
        owner.tied = tied
        return owner.model, owner.guide, ()

    return programs


@dataclass
class Settings:
    tied: bool = False


def by_settings(settings):
    """A flag in a dict, a namespace or a dataclass that an object keeps."""

    def make():
        kept = settings()

        class Settled(Owner):
            def __init__(self):
                self.options = kept

            @property
            def tied(self):
                return self.options["tied"] if isinstance(kept, dict) else self.options.tied

        owner = Settled()

        def programs(tied):
            if isinstance(kept, dict):
                kept["tied"] = tied
            else:
                kept.tied = tied
            return owner.model, owner.guide, ()

        return programs

    return make


HOW = [
    lambda: by_argument,
    by_attribute,
    by_closure,
    by_settings(lambda: {"tied": False}),
    by_settings(lambda: SimpleNamespace(tied=False)),
    by_settings(Settings),
]


@in_turn(how=HOW, objective=MAKERS)
def test_a_flag_that_ties_latents_is_seen_at_once(objective, how):
    # The same sites and plates: independent blocks before, one weight for all after.
    programs, elbo = how(), MAKERS[objective]()
    for tied in (False, True):
        run_model, run_guide, args = programs(tied)
        losses = []
        for loss in (elbo, MAKERS[objective]()):
            pyro.set_rng_seed(0)
            loss.loss(run_model, run_guide, *args)  # a fresh one begins its first step twice
            pyro.set_rng_seed(1)
            losses.append(loss.loss(run_model, run_guide, *args))
        assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    assert losses[0] != 0.0


def programs_of(*args, **kwargs):
    return Programs(model, guide, args, kwargs)


def test_a_fresh_analysis_is_made_at_uses_1_2_4_and_at_least_every_1024th(caplog):
    analyses, state, made = Analyses(), [0], []

    def find():
        made.append(used)
        return state[0]

    result = []
    for used in range(1, 5001):
        state[0] = int(used > 20)
        programs = programs_of(torch.zeros(3), rate=0.1 * used)
        result.append(analyses.of(programs).compared(("sites",), find))
    assert made == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]
    assert result.index(1) == 31
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "16 steps ago" in caplog.text


X = torch.tensor([3.0, -3.0])


def coupling(flag):
    """A model whose data depend on each other's latents if a flag is set."""

    def flagged(x, *args):
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            loc = z + z.roll(1, -1) if flag(*args) else z
            pyro.sample("x", dist.Normal(loc, 0.5), obs=x)

    return flagged


def prior(x, *args):
    with pyro.plate("data", 2):
        pyro.sample("z", dist.Normal(0.0, 1.0))


def assert_seen(flag, before, after, change=lambda: None):
    """After a change the loss is that of a fresh objective, also between fresh analyses."""
    program, elbo = coupling(flag), TraceIWAE_ELBO(50)
    for i in range(max(2, len(before))):
        elbo.loss(program, prior, X, *before[i % len(before)])
    change()
    losses = []
    for loss in (elbo, TraceIWAE_ELBO(50)):
        pyro.set_rng_seed(1)
        losses.append(loss.loss(program, prior, X, *after))
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@pytest.mark.parametrize(
    ("flag", "before", "after"),
    [
        (lambda k: k == 1, [0], 1),
        (lambda k: k is True, [1], True),
        (lambda k: k > 0.5, [0.4, 0.45], 0.6),
        (lambda k: k == 11, [*range(11)], 11),
        (lambda k: k is Kind.TWO, [Kind.ONE], Kind.TWO),
        (lambda k: k is not None, [None], torch.zeros(())),
        (lambda k: len(k) == 3, [[1, 2]], [1, 2, 3]),
        (lambda k: "b" in k, [{"a": 1}], {"b": 1}),
        (lambda k: k[1]["k"][0], [(1, {"k": [0]})], (1, {"k": [1]})),
        (bool, [np.int64(0)], np.int64(1)),
        (bool, [torch.tensor(False)], torch.tensor(True)),
        (lambda k: k.tied, [Settings()], Settings(True)),
    ],
)
def test_an_argument_that_decides_what_is_executed_is_seen_at_once(flag, before, after):
    assert_seen(flag, [(v,) for v in before], (after,))


@pytest.mark.parametrize(
    "place",
    every(3, [p for p in PLACES if p not in ("class of distributions", "builtin function")]),
)
def test_a_value_outside_that_decides_what_is_executed_is_seen_at_once(place, monkeypatch):
    for module in (outer, inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    get, put = PLACES[place]()
    try:
        assert_seen(lambda: get() > 1.5, [()], (), lambda: put(2.0))
    finally:
        put(1.0)


def test_a_buffer_that_decides_what_is_executed_is_seen_at_once():
    module = torch.nn.BatchNorm1d(1)
    assert_seen(
        lambda: bool(module.running_mean > 0), [()], (), lambda: module.running_mean.add_(1)
    )


@pytest.mark.parametrize("name", every(4, EXAMPLES))
def test_the_fingerprint_of_a_step_is_the_same_from_step_to_step(name, monkeypatch):
    # As if something had changed at every step.
    monkeypatch.setattr("pyro_mcvae.structure.cache._Watch.covers", lambda *_: False)
    example = EXAMPLES[name]()
    sampler = example.sampler(vectorize=None)
    for _ in range(5):
        sampler.sample(example.programs)
    (pair,) = sampler.analyses._pairs
    uses = [a.uses for a in pair._analyses.values()]
    # The first call of a guide may run the model to find its sites.
    assert uses == [5] or (name == "messenger" and uses == [1, 4])


def test_numbers_that_count_make_no_analyses():
    made = []

    def counted(x, step):
        made.append(step)
        coupling(lambda *_: False)(x * step)

    elbo = TraceIWAE_ELBO(3)
    for step in range(1, 65):
        elbo.loss(counted, prior, X, step)
    assert [made.count(step) for step in range(33, 64)] == [1] * 31


def test_pairs_that_alternate_are_remembered():
    analyses, made = Analyses(), []
    pairs = [(model, lambda i=i: i, (), {}) for i in range(3)]
    for _ in range(3):
        for pair in pairs:
            analyses.of(Programs(*pair)).put(("uses",), None)
    uses = [analyses.of(Programs(*pair)).uses for pair in pairs]
    assert uses == [4, 4, 4]
    for copied in (copy.deepcopy(analyses), pickle.loads(pickle.dumps(analyses))):
        made.append(copied.of(Programs(*pairs[0])).uses)
    assert made == [1, 1]


def looks_of(monkeypatch):
    """The looks that are made at the programs, by name."""
    looks = []

    def counted(module, name):
        plain = getattr(module, name)

        def look(*args, **kwargs):
            looks.append(name)
            return plain(*args, **kwargs)

        monkeypatch.setattr(module, name, look)

    counted(marked, "marked_run")
    return looks


def test_each_analysis_runs_its_experiments_once(monkeypatch):
    # One structure is derived twice: without particles, and with draws that have lost them.
    looks, elbo = looks_of(monkeypatch), MAKERS["iwae"]()

    def lost(tied):
        pyro.sample("s", dist.Normal(0.0, 1.0))
        model(tied)

    def lost_guide(tied):
        s = pyro.sample("s", dist.Normal(pyro.param("loc", torch.tensor(0.3)), 1.0))
        with pyro.plate("left", 3):
            pyro.sample("a", dist.Normal(s, 1.0))
        with pyro.plate("right", 3):
            pyro.sample("b", dist.Normal(s, 0.8))

    analyses = 0
    for step in range(1, 17):
        elbo.loss(lost, lost_guide, False)
        analyses += step in (1, 2, 4, 8, 16)
        assert len(looks) == analyses  # the batched layout needs no check of its own here


@pytest.mark.slow
def test_a_recording_has_the_analysis_of_its_own_step():
    """Whichever flag the steps before it had: between two it has one weight, or two."""
    program = coupling(lambda tied: tied)
    plain, losses = TraceIWAE_ELBO(20), {True: [], False: []}
    recorded = CompiledELBO(TraceIWAE_ELBO(20), backend="eager")
    for step in range(12):
        for tied in losses:
            for loss in (plain, recorded):
                pyro.set_rng_seed(step)
                losses[tied].append(loss.loss(program, prior, X, tied))
    for values in losses.values():
        assert values[::2] == pytest.approx(values[1::2], rel=1e-12)


@pytest.mark.parametrize("make", every(2, MAKERS.values()), ids=MAKERS)
def test_a_model_that_is_wrapped_at_each_step_is_analyzed_seldom(make):
    runs = Tally()

    def counted(x):
        runs.add()
        coupling(lambda: False)(x)

    def counts(wrap):
        elbo, result = make(), []
        for _ in range(64):
            runs.take()
            elbo.loss(wrap(counted), prior, X)
            result.append(runs.take()["run"])
        return result

    wrapped, same = counts(lambda program: pyro.condition(program, data={})), counts(lambda p: p)
    assert max(wrapped) <= max(same)
    assert wrapped[35:38] == same[35:38] == 3 * same[2:3]
    assert sum(n > same[2] for n in wrapped) <= 6 * 7 / 2 + 1


@pytest.mark.parametrize("make", [lambda p: pyro.condition(p, data={}), lambda p: lambda *x: p(*x)])
def test_a_model_that_is_made_at_each_step_has_the_bounds_of_its_own_operations(make):
    losses, elbo = [], TraceIWAE_ELBO(50)
    for step in range(20):
        flag = step % 3 == 2
        for loss in (elbo, TraceIWAE_ELBO(50)):
            pyro.set_rng_seed(step)
            losses.append(loss.loss(make(coupling(lambda flag=flag: flag)), prior, X))
    assert losses[::2] == pytest.approx(losses[1::2], abs=1e-9)


@pytest.mark.parametrize("anew", every(2, [False, True]))
def test_a_branch_that_does_not_broadcast_may_follow_one_that_does(anew):
    """At the same sites and sizes: what fails is the branch, and not its values."""

    def branching(flag):
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        total = sum(z.view(3)[i] for i in range(3)) if flag else z.sum(-1)
        pyro.sample("x", dist.Normal(total, 1.0), obs=torch.tensor(1.0))

    def normal(flag):
        pyro.sample("z", dist.Normal(torch.full((3,), 0.2), 1.0).to_event(1))

    elbo, losses = TraceIWAE_ELBO(200), []
    for flag in [False, False, False, True, True, False, True]:
        model = (lambda flag: branching(flag)) if anew else branching
        for loss in (elbo, TraceIWAE_ELBO(200, vectorize_particles=False)):
            pyro.set_rng_seed(1)
            losses.append(loss.loss(model, normal, flag))
    expected = math.log(2 * math.sqrt(2 * math.pi)) + 1 / 8  # x is Normal(0, 2)
    assert losses == pytest.approx([expected] * len(losses), abs=0.1)


def padded(step):
    """Programs of step's own data, of which AutoGuides draw the masked entries, too."""
    x, mask = torch.arange(4.0) - step, torch.arange(4) < 2

    def model():
        with pyro.plate("time", 4), pyro.poutine.mask(mask=mask):
            z = pyro.sample("z", dist.Normal(0.0, 1.0 + step))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide():
        with pyro.plate("time", 4):
            pyro.sample("z", dist.Normal(x / 2, 1.0))

    return model, guide


@pytest.mark.parametrize("make", every(3, [TraceRaoBlackwell_ELBO, *MAKERS.values()]))
def test_a_masked_model_that_is_made_at_each_step_has_the_priors_of_its_own(make):
    elbo, losses = make(), []
    for step in range(12):
        for loss in (elbo, make()):
            pyro.set_rng_seed(step)
            losses.append(loss.loss(*padded(step)))
    assert losses[::2] == pytest.approx(losses[1::2], abs=1e-9)


def referred_to(start, kinds):
    """The objects of these kinds that an object refers to, by way of others."""
    found, seen, todo = [], {id(start)}, [start]
    while todo:
        for value in gc.get_referents(todo.pop()):
            if isinstance(value, kinds):
                found.append(value)
            elif id(value) not in seen and not isinstance(value, type | ModuleType | FunctionType):
                todo.append(value)
            seen.add(id(value))
    return found


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param(n, m, marks=() if i % 6 == 0 and (i // 6 + j) % 3 == 0 else pytest.mark.slow)
        for i, n in enumerate(["padded", *EXAMPLES])
        for j, m in enumerate([TraceRaoBlackwell_ELBO, *MAKERS.values()])
    ],
)
def test_findings_refer_to_no_program_and_no_tensor(name, make):
    """They also serve other programs that execute the same operations."""
    elbo, args = make(), ()
    if name == "padded":
        model, guide = padded(1)
    else:
        example = EXAMPLES[name]()
        model, guide, args = example.model, example.guide, example.args
    for _ in range(3):
        elbo.loss(model, guide, *args)
    analyses = [a for pair in elbo.sampler.analyses._pairs for a in pair._analyses.values()]
    assert analyses
    for analysis in analyses:
        assert referred_to(analysis._findings, (Programs, Tensor, type(model))) == []


def written(z, at):
    result = torch.zeros_like(z)
    result[..., at] = z
    return result


ARRANGED = {
    "index": lambda z, at: z[..., at],
    "index after a new dim": lambda z, at: z[None, ..., at].squeeze(0),
    "written to an index": written,
    "index_put": lambda z, at: torch.zeros_like(z.T).index_put((at,), z.T).T,
    "index_select": lambda z, at: torch.index_select(z, -1, at),
    "index_select of an inner dim": lambda z, at: z[..., None].index_select(-2, at)[..., 0],
    "index_select by name": lambda z, at: torch.index_select(z, dim=-1, index=at),
    "gather by name": lambda z, at: torch.gather(dim=-1, index=at.expand(z.shape), input=z),
    "gather": lambda z, at: z.gather(-1, at.expand(z.shape)),
    "take_along_dim": lambda z, at: torch.take_along_dim(z, at.expand(z.shape), -1),
    "scatter": lambda z, at: torch.zeros_like(z).scatter(-1, at.expand(z.shape), z),
    "index_add": lambda z, at: torch.zeros_like(z).index_add(-1, at, z),
    "embedding": lambda z, at: torch.nn.functional.embedding(at, z.T).T.squeeze(-2),
    "neighbors": lambda z, at: z[..., torch.stack([at, torch.arange(2)], -1)].mean(-1),
    "repeats": lambda z, at: z.repeat_interleave(at + 1 - torch.arange(2), -1),
}


@pytest.mark.parametrize(
    ("name", "compiled"),
    every(3, [(n, False) for n in ARRANGED]) + every(8, [(n, True) for n in ARRANGED]),
)
def test_positions_that_begin_to_couple_data_are_seen_at_once(name, compiled):
    """They come as an argument, whose values are no part of a key."""

    def arranged(x, at):
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            loc = ARRANGED[name](z.reshape(-1, 2), at).reshape(z.shape)
            pyro.sample("x", dist.Normal(loc, 0.5), obs=x)

    def make():
        return TraceIWAE_ELBO(20)

    elbo, losses = make(), []
    recorded = CompiledELBO(elbo, backend="eager") if compiled else elbo
    for step in range(6):
        at = torch.tensor([1, 0]) if step == 4 else torch.tensor([0, 1])
        for loss in (recorded, make()):
            pyro.set_rng_seed(step)
            losses.append(loss.loss(arranged, prior, X, at))
    assert losses[::2] == pytest.approx(losses[1::2], rel=1e-9)


@pytest.mark.slow
def test_positions_that_change_at_each_step_make_no_analyses():
    """Rows of a table, labels and groups: only whether they move something is looked at."""
    runs = Tally()

    def grouped(x, groups, labels):
        runs.add()
        tables = pyro.sample("tables", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            logits = torch.stack([z, tables[..., groups, 0]], -1)
            pyro.factor("label", logits.gather(-1, labels.expand(z.shape)[..., None])[..., 0])
            pyro.sample("x", dist.Normal(logits[..., torch.arange(4), labels], 0.5), obs=x)

    def grouped_guide(*_):
        pyro.sample("tables", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        with pyro.plate("data", 4):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    elbo, counts = TraceIWAE_ELBO(3), []
    for _ in range(40):
        runs.take()
        labels = torch.randint(2, (4,))
        elbo.loss(grouped, grouped_guide, torch.zeros(4), torch.randint(3, (4,)), labels)
        counts.append(runs.take()["run"])
    assert counts[16:31] == [1] * 15
