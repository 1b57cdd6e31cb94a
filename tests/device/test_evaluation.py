"""Evaluators on a device have the CPU's numbers, and steps report wrong input there too."""

import math

import pyro
import pytest
import torch
from torch import nn

from pyro_mcvae import HMC, TraceIWAE_ELBO, TraceSIS_ELBO, log_evidence, refine
from tests.device.programs import PROGRAMS, Training
from tests.training.runs import data


def on(place, programs, call, *args, **options):
    """What a call returns for the untrained programs on a device."""
    pyro.clear_param_store()
    pyro.set_rng_seed(2)
    pair = PROGRAMS[programs]()
    for program in pair:
        if isinstance(program, nn.Module):
            program.to(place)
    x, index = data()[:4].to(place), torch.arange(4, device=place)
    pyro.set_rng_seed(3)
    return call(*pair, x, index, *args, **options)


LONG = {"schedule": 4, "kernel": HMC(), "num_particles": 8, "warmup": 3}
ANNEALED = {
    "plain": {"num_particles": 20},
    "annealed": LONG,
    "latent": {**LONG, "coordinates": "latent"},
    "whitened": {**LONG, "coordinates": "whitened"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "plain")) for n in ANNEALED]
)
def test_log_evidence(name, device):
    result = [on(p, "vae", log_evidence, **ANNEALED[name]).total for p in ("cpu", device)]
    assert float(result[1]) == pytest.approx(float(result[0]), rel=1e-9)


@pytest.mark.parametrize("place", ["cpu", "sim"])
def test_refine_in_fewer_chains_than_candidates(place, request):
    """The further transitions are those of the chosen draws alone."""
    device = torch.device("cpu") if place == "cpu" else request.getfixturevalue("device")
    draws = on(device, "vae", refine, num_samples=2, num_particles=3, num_transitions=1)
    assert draws["z"].shape == (2, 4, 2)
    assert draws["z"].device == device


@pytest.mark.parametrize("loss", [lambda: TraceIWAE_ELBO(2), lambda: TraceSIS_ELBO(2)])
def test_wrong_data_of_a_warm_step_are_reported(loss, device):
    training = Training(loss(), "vae", device)
    for _ in range(3):
        training.step()
    training.data[0][1, 2] = math.nan
    with pytest.raises(ValueError, match="invalid values"):
        training.step()
