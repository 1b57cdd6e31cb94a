"""Discrete latents that the model enumerates: summed in the weights of every objective."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO
from pyro.ops.indexing import Vindex

from pyro_mcvae import (
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
)
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.sites import is_latent
from tests.elbos.enumerated_programs import PROGRAMS, brute_force

programs = pytest.mark.parametrize("name", PROGRAMS)
in_turn = pytest.mark.parametrize(
    ("name", "vectorize"),
    [
        pytest.param(n, v, marks=() if v == i % 2 else pytest.mark.slow)
        for i, n in enumerate(PROGRAMS)
        for v in (False, True)
    ],
)


def gradients(elbo, model, guide):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    loss = elbo.loss_and_grads(model, guide)
    result = dict(pyro.get_param_store().named_parameters())
    return loss, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in result.items()}


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


@in_turn
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


MEANS = torch.tensor([-1.0, 1.5], dtype=torch.float64)
PRIOR = torch.tensor([0.3, 0.7], dtype=torch.float64)
SCALE = 0.8
X = torch.tensor([-0.7, 0.4, 1.9], dtype=torch.float64)


@pytest.mark.slow
def test_global_latents_are_drawn_once_around_minibatches_of_sums():
    def model(subsample):
        with pyro.plate("components", 2):
            mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with pyro.plate("data", 3, subsample=subsample) as index:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            y = pyro.sample("y", dist.Categorical(PRIOR), infer={"enumerate": "parallel"})
            mean = Vindex(mu.unsqueeze(-2))[..., y] + z
            pyro.sample("x", dist.Normal(mean, SCALE), obs=X[index])

    def guide(subsample):
        with pyro.plate("components", 2):
            pyro.sample("mu", dist.Delta(MEANS))
        with pyro.plate("data", 3, subsample=subsample) as index:
            pyro.sample("z", dist.Delta(0.3 * X[index]))

    z = 0.3 * X
    log_prob = dist.Normal(MEANS + z.unsqueeze(-1), SCALE).log_prob(X.unsqueeze(-1))
    joint = (log_prob + PRIOR.log()).logsumexp(-1) + dist.Normal(0.0, 1.0).log_prob(z)
    shared = dist.Normal(0.0, 2.0).log_prob(MEANS).sum()
    for elbo in (TraceSGVB_ELBO(), TraceIWAE_ELBO(2, vectorize_particles=True)):
        for pair in ([0, 1], [1, 2]):
            bounds = elbo.bounds(model, guide, torch.tensor(pair))
            assert torch.allclose(bounds.per_datum, joint[pair], rtol=1e-10)
            assert torch.allclose(bounds.total, shared + 1.5 * joint[pair].sum(), rtol=1e-10)
