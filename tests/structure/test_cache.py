"""What is known about programs does not outlive a change of them."""

import copy
import logging
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import ULA, TraceIWAE_ELBO, TraceSIS_ELBO
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.nesting import checked_run
from pyro_mcvae.structure import dependencies, finder
from pyro_mcvae.structure.cache import StructureCache
from pyro_mcvae.structure.finder import StructureFinder

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


@pytest.mark.parametrize("objective", MAKERS)
@pytest.mark.parametrize(
    "how", [lambda: by_argument, by_attribute, by_closure], ids=["argument", "attribute", "closure"]
)
def test_a_flag_that_ties_latents_is_seen_at_once(objective, how):
    # The same sites and plates: independent blocks before, one weight for all after.
    programs, elbo = how(), MAKERS[objective]()
    for tied in (False, True, False):
        run_model, run_guide, args = programs(tied)
        losses = []
        for loss in (elbo, MAKERS[objective]()):
            pyro.set_rng_seed(0)
            loss.loss(run_model, run_guide, *args)  # a fresh one begins its first step twice
            pyro.set_rng_seed(1)
            losses.append(loss.loss(run_model, run_guide, *args))
        assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    assert losses[0] != 0.0


def test_what_no_flag_tells_is_looked_at_again(caplog):
    memory, state, looks = StructureCache(), [0], []
    programs = Programs(model, guide, (torch.zeros(3),), {"step": 0})

    def find():
        looks.append(used)
        return state[0]

    found = []
    for used in range(1, 5001):
        state[0] = int(used > 20)
        found.append(memory.of(programs, "sites", find))
    assert looks == [1, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]
    assert found.index(1) == 31
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_pairs_that_alternate_are_remembered():
    memory, looks = StructureCache(), []
    pairs = [Programs(model, lambda i=i: i, (), {}) for i in range(3)]
    for _ in range(3):
        for pair in pairs:
            memory.of(pair, "sites", lambda pair=pair: looks.append(pair))
    assert looks == pairs
    for copied in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        copied.of(pairs[0], "sites", lambda: looks.append("again"))
    assert looks[3:] == ["again", "again"]


def looks_of(monkeypatch):
    """The looks that are made at the programs, by name."""
    looks = []

    def counted(module, name):
        plain = getattr(module, name)

        def look(*args):
            looks.append(name)
            return plain(*args)

        monkeypatch.setattr(module, name, look)

    counted(dependencies, "find_dependencies")
    counted(finder, "find_dependent_plates")
    return looks


def test_a_first_step_looks_once_and_is_looked_at_again(monkeypatch):
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

    elbo.loss(lost, lost_guide, False)
    both = ["find_dependencies", "find_dependent_plates"]
    assert sorted(looks) == both
    for _ in range(15):
        elbo.loss(lost, lost_guide, False)
    assert sorted(looks) == sorted(2 * both)


def test_programs_of_one_call_are_looked_at_again_where_it_is_time(monkeypatch):
    looks, found = looks_of(monkeypatch), StructureFinder(find_roots=True)
    programs = Programs(model, guide, (False,), {})
    run = checked_run(programs, True)
    for _ in range(16):
        found.of(programs, run)
    assert looks.count("find_dependencies") == looks.count("find_dependent_plates") == 2
