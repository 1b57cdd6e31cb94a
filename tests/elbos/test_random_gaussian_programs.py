"""A guide that is the exact posterior: every objective is the evidence, in each single draw."""

import functools

import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_mcvae import (
    MALA,
    ULA,
    RandomWalk,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceRenyi_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    log_evidence,
)
from tests.cases import every
from tests.estimates import assert_mean, values
from tests.random_gaussian_programs import minibatch, solved

OBJECTIVES = {
    "sgvb": lambda: TraceSGVB_ELBO(analytic_kl=False),
    "sgvb, vectorised": lambda: TraceSGVB_ELBO(3, analytic_kl=False, vectorize_particles=True),
    "rb": TraceRaoBlackwell_ELBO,
    "iwae": lambda: TraceIWAE_ELBO(4),
    "iwae, looped": lambda: TraceIWAE_ELBO(3, vectorize_particles=False),
    "iwae, joint": lambda: TraceIWAE_ELBO(4, joint=True),
    "renyi": lambda: TraceRenyi_ELBO(0.5, num_particles=4),
    "ais": lambda: TraceAIS_ELBO(3),
    "ais, latent": lambda: TraceAIS_ELBO(2, MALA(0.1), coordinates="latent"),
    "ais, random walk": lambda: TraceAIS_ELBO(2, RandomWalk(0.1)),
}


program = functools.cache(solved)
# Programs of few and of many sites; those beyond the first ones are run with the slow tests.
FEW, MANY = (15, 18), (1, 11, 13, 16, 22, 24, 25, 30, 33)
SLOW = pytest.mark.slow
SEEDS = [*FEW, *(pytest.param(s, marks=pytest.mark.slow) for s in MANY)]
MINIBATCHES = [3, *(pytest.param(s, marks=pytest.mark.slow) for s in (9, 16))]


@pytest.mark.parametrize(
    ("seed", "looped", "objective"),
    [
        pytest.param(s, looped, o, marks=() if s == FEW[i % 2] and looped == i % 2 else SLOW)
        for s, looped in [(15, False), (18, True), *((s, bool(s % 2)) for s in MANY)]
        for i, o in enumerate(OBJECTIVES)
    ],
)
def test_at_the_posterior_every_draw_is_the_evidence(seed, looped, objective):
    model, guide, exact = program(seed).looped(seed) if looped else program(seed)
    elbo = OBJECTIVES[objective]()
    assert elbo.loss_and_grads(model, guide) == pytest.approx(-exact, rel=1e-8)


@pytest.mark.parametrize("objective", every(2, [n for n in OBJECTIVES if n != "iwae, joint"]))
@pytest.mark.parametrize("looped", [True], ids=["loops"])
@pytest.mark.parametrize("seed", MINIBATCHES)
def test_on_minibatches_at_the_posterior_every_draw_is_the_scaled_evidence(seed, looped, objective):
    programs = minibatch(seed)
    model, guide, exact = programs.looped(seed) if looped else programs
    elbo = OBJECTIVES[objective]()
    assert elbo.loss_and_grads(model, guide) == pytest.approx(-exact, rel=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_judge_and_an_auto_guide_at_the_posterior(seed):
    model, guide, exact = program(seed)
    result = log_evidence(model, guide, num_particles=4, progress=False)
    assert result.total.item() == pytest.approx(exact, rel=1e-8)
    auto = AutoMultivariateNormal(model)
    auto()
    mean, precision, _ = model.gaussian()
    tril = torch.linalg.cholesky(torch.linalg.inv(precision))
    auto.loc.data.copy_(mean)
    auto.scale = tril.diagonal().clone()
    auto.scale_tril = tril / tril.diagonal().unsqueeze(-1)
    for objective in ("sgvb", "iwae", "ais", "ais, latent"):
        loss = OBJECTIVES[objective]().loss(model, auto)
        assert loss == pytest.approx(-exact, rel=1e-8), objective


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "looped"), [*((s, False) for s in FEW + MANY), *((s, True) for s in FEW)]
)
def test_off_the_posterior_means_are_exact(seed, looped):
    programs = program(seed).off(seed)
    exact = programs.elbo()
    programs = programs.looped(seed) if looped else programs
    for elbo in (TraceSGVB_ELBO(), TraceSGVB_ELBO(analytic_kl=False), TraceRaoBlackwell_ELBO()):
        assert_mean(values(elbo, programs, 300), exact)
    for elbo in (
        TraceIWAE_ELBO(3),
        TraceIWAE_ELBO(3, joint=True),
        TraceSIS_ELBO(2),
        TraceSIS_ELBO(2, ULA(0.01), coordinates="latent"),
        TraceAIS_ELBO(2, multi_sample=True),
    ):
        elbo.loss(programs.model, programs.guide)
        assert_mean((values(elbo, programs, 200) - programs.log_evidence).exp(), 1.0)
