"""The options of all evaluators, and the programs' arguments of the same names."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    log_evidence,
    refine,
    report,
    sandwich,
)

X = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)


def model(x, seed=0.0, *, num_particles=1.0):
    """Normal data of mean ``seed`` whose latents have the variance ``num_particles``."""
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(seed, math.sqrt(num_particles)))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def guide(x, seed=0.0, *, num_particles=1.0):
    variance = num_particles / (1 + num_particles)
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(seed + variance * (x - seed), math.sqrt(variance)))


def exact(seed, variance):
    return dist.Normal(seed, math.sqrt(1 + variance)).log_prob(X)


def test_arguments_of_the_names_of_options_reach_the_programs():
    """The guide is the posterior of these arguments alone, so that every weight is the evidence."""
    given = {"seed": 0.7, "num_particles": 3.0}
    result = log_evidence(model, guide, X, model_kwargs=given, seed=1, num_particles=5)
    assert result.num_particles == 5
    assert torch.allclose(result.log_evidence, exact(0.7, 3.0))
    again = log_evidence(model, guide, X, model_kwargs=given, seed=1, num_particles=5)
    assert torch.equal(result.log_evidence, again.log_evidence)


@pytest.mark.parametrize("evaluator", [log_evidence, refine, report, sandwich])
def test_keywords_that_are_no_options_are_named(evaluator):
    message = rf"{evaluator.__name__} has no option 'y': .*model_kwargs={{'y'"
    with pytest.raises(TypeError, match=message):
        evaluator(model, guide, X, y=5)
    with pytest.raises(ValueError, match=r"model_kwargs must be a dict .* got 3"):
        evaluator(model, guide, X, model_kwargs=3)
