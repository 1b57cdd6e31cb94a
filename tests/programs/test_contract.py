"""Plates of model and guide that differ, and so drop or change N/B."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import TraceIWAE_ELBO, TraceRaoBlackwell_ELBO, TraceSGVB_ELBO, TraceSIS_ELBO
from pyro_mcvae import log_evidence as evidence

DATA = torch.linspace(-1.0, 1.0, 100, dtype=torch.float64)
INDEX = torch.arange(4)


def plate(*sizes, name="data", **options):
    return lambda: pyro.plate(name, *sizes, **options)


MINIBATCH = plate(100, subsample=INDEX)


def programs(of_model, of_guide, sequential=False):
    def model():
        if sequential:
            for i in of_model():
                z = pyro.sample(f"z_{i}", dist.Normal(0.0, 1.0))
                pyro.sample(f"x_{i}", dist.Normal(z, 1.0), obs=DATA[i])
            return
        with of_model() as i:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=DATA[i])

    def guide():
        if sequential:
            for i in of_guide():
                pyro.sample(f"z_{i}", dist.Normal(DATA[i] / 2, 0.5**0.5))
        elif of_guide is None:
            pyro.sample("z", dist.Normal(DATA[INDEX] / 2, 0.5**0.5))
        else:
            with of_guide() as i:
                pyro.sample("z", dist.Normal(DATA[i] / 2, 0.5**0.5))

    return model, guide


CALLS = [
    TraceSGVB_ELBO().loss,
    TraceIWAE_ELBO(2).loss,
    TraceSIS_ELBO(2).loss,
    TraceRaoBlackwell_ELBO().loss,
    evidence,
]


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize(
    ("of_model", "of_guide", "match"),
    [
        (MINIBATCH, plate(4), r"'data' \(4\) of the guide .* 'data' \(4 of 100\) of the model"),
        (MINIBATCH, plate(50, subsample=INDEX), r"\(4 of 50\) of the guide .* \(4 of 100\) of the"),
        (
            plate(4),
            plate(6, subsample=INDEX),
            r"\(4 of 6\) of the guide .* \(4\) of the model|size 4",
        ),
        (MINIBATCH, plate(4, name="d"), r"'d' \(4\) of the guide .* 'data' \(4 of 100\) of the m"),
        (
            MINIBATCH,
            plate(100, subsample=INDEX, name="d"),
            r"'d' \(4 of 100\) .* 'data' \(4 of 100",
        ),
        (plate(4), plate(100, subsample=INDEX, name="d"), r"'d' \(4 of 100\) .* 'data' \(4\) of"),
        (MINIBATCH, None, r"no plate of the guide and in plate 'data' \(4 of 100\) of the model"),
    ],
)
def test_other_plates_than_the_models_are_refused(of_model, of_guide, match, validated):
    pair = programs(of_model, of_guide)
    for call in CALLS:
        with pyro.validation_enabled(validated), pytest.raises(ValueError, match=match):
            call(*pair)


def test_sequential_plates_too():
    pair = programs(MINIBATCH, plate(4), sequential=True)
    for call in CALLS:
        with pytest.raises(ValueError, match=r"site 'z_0' lies in plate 'data' \(4\) of the guide"):
            call(*pair)


def test_a_single_datum_without_its_plate():
    def model():
        with pyro.plate("data", 100, subsample=INDEX[:1]) as i:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=DATA[i])

    def guide():
        pyro.sample("z", dist.Normal(DATA[0] / 2, 0.5**0.5))

    for call in CALLS:
        with pytest.raises(ValueError, match=r"no plate of the guide.*\(1 of 100\)"):
            call(model, guide)


@pytest.mark.parametrize("sequential", [True, False])
def test_the_same_minibatch_has_the_exact_evidence(sequential):
    pair = programs(MINIBATCH, MINIBATCH, sequential)
    exact = 25 * dist.Normal(0.0, 2**0.5).log_prob(DATA[INDEX]).sum()
    assert TraceIWAE_ELBO(2).loss(*pair) == pytest.approx(-exact.item(), rel=1e-5)
