"""The options of all judges, and the programs' arguments of the same names."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_mcvae import (
    log_evidence,
    log_evidence_loader,
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


def test_an_argument_that_is_given_by_position_is_no_option():
    result = log_evidence(model, guide, X, 0.7, seed=1, model_kwargs={}, num_particles=5)
    assert torch.allclose(result.log_evidence, exact(0.7, 1.0))

    def plain(x, seed):
        model(x, seed)

    result = log_evidence(plain, lambda x, seed: guide(x, seed), X, 0.7, seed=1, num_particles=5)
    assert torch.allclose(result.log_evidence, exact(0.7, 1.0))


@pytest.mark.parametrize("judge", [log_evidence, refine, report, sandwich])
def test_a_name_that_both_have_is_refused(judge):
    message = rf"'seed' is an option of {judge.__name__} and an argument of the model: .*model_kwa"
    with pytest.raises(ValueError, match=message):
        judge(model, guide, X, seed=3)
    with pytest.raises(ValueError, match=r"'joint' is an option .* argument of the guide"):
        judge(lambda x: model(x), lambda x, joint=None: guide(x), X, joint=None)


def test_a_module_says_what_it_takes():
    class Network(nn.Module):
        def forward(self, x, schedule=None):
            model(x)

    with pytest.raises(ValueError, match="'schedule' is an option of report and an argument"):
        report(Network(), lambda x: guide(x), X, schedule=2)
    result = report(
        Network(), lambda x, **_: guide(x), X, model_kwargs={"schedule": 1}, num_particles=5
    )
    assert torch.allclose(result.guide.log_evidence, exact(0.0, 1.0))


def test_other_keywords_are_the_programs():
    result = log_evidence(lambda y: model(y), lambda y: guide(y), y=X, num_particles=5)
    assert torch.allclose(result.log_evidence, exact(0.0, 1.0))
    with pytest.raises(TypeError, match="num_particels"):
        log_evidence(model, guide, X, num_particels=5)
    with pytest.raises(TypeError, match=r"log_evidence has no option 'y': .*model_kwargs"):
        log_evidence(model, guide, X, model_kwargs={}, y=5)
    with pytest.raises(ValueError, match=r"model_kwargs must be a dict .* got 3"):
        log_evidence(model, guide, X, model_kwargs=3)
    with pytest.raises(TypeError, match="argument 'y'"):
        log_evidence_loader(model, guide, [X], y=5)
