"""
Discrete guides: value and gradient are those of the sum over all values.

Exactly if all values are summed, by every objective that sums, and in the mean if some are drawn.
"""

import itertools
from dataclasses import replace

import pyro
import pytest
import torch
from pyro import poutine

from pyro_mcvae import (
    MALA,
    NVIL,
    REBAR,
    RELAX,
    ULA,
    CompiledELBO,
    IndependentDraw,
    LeaveOneOut,
    SummedMean,
    TraceAIS_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSIS_ELBO,
)
from pyro_mcvae.programs.types import LeadingDimsError
from tests.cases import some_slow
from tests.elbos.discrete_programs import ALL, BEHIND, COUNTABLE, PROGRAMS, take_gradients

LOOPED = "gru", "branches"  # which can have no slots side by side
# SIS and AIS draw a site that all data share.
NO_ROWS = ("subsampled",)
SUMS = {
    "all": lambda: TraceRaoBlackwell_ELBO(ALL),
    "looped": lambda: TraceRaoBlackwell_ELBO(27, num_particles=2, vectorize_particles=False),
    "sis": lambda: TraceSIS_ELBO(2, ULA(0.1), num_categories=ALL),
    "ais": lambda: TraceAIS_ELBO(1, MALA(0.1), num_categories=ALL),
}


def step(elbo, program):
    """The loss and its gradients, in one vector with a name for each part."""
    loss = elbo.loss_and_grads(program.model, program.guide)
    return {"loss": torch.tensor(loss), **take_gradients()}


def exact(program):
    loss, grads = program.exact()
    return {"loss": torch.tensor(loss), **grads}


SLOW_SUMS = "members-of-turns", "belief-net", "softmax", "nested-from-the-left"


# Each second program with the sum over slots in dims, the others with one of the rest in turn.
def is_quick(i, kind):
    return kind == ("all" if i % 2 == 0 else list(SUMS)[1 + i // 2 % 3])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(n, k, marks=() if is_quick(i, k) and n not in SLOW_SUMS else pytest.mark.slow)
        for i, n in enumerate(PROGRAMS)
        for k in SUMS
        if n not in NO_ROWS or k in ("all", "looped")
    ],
)
def test_the_sum_over_all_values_is_exact(name, kind):
    """Without continuous latents, all bounds are the same."""
    program, elbo = PROGRAMS[name], SUMS[kind]()
    wanted = exact(program)
    result = step(elbo, program)
    for key, value in wanted.items():
        torch.testing.assert_close(result[key], value)
    if kind == "all":
        total = -elbo.bounds(program.model, program.guide).total
        torch.testing.assert_close(total, wanted["loss"])


@pytest.mark.parametrize("name", ["convolution", *LOOPED])
def test_loops_are_refused_where_particles_have_to_be_vectorised(name):
    program, elbo = PROGRAMS[name], TraceRaoBlackwell_ELBO(ALL, vectorize_particles=True)
    if name in LOOPED:
        with pytest.raises(LeadingDimsError, match="slots"):
            elbo.loss(program.model, program.guide)
    else:
        assert elbo.loss(program.model, program.guide) == pytest.approx(program.exact()[0])


@pytest.mark.parametrize("name", some_slow(["convolution", "gru"], "gru"))
def test_a_recorded_step_is_the_plain_one(name):
    program = PROGRAMS[name]
    wanted = exact(program)
    compiled = CompiledELBO(TraceRaoBlackwell_ELBO(ALL), backend="eager")
    for _ in range(3):
        torch.testing.assert_close(step(compiled, program), wanted)


class Prediction(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(-3.0))

    def forward(self, given):
        return self.value.expand(4, 1)


def control(relaxed, given):
    """A fixed control variate that is far from zero."""
    weight = torch.linspace(-2.0, 3.0, relaxed.shape[-1])
    return (relaxed**2 @ weight).sin() * 3.0 + relaxed[..., 0]


ESTIMATORS = {
    "k1": dict,
    "k1-plus": lambda: {"baseline": IndependentDraw()},
    "k0": lambda: {"num_categories": 0},
    "k1-loo": lambda: {"num_samples": 2, "baseline": LeaveOneOut()},
    "budget2": lambda: {"budget": 2},
    "k1-summed": lambda: {"baseline": SummedMean()},
    "k2-n2": lambda: {"num_categories": 2, "num_samples": 2},
    "k1-exact-entropy": lambda: {"entropy": "exact"},
    "k0-n3": lambda: {"num_categories": 0, "num_samples": 3},
    "k0-plus": lambda: {"num_categories": 0, "baseline": IndependentDraw()},
}
LEARNED = {
    "nvil": lambda: {"baseline": NVIL(Prediction())},
    "relax": lambda: {"baseline": RELAX(lambda y, x: control(y, x))},
    "rebar": lambda: {"baseline": REBAR(lambda y, x: control(y, x), temperature=0.7, scale=0.5)},
}
WITH_INPUT = "single", "dependent", "one-hot", "masked", "scaled"


