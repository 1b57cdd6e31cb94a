"""Discrete latents that the model enumerates: summed in the weights of every objective."""

import math

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO

from pyro_mcvae import TraceSGVB_ELBO
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.sites import is_latent
from tests.elbos.enumerated_programs import PROGRAMS, brute_force

programs = pytest.mark.parametrize("name", PROGRAMS)
vectorized = pytest.mark.parametrize("vectorize", [False, True], ids=["loop", "vectorized"])


def gradients(elbo, model, guide):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    loss = elbo.loss_and_grads(model, guide)
    found = dict(pyro.get_param_store().named_parameters())
    return loss, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in found.items()}


@programs
def test_the_elbo_is_that_of_trace_enum(name):
    program = PROGRAMS[name]
    theirs = gradients(
        TraceEnum_ELBO(max_plate_nesting=program.nesting), program.model, program.guide
    )
    elbo = TraceSGVB_ELBO(analytic_kl=False)
    ours = gradients(elbo, program.model, program.guide)
    assert math.isclose(theirs[0], ours[0], rel_tol=1e-10)
    assert theirs[1].keys() == ours[1].keys()
    for site, grad in theirs[1].items():
        assert torch.allclose(grad, ours[1][site], rtol=1e-8, atol=1e-10)


@programs
@vectorized
def test_log_weights_are_sums_over_all_states(name, vectorize):
    program = PROGRAMS[name]
    sampler = ParticleSampler(2, vectorize, math.inf)
    sample = sampler.sample(Programs(program.model, program.guide, (), {}))
    assert sample.log_weight.shape == (2, *program.per_datum)
    shared = sum((-t.log_prob if t.in_guide else t.log_prob).sum() for t in sample.global_terms())
    run = sample.runs[0 if vectorize else 1]
    latents = {}
    for site in filter(is_latent, run.guide_trace.nodes.values()):
        drawn = site["value"][1] if vectorize else site["value"]
        depth = program.nesting + site["fn"].event_dim
        latents[site["name"]] = drawn.reshape(drawn.shape[max(0, drawn.dim() - depth) :])
    with poutine.condition(data=latents):
        log_q = poutine.trace(program.guide).get_trace().log_prob_sum()
    expected = brute_force(program.model, latents) - log_q
    assert torch.allclose(sample.log_weight[1].sum() + shared, expected, rtol=1e-10)
