"""Evaluators whose chains keep the discrete draws of a guide, and move the continuous ones."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import MALA, ULA, log_evidence, refine, report, sandwich
from tests.elbos.slot_programs import PROGRAMS, data, labels_joint, labels_model, param
from tests.estimates import assert_mean

KNOWN = [name for name, program in PROGRAMS.items() if program.evidence]


@pytest.mark.parametrize("coordinates", ["noise", pytest.param("latent", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KNOWN)
def test_the_mean_weight_is_the_evidence(name, coordinates):
    program = PROGRAMS[name]
    kernel = ULA(0.05) if coordinates == "noise" else MALA(0.1)
    result = log_evidence(
        program.model,
        program.guide,
        num_particles=1000,
        schedule=3,
        kernel=kernel,
        coordinates=coordinates,
        keep_log_weight=True,
        seed=0,
    )
    evidence = program.evidence().detach()
    assert_mean((result.log_weight - evidence).exp(), torch.ones_like(evidence))


def wide_guide(x):
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Categorical(torch.ones(3) / 3))
        pyro.sample("z", dist.Normal(x / 2, 0.9))


@pytest.mark.slow
def test_chains_one_by_one_hold_their_draws():
    program = PROGRAMS["labels"]
    result = log_evidence(
        program.model,
        program.guide,
        num_particles=60,
        schedule=3,
        kernel=MALA(0.1),
        vectorize_particles=False,
        keep_log_weight=True,
        seed=0,
    )
    evidence = program.evidence().detach()
    assert_mean((result.log_weight - evidence).exp(), torch.ones_like(evidence))


def test_refined_draws_have_the_posterior_of_labels():
    draws = refine(
        labels_model, wide_guide, data(3), num_samples=800, num_particles=20, schedule=5, warmup=5
    )
    exact = labels_joint(data(3)).softmax(-1).detach()
    assert draws["y"].dtype == torch.long
    result = torch.nn.functional.one_hot(draws["y"], 3).to(exact.dtype)
    assert_mean(result, exact)
    x, variance = data(3), 1 / (1 / 0.8**2 + 1 / 0.6**2)
    loc = variance * (param("mu", 3)[draws["y"]] / 0.8**2 + x / 0.6**2)
    assert_mean(draws["z"] - loc.detach(), torch.zeros(3))


def discrete_global(is_model):
    def program(x):
        level = pyro.sample("level", dist.Categorical(torch.tensor([0.3, 0.7])))
        with pyro.plate("data", len(x)):
            if is_model:
                z = pyro.sample("z", dist.Normal(level.to(x) * 1.5, 1.0).expand([len(x)]))
                pyro.sample("x", dist.Normal(z, 1.0), obs=x)
            else:
                pyro.sample("z", dist.Normal(x / 2, 0.8))

    return program


def test_a_latent_of_all_data_is_held():
    x = torch.tensor([0.4, 1.9])
    fn = dist.Normal(torch.tensor([0.0, 1.5]), 2**0.5)
    exact = (torch.tensor([0.3, 0.7]).log() + fn.log_prob(x.unsqueeze(-1)).sum(0)).logsumexp(0)
    result = log_evidence(
        discrete_global(True),
        discrete_global(False),
        x,
        num_particles=1000,
        schedule=4,
        warmup=4,
        keep_log_weight=True,
        seed=0,
    )
    assert_mean((result.log_weight - exact).exp(), torch.ones(()))


def knowing_guide(x):
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Categorical(logits=labels_joint(x)))
        pyro.sample("z", dist.Normal(x / 2, 0.9))


@pytest.mark.slow
def test_the_evidence_of_simulated_data_lies_between():
    result = sandwich(labels_model, knowing_guide, data(3), schedule=20, num_particles=20, seed=0)
    assert -0.05 < result.mean_gap < 0.15


@pytest.mark.slow
def test_a_report_of_discrete_latents_takes_chains():
    program = PROGRAMS["labels"]
    result = report(program.model, program.guide, num_particles=300, schedule=10, warmup=4, seed=0)
    assert result.chains is not None
    evidence = program.evidence().detach()
    assert (result.evidence.log_evidence - evidence).abs().max() < 0.2