def with_input(program):
    def guide():
        given = {"mcvae": {"baseline_input": torch.zeros(4)}}
        with poutine.infer_config(config_fn=lambda site: given):
            program.guide()

    return replace(program, guide=guide)


def assert_means(program, elbo, steps=12, sigmas=6.5):
    wanted = exact(program)
    runs = []
    for i in range(steps):
        with pyro.validation_enabled(i == 0):
            runs.append(step(elbo, program))
    for key, truth in wanted.items():
        result = torch.stack([run[key] for run in runs])
        error, off = result.std(0) / steps**0.5, (result.mean(0) - truth).abs()
        assert (off <= sigmas * error + 1e-9).all(), f"{key}: off by {off}, error {error}"


# The programs without the sum over slots above with one estimator, and "dependent" with every third
# one; the product is slow.
ALL_PROGRAMS = {**PROGRAMS, **COUNTABLE, "behind": BEHIND}
QUICK = {
    (n, list(ESTIMATORS)[i // 2 % len(ESTIMATORS)])
    for i, n in enumerate(ALL_PROGRAMS)
    if i % 2 or n not in PROGRAMS
}
SLOW = "negative-binomial", "branches", "reshaped"  # "gru" is another one that is looped over
QUICK = {(n, e) for n, e in QUICK if n not in SLOW}
QUICK |= {("dependent", e) for e in list(ESTIMATORS)[::3]}
# Each estimator is left with another program.
QUICK -= {
    *(("one-hot", "k1"), ("reversed", "k0"), ("scaled-by-datum", "k1"), ("meeting", "k0")),
    *(("sequential", "k2-n2"), ("belief-net", "k2-n2"), ("convolution", "budget2")),
    *(
        ("nested-from-the-left", "k0-plus"),
        ("design", "k1-summed"),
        ("poisson", "k1-exact-entropy"),
    ),
}
QUICK |= {("outside", "k0")}  # one draw of each element, and costs outside their plate
PAIRS = [*itertools.product(ALL_PROGRAMS, ESTIMATORS)]


def quick(cases, chosen):
    slow = pytest.mark.slow
    return [pytest.param(*c, marks=() if c in chosen else slow) for c in cases]


@pytest.mark.parametrize(("name", "estimator"), quick(PAIRS, QUICK))
def test_the_mean_is_the_exact_sum(name, estimator):
    # Rare draws: the standard error of 60 steps was off by more than any bound on it allows.
    count, steps = (1, 300) if name in (*LOOPED, "reshaped") else (200, 12)
    elbo = TraceRaoBlackwell_ELBO(num_particles=count, **ESTIMATORS[estimator]())
    assert_means(ALL_PROGRAMS[name], elbo, steps)


@pytest.mark.parametrize(
    ("name", "k", "kind"),
    quick(
        itertools.product(WITH_INPUT, (0, 1, 2), LEARNED),
        [("single", 0, "nvil"), ("dependent", 1, "relax"), ("single", 0, "rebar")],
    ),
)
def test_learned_control_variates_leave_the_mean(name, kind, k):
    elbo = TraceRaoBlackwell_ELBO(k, num_particles=500, **LEARNED[kind]())
    assert_means(with_input(PROGRAMS[name]), elbo)


@pytest.mark.slow
def test_a_site_that_all_data_share_is_drawn_with_its_score():
    """Once a step, around the sums of the data's own sites."""
    elbo = TraceSIS_ELBO(1, ULA(0.1), num_categories=ALL)
    assert_means(PROGRAMS["subsampled"], elbo, steps=120, sigmas=4.5)


@pytest.mark.parametrize("estimator", ["budget2", "k1-plus"])
def test_vectors_with_too_many_values_to_list(estimator, monkeypatch):
    monkeypatch.setattr("pyro_mcvae.programs.supports._MAX_JOINT", 1)
    program = PROGRAMS["vectors"]
    assert_means(program, TraceRaoBlackwell_ELBO(num_particles=400, **ESTIMATORS[estimator]()))
    with pytest.raises(ValueError, match=r"guide site 'b'.*too many values to list.*pass a finite"):
        TraceRaoBlackwell_ELBO(ALL).loss(program.model, program.guide)
