"""Programs of few states: every objective against sums over all of them."""

import functools
import math

import pyro
import pytest
import torch

from pyro_mcvae import (
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceRenyi_ELBO,
    TraceSGVB_ELBO,
    log_evidence,
)
from tests.estimates import assert_mean, values
from tests.random_discrete_programs import marked, posterior, solved

OBJECTIVES = {
    "sgvb": lambda: TraceSGVB_ELBO(analytic_kl=False),
    "sgvb, vectorised": lambda: TraceSGVB_ELBO(3, analytic_kl=False, vectorize_particles=True),
    "rb 0": lambda: TraceRaoBlackwell_ELBO(0),
    "rb 1": lambda: TraceRaoBlackwell_ELBO(1),
    "rb 2, particles": lambda: TraceRaoBlackwell_ELBO(2, num_particles=2),
    "rb, all": lambda: TraceRaoBlackwell_ELBO(math.inf),
    "iwae": lambda: TraceIWAE_ELBO(4),
    "iwae, looped": lambda: TraceIWAE_ELBO(3, vectorize_particles=False),
    "iwae, joint": lambda: TraceIWAE_ELBO(4, joint=True),
    "renyi": lambda: TraceRenyi_ELBO(0.5, num_particles=4),
}
ENUMERATING = ("sgvb", "rb 1", "iwae", "iwae, looped", "iwae, joint", "renyi")


program = functools.cache(solved)
FEW, MANY = (0, 1), tuple(range(2, 30))
SEEDS = [*FEW, *(pytest.param(s, marks=pytest.mark.slow) for s in MANY)]
# Plates and loops in turn; the others slow.
TURNS = [
    pytest.param(s, looped, marks=() if s in FEW and looped == s % 2 else pytest.mark.slow)
    for s in FEW + MANY
    for looped in (False, True)
]
turns = pytest.mark.parametrize(("seed", "looped"), TURNS)


@turns
def test_at_the_posterior_every_draw_is_the_evidence(seed, looped):
    model, guide, exact = program(seed).looped(seed) if looped else program(seed)
    for name, objective in OBJECTIVES.items():
        assert -objective().loss_and_grads(model, guide) == pytest.approx(exact, rel=1e-8), name
    result = log_evidence(model, guide, num_particles=4, progress=False)
    assert result.total.item() == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_model_enumerates_is_the_evidence(seed):
    model = marked(program(seed).model)
    exact = posterior(model).log_evidence

    def guide() -> None:
        pass

    for name in ENUMERATING:
        assert -OBJECTIVES[name]().loss(model, guide) == pytest.approx(exact, rel=1e-8), name
    result = log_evidence(model, guide, num_particles=4, progress=False)
    assert result.total.item() == pytest.approx(exact, rel=1e-8)


def gradients(elbo, programs) -> torch.Tensor:
    """Of the bound, with respect to the guide's tables."""
    for table in programs.tables():
        table.grad = None
    elbo.loss_and_grads(programs.model, programs.guide)
    return gradients_of(programs)


def gradients_of(programs) -> torch.Tensor:
    zeros = torch.zeros_like
    grads = [zeros(t) if t.grad is None else -t.grad for t in programs.tables()]
    return torch.cat([g.flatten() for g in grads])


def exact_gradients(bound, programs) -> torch.Tensor:
    result = torch.autograd.grad(
        bound, programs.tables(), retain_graph=True, materialize_grads=True, allow_unused=True
    )
    return torch.cat([g.flatten() for g in result])


@turns
def test_off_the_posterior_the_sum_over_all_values_is_exact(seed, looped):
    programs = program(seed).off(seed)
    log_prob, log_weight = programs.log_weights()
    elbo = (log_prob.exp() * log_weight).sum()
    objective = TraceRaoBlackwell_ELBO(math.inf)
    model, guide, _ = programs.looped(seed) if looped else programs
    assert -objective.loss_and_grads(model, guide) == pytest.approx(elbo.item(), rel=1e-8)
    torch.testing.assert_close(gradients_of(programs), exact_gradients(elbo, programs))


@pytest.mark.slow
@pytest.mark.parametrize("seed", FEW + MANY[:9])
def test_off_the_posterior_means_are_exact(seed):
    programs = solved(seed, max_states=100).off(seed)
    log_prob, log_weight = programs.log_weights()
    prob = log_prob.exp()
    elbo = (prob * log_weight).sum()
    of_two = torch.logaddexp(log_weight.unsqueeze(-1), log_weight) - math.log(2)
    iwae = (prob.unsqueeze(-1) * prob * of_two).sum()
    # Entries of states that are hardly ever drawn tell nothing alone: a random direction has all.
    direction = torch.randn(sum(t.numel() for t in programs.tables()), dtype=torch.float64)
    for name, exact in [
        ("sgvb", elbo),
        ("sgvb, vectorised", elbo),
        ("rb 0", elbo),
        ("rb 1", elbo),
        ("rb 2, particles", elbo),
        ("iwae, two", iwae),
        ("iwae, two, looped", iwae),
    ]:
        one_by_one = {"vectorize_particles": False} if "looped" in name else {}
        objective = OBJECTIVES.get(name, lambda k=one_by_one: TraceIWAE_ELBO(2, joint=True, **k))()
        assert_mean(values(objective, programs, 300), exact.item())
        with pyro.validation_enabled(False):  # it costs most of the time, and has passed once
            result = torch.stack([gradients(objective, programs) @ direction for _ in range(300)])
        assert_mean(result, (exact_gradients(exact, programs) @ direction).item())
    for objective in (TraceIWAE_ELBO(3), TraceIWAE_ELBO(2)):
        result = values(objective, programs, 300)
        assert_mean((result - programs.log_evidence).exp(), 1.0)
