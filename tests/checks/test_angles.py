"""Angles that a guide draws on the line: a warning in training, and an error in evaluators."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal

from pyro_mcvae import HMC, TraceIWAE_ELBO, TraceSGVB_ELBO, log_evidence, report
from tests.estimates import called

T = torch.tensor([0.3, -2.0, 3.0], dtype=torch.float64)


def model():
    with pyro.plate("data", 3):
        z = pyro.sample("z", dist.VonMises(torch.zeros(()).double(), 1.0))
        pyro.sample("t", dist.VonMises(z, 2.0), obs=T)


def evidence():
    grid = torch.arange(-10_000, 10_000, dtype=torch.float64)[:, None] * math.pi / 10_000
    joint = dist.VonMises(0.0, 1.0).log_prob(grid) + dist.VonMises(grid, 2.0).log_prob(T)
    return joint.logsumexp(0) + math.log(math.pi / 10_000)


def drawing(fn):
    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", fn.expand([3]))

    return guide


def scaled_beta():
    turn = dist.transforms.AffineTransform(-math.pi, 2 * math.pi)
    return dist.TransformedDistribution(dist.Beta(torch.tensor(1.5).double(), 1.5), [turn])


pi = torch.tensor(math.pi).double()
ROUND = {
    "von Mises": drawing(dist.VonMises(0.0 * pi, 1.0)),
    "uniform": drawing(dist.Uniform(-pi, pi)),
    "scaled": drawing(scaled_beta()),
}
LINE = {
    "normal": drawing(dist.Normal(0.0 * pi, 0.3)),
    "automatic": called(AutoNormal(model, init_scale=0.3)),
    "transformed": drawing(
        dist.TransformedDistribution(
            dist.Normal(4.0 * pi, 0.1), [dist.transforms.AffineTransform(0.0, 1.0)]
        )
    ),
}


@pytest.mark.parametrize("name", ROUND)
def test_guides_on_the_circle_have_the_evidence(name, caplog):
    result = log_evidence(model, ROUND[name], num_particles=4000)
    assert ((result.log_evidence - evidence()).abs() < 4.5 * result.standard_error).all()
    TraceIWAE_ELBO(3).loss(model, ROUND[name])
    assert "turn" not in caplog.text


@pytest.mark.parametrize("name", LINE)
def test_guides_on_the_line_have_none(name, caplog):
    for loss in (TraceSGVB_ELBO(), TraceIWAE_ELBO(3)):
        caplog.clear()
        loss.loss(model, LINE[name])
        assert "site 'z' of the model is an angle (VonMises), whose density" in caplog.text
    for evaluator in (log_evidence, report):
        with pytest.raises(ValueError, match=r"'z' of the model is an angle .*dist.VonMises"):
            evaluator(model, LINE[name], num_particles=10)


def test_point_masses_are_no_matter(caplog):
    TraceSGVB_ELBO().loss(model, AutoDelta(model))
    assert "turn" not in caplog.text


def test_white_coordinates_are_no_circle():
    with pytest.raises(ValueError, match=r"'z' is an angle, which is periodic.*noise"):
        log_evidence(
            model, ROUND["von Mises"], schedule=5, kernel=HMC(), coordinates="whitened", warmup=2
        )
