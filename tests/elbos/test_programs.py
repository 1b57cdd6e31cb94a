"""Laws of all objectives on programs as users write them: the programs of tests/zoo.py."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormalMessenger

from pyro_mcvae import (
    MALA,
    MonteCarloEM,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)
from tests.zoo import EXAMPLES, GUIDES

PROGRAMS = {**EXAMPLES, **GUIDES}
OBJECTIVES = {
    "sgvb": lambda **k: TraceSGVB_ELBO(num_particles=2, **k),
    "iwae": lambda **k: TraceIWAE_ELBO(num_particles=4, **k),
    "iwae-reparam": lambda **k: TraceIWAE_ELBO(4, gradient_estimator="reparam", **k),
    "rb": lambda **k: TraceRaoBlackwell_ELBO(num_particles=2, **k),
    "sis": lambda **k: TraceSIS_ELBO(2, num_particles=2, **k),
    "sis-reweighted": lambda **k: TraceSIS_ELBO(2, gradient_estimator="reweighted", **k),
    "ais": lambda **k: TraceAIS_ELBO(2, **k),
    "mcem": lambda **k: MonteCarloEM(1, MALA(), num_particles=2, **k),
}
CHAINS = ("sis", "sis-reweighted", "ais", "mcem")
# One of each kind of draws and weights.
FAMILIES = ("sgvb", "iwae", "rb", "sis", "mcem")


def refusal(objective, name):
    """What a chain says of a program that it does not take; None for all others."""
    if objective in CHAINS and name == "auto-delta":
        return "is a point mass"
    if objective == "mcem" and name == "mixture":
        return "discrete"
    if objective in ("sis-reweighted", "mcem") and name == "messenger":
        return "runs both together"
    return None


def cases(objectives, names, quick):
    """All objectives on all programs, of which some are not slow."""
    return pytest.mark.parametrize(
        ("name", "objective"),
        [
            pytest.param(n, o, marks=() if quick(i, j) else pytest.mark.slow)
            for i, n in enumerate(names)
            for j, o in enumerate(objectives)
            if not refusal(o, n)
        ],
    )


PATHWISE = ("sgvb", "iwae-reparam", "rb", "sis")
SMOOTH = [n for n in PROGRAMS if n not in ("mixture", "implicit", "two-independent")]


@cases(PATHWISE, SMOOTH, lambda i, j: i % 4 == j and i % 10 == 0)
def test_the_gradient_is_the_slope_at_the_same_draws(name, objective):
    """Vectorised and looped in turn; looped chains take long, and are slow."""
    example, looped = PROGRAMS[name](), list(PROGRAMS).index(name) % 2 and objective != "sis"
    model, guide = example.model, example.guide
    elbo = OBJECTIVES[objective](vectorize_particles=not looped)
    if objective in CHAINS:
        elbo.eval()  # the step size stays
    elbo.loss(model, guide)  # AutoGuides draw their initial values here
    pyro.set_rng_seed(0)
    elbo.loss_and_grads(model, guide)
    parameters = example.parameters()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    square = sum(float((g**2).sum()) for g in grads)
    assert square > 1e-3
    ends = []
    step = 1e-5 / square**0.5
    with pyro.validation_enabled(False):
        for move in (step, -2 * step):
            for p, g in zip(parameters, grads, strict=True):
                p.data.add_(g, alpha=move)
            pyro.set_rng_seed(0)
            ends.append(elbo.loss(model, guide))
    assert math.isclose((ends[0] - ends[1]) / (2 * step), square, rel_tol=1e-4)


def one_step(elbo, example):
    """The loss and the gradients of all parameters, under one seed."""
    elbo.loss(example.model, example.guide)  # AutoGuides draw their initial values here
    parameters = example.parameters()
    pyro.set_rng_seed(5)
    result = [torch.tensor(elbo.loss_and_grads(example.model, example.guide))]
    for p in parameters:
        result.append(torch.zeros(()) if p.grad is None else p.grad)
        p.grad = None
    return result


SAME = {
    "sgvb": (lambda: TraceSGVB_ELBO(analytic_kl=False), Trace_ELBO),
    "iwae": (lambda: TraceIWAE_ELBO(1), Trace_ELBO),
    "rb": (lambda: TraceRaoBlackwell_ELBO(0), Trace_ELBO),
    "closed form": (TraceSGVB_ELBO, TraceMeanField_ELBO),
    "ais": (
        lambda: TraceAIS_ELBO(1, MALA(0.1), num_particles=3, multi_sample=True),
        lambda: TraceIWAE_ELBO(3, gradient_estimator="reparam"),
    ),
}


def are_same(name, same):
    if same == "closed form":
        with pyro.get_param_store().scope():  # what other files made while they were collected
            return name in EXAMPLES and EXAMPLES[name]().mean_field
    if name == "missing":  # whose masked entries count with their prior
        return same == "ais"
    if same == "ais":  # whose noise is drawn otherwise in some
        return name not in ("auto-delta", "auto-low-rank", "implicit", "mixture", "easy-guide")
    return (name, same) != ("mixture", "rb")


@pytest.mark.parametrize(
    ("name", "same"),
    [
        pytest.param(n, s, marks=() if (i + j) % 20 == 0 else pytest.mark.slow)
        for i, n in enumerate(PROGRAMS)
        for j, s in enumerate(SAME)
        if are_same(n, s)
    ],
)
def test_objectives_that_are_the_same_have_the_same_numbers(name, same):
    """Values and gradients at the same draws, of Pyro's losses and of each other."""
    example, (one, other) = PROGRAMS[name](), SAME[same]
    torch.testing.assert_close(one_step(one(), example), one_step(other(), example))


@cases(OBJECTIVES, PROGRAMS, lambda i, j: (i + j) % 8 == 0 and i % 6 == 3)
def test_bounds_of_the_data_add_up_to_the_loss(name, objective):
    example = PROGRAMS[name]()
    model, guide = example.model, example.guide
    elbo = OBJECTIVES[objective]()
    assert math.isfinite(elbo.loss_and_grads(model, guide))
    grads = [p.grad for p in example.parameters() if p.grad is not None]
    assert all(torch.isfinite(g).all() for g in grads)
    assert any((g != 0).any() for g in grads)
    pyro.set_rng_seed(0)
    loss = elbo.loss(model, guide)
    pyro.set_rng_seed(0)
    bounds = elbo.bounds(model, guide)
    assert math.isclose(bounds.total, -loss, rel_tol=1e-9, abs_tol=1e-9)
    total = (bounds.scale * bounds.per_datum).sum() + bounds.shared
    assert math.isclose(total, bounds.total, rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("name", "objective"), [(n, o) for n in PROGRAMS for o in CHAINS if refusal(o, n)]
)
def test_chains_refuse_programs_that_they_cannot_move(name, objective):
    example = PROGRAMS[name]()
    with pytest.raises(ValueError, match=refusal(objective, name)):
        OBJECTIVES[objective]().loss_and_grads(example.model, example.guide)


@pytest.mark.parametrize("objective", FAMILIES)
def test_a_messenger_guide_counts_global_sites_of_the_model_once(objective):
    def model(factor):
        pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.factor("f", torch.tensor(factor))
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    guide = AutoNormalMessenger(model)
    elbo = OBJECTIVES[objective](vectorize_particles=True)
    elbo.loss(model, guide, 0.0)
    losses = []
    for factor in (4.0, 5.0):
        pyro.set_rng_seed(0)
        losses.append(elbo.loss(model, guide, factor))
    assert math.isclose(losses[0] - losses[1], 1.0, rel_tol=1e-6)
