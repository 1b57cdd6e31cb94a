"""How many numbers the host reads of its device in a step: of a GPU it would wait for each."""

import pyro
import pytest

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    RandomWalk,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceRenyi_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    WakeSleep,
)
from tests.device.programs import Training, reads_of_trace_elbo
from tests.training import runs

# The loss, and the model and guide that it is used with.
QUICK = {
    "sgvb": (TraceSGVB_ELBO, "vae"),
    "iwae": (lambda: TraceIWAE_ELBO(3), "vae"),
    "sis": (lambda: TraceSIS_ELBO(2), "vae"),
    "ais": (lambda: TraceAIS_ELBO(2), "vae"),
    "rb": (runs.OBJECTIVES["rb"], "categories"),
    "rb-nvil": (runs.OBJECTIVES["rb-nvil"], "categories"),
    "truncated": (runs.OBJECTIVES["truncated"], "states"),
    "wake-sleep": (WakeSleep, "vae"),
}
SLOW = {
    "sis-latent": (runs.OBJECTIVES["sis-latent"], "vae"),
    "ais-random-walk": (lambda: TraceAIS_ELBO(2, RandomWalk()), "vae"),
    "renyi": (lambda: TraceRenyi_ELBO(0.5, 3), "vae"),
    **{n: (runs.OBJECTIVES[n], "vae") for n in ("sis-learned", "sis-trained", "sis-underdamped")},
    **{n: (runs.OBJECTIVES[n], "vae") for n in ("em", "ais-hmc")},
    "ais-mala": (lambda: TraceAIS_ELBO(2, MALA()), "vae"),
    "ais-hmc-latent": (lambda: TraceAIS_ELBO(2, HMC(), coordinates="latent"), "vae"),
    "rb-relax": (runs.OBJECTIVES["rb-relax"], "categories"),
    "iwae-auto": (lambda: TraceIWAE_ELBO(3), "auto"),
    "sis-auto": (lambda: TraceSIS_ELBO(3), "auto"),
    "ais-auto": (lambda: TraceAIS_ELBO(3), "auto"),
    "sis-slots": (lambda: TraceSIS_ELBO(2), "slots"),
    "rb-slots": (lambda: TraceRaoBlackwell_ELBO(1), "slots"),
}
# Pyro's own loss draws what these sum.
SUMMED = {
    "iwae-enumerated": (lambda: TraceIWAE_ELBO(3), "enumerated"),
    "sis-enumerated": (lambda: TraceSIS_ELBO(2), "enumerated"),
    "ais-enumerated": (lambda: TraceAIS_ELBO(2), "enumerated"),
}
CASES = {**QUICK, **SLOW, **SUMMED}
DEFAULT = {*QUICK, "iwae-enumerated"} - {"rb-nvil", "truncated"}
cases = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in DEFAULT)) for n in CASES]
)


@cases
def test_a_step_reads_no_more_than_pyros_and_without_validation_the_loss_alone(name, device):
    loss, programs = CASES[name]
    most = reads_of_trace_elbo("slots" if name in SUMMED else programs, device)
    training = Training(loss(), programs, device)
    training.step()
    reads = training.reads(most)
    assert len(reads) <= most, reads.by_line
    pyro.enable_validation(False)
    reads = training.reads(1)
    assert len(reads) == 1, reads.by_line


GROWING = {
    "sis": lambda size: TraceSIS_ELBO(size),
    "sis-latent": lambda size: TraceSIS_ELBO(size, ULA(), coordinates="latent"),
    "ais": lambda size: TraceAIS_ELBO(size),
    "ais-particles": lambda size: TraceAIS_ELBO(2, MALA(), num_particles=size),
    "iwae": lambda size: TraceIWAE_ELBO(size),
}


@pytest.mark.slow
@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("name", GROWING)
def test_what_a_step_reads_does_not_grow(name, validation, device):
    pyro.enable_validation(validation)
    counts = []
    for size in (2, 5):
        pyro.clear_param_store()
        counts.append(len(Training(GROWING[name](size), "vae", device).reads()))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["sgvb", "sis", "rb"])
def test_losses_on_a_device_are_those_on_the_cpu(name, device):
    loss, programs = CASES[name]
    losses = []
    for place in ("cpu", device):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        training = Training(loss(), programs, place)
        losses.append([training.step() for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
