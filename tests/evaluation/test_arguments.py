"""Every argument of what evaluation/ and baselines/ export, wrong in every way that we know."""

import inspect
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_mcvae import (
    HMC,
    ULA,
    LinearSchedule,
    MonteCarloEM,
    TraceIWAE_ELBO,
    WakeSleep,
    log_evidence,
    refine,
    report,
    sandwich,
    to_inference_data,
)
from pyro_mcvae.evaluation.options import Options

X = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
NAN, OBJECT = math.nan, object()


def model(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def guide(x):
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(x / 2, 0.8))


EVALUATORS = {
    log_evidence: log_evidence,
    refine: refine,
    report: report,
    sandwich: sandwich,
}
evaluators = pytest.mark.parametrize(
    "evaluator", list(EVALUATORS.values()), ids=[f.__name__ for f in EVALUATORS]
)

COUNTS = ["5", None, -1, NAN, 2.5, True, torch.tensor([1, 2]), [3]]
FLAGS = ["yes", 2, NAN, torch.tensor([True, False])]
# Argument: wrong values, and what the message says beside the value.
WRONG = {
    "num_particles": ([*COUNTS, 0], "num_particles must be an int of at least 1"),
    "num_samples": ([*COUNTS, 0], "num_samples must be an int of at least 1"),
    "num_simulations": ([*COUNTS, 0], "num_simulations must be an int of at least 1"),
    "num_transitions": (COUNTS, "num_transitions must be an int of at least 0"),
    "warmup": (COUNTS, "warmup must be an int of at least 0"),
    "chunk_size": ([0, *(c for c in COUNTS if c is not None)], "chunk_size must be an int"),
    "schedule": (
        ["linear", OBJECT, HMC(), {"a": 1}, LinearSchedule, "5", ["a"]],
        "schedule must be a Schedule such as LinearSchedule",
    ),
    "kernel": (["hmc", 5, HMC, OBJECT, LinearSchedule(2), NAN], r"kernel .*such as HMC\(\)"),
    "coordinates": (["values", None, 3], "coordinates must be 'noise', 'latent' or 'whitened'"),
    "joint": (FLAGS, "joint must be True, False or None"),
    "vectorize_particles": (FLAGS, "vectorize_particles must be True, False or None"),
    "strict_enumeration_warning": ([*FLAGS, None], "strict_enumeration_warning must be True or"),
    "progress": (FLAGS, "progress must be True, False or None"),
    "keep_log_weight": ([*FLAGS, None], "keep_log_weight must be True or False"),
    "max_plate_nesting": (["1", None, -1, NAN, 2.5, -math.inf, True], "max_plate_nesting must be"),
    "seed": (
        ["5", -1, NAN, 2.5, True, torch.tensor([1, 2]), 1 << 32],
        "seed must be an int from 0",
    ),
    "to_args": (["x", 5], "to_args must be a function or None"),
}


def shown(value):
    """The beginning of a value in a message."""
    return repr(value)[:8]


@pytest.mark.parametrize("function", list(EVALUATORS), ids=[f.__name__ for f in EVALUATORS])
def test_a_wrong_value_is_named(function):
    own = inspect.signature(function).parameters
    shared = Options.__dataclass_fields__
    for name, (values, message) in WRONG.items():
        if name not in own and name not in shared:
            continue
        for value in values:
            with pytest.raises(ValueError, match=message) as error:
                EVALUATORS[function](model, guide, X, **{name: value})
            assert shown(value) in str(error.value), (name, value)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (0, "num_steps must be an int of at least 1, got 0"),
        (-1, "num_steps must be an int of at least 1, got -1"),
        (True, "num_steps must be an int of at least 1, got True"),
        (NAN, "schedule must be a Schedule .* got nan"),
        (2.5, "schedule must be a Schedule .* got 2.5"),
        ([], "must increase from 0 to 1"),
        ([0, 0.5], r"must increase from 0 to 1, .* got \[0.0, 0.5\]"),
        (torch.tensor([[0.0, 1.0]]), r"must increase from 0 to 1, .* got \[\[0.0, 1.0\]\]"),
        (torch.tensor([0.0, NAN, 1.0]), "must increase from 0 to 1"),
        (torch.tensor([0.0, 0.7, 0.3, 1.0]), "must increase from 0 to 1"),
    ],
)
def test_schedules_that_are_none(schedule, message):
    for evaluator in (log_evidence, refine, report, sandwich):
        with pytest.raises(ValueError, match=message):
            evaluator(model, guide, X, schedule=schedule)


NO_PROGRAMS = {
    "no model": ((None, guide), "model"),
    "no guide": ((model, None), "guide"),
    "a string": ((model, "guide"), "guide"),
    "a class": ((model, AutoNormal), "guide"),
    "an objective": ((model, TraceIWAE_ELBO()), "guide"),
    "an SVI": ((SVI(model, guide, pyro.optim.Adam({}), Trace_ELBO()), guide), "model"),
}


@pytest.mark.parametrize(
    ("evaluator", "name"),
    [
        (evaluator, name)
        for evaluator in EVALUATORS
        for name, (wrong, _) in NO_PROGRAMS.items()
        if evaluator is not refine or callable(wrong[1])  # others are arguments of the model
    ],
)
def test_what_is_no_program(evaluator, name):
    wrong, role = NO_PROGRAMS[name]
    with pytest.raises(ValueError, match=f"the {role} must be a Pyro program"):
        evaluator(*wrong, X)


@pytest.mark.parametrize("first", [None, "guide"])
def test_refine_passes_what_is_no_guide_to_the_model(first):
    arguments = (first, X) if first else (X,)

    def model(*args):
        assert args == arguments
        with pyro.plate("data", len(X)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X)

    draws = refine(model, first, X, num_samples=100, seed=0)
    assert draws["z"].shape == (100, len(X))


@evaluators
@pytest.mark.filterwarnings("ignore:Found:UserWarning")  # Pyro's, of the same thing
def test_programs_in_the_wrong_places(evaluator):
    with pytest.raises(ValueError, match="guide observes site 'x': pass the model first"):
        evaluator(guide, model, X)


@pytest.mark.filterwarnings("ignore:Found:UserWarning")
def test_programs_in_the_wrong_places_with_a_point_mass_as_data():
    def likelihood():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        point = dist.Delta(torch.tensor(0.0), log_density=-0.5 * (z - 1).square())
        pyro.sample("x", point, obs=torch.tensor(0.0))

    with pytest.raises(ValueError, match="guide observes site 'x': pass the model first"):
        log_evidence(lambda: pyro.sample("z", dist.Normal(0.5, 0.7)), likelihood)


def test_a_model_that_observes_nothing_is_reported(caplog):
    def prior(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))

    result = log_evidence(prior, guide, X)
    assert bool((result.log_evidence.abs() < 4 * result.standard_error).all())
    assert "the model observes nothing, so its log evidence is 0" in caplog.text


def bernoulli(probability, obs):
    def program(x):
        with pyro.plate("data", len(x)):
            k = pyro.sample("k", dist.Bernoulli(torch.full((len(x),), probability)))
            if obs:
                pyro.sample("x", dist.Normal(k, 1.0), obs=x)

    return program


@pytest.mark.parametrize(
    ("evaluator", "options"),
    [
        (log_evidence, {"schedule": 2}),
        (log_evidence, {"kernel": HMC()}),
        (report, {"schedule": 2}),
        (refine, {"schedule": 2}),
        (refine, {"num_transitions": 2}),
        (sandwich, {}),
    ],
)
def test_discrete_latents_have_a_remedy_that_applies(evaluator, options):
    remedy = r"leave out schedule, kernel and num_transitions \(.*sandwich.*: use log_evidence\)"
    with pytest.raises(ValueError, match=rf"the guide's site 'k' is discrete: {remedy}"):
        evaluator(bernoulli(0.3, True), bernoulli(0.5, False), X, **options)


def no_plate(obs):
    def program(x):
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0))
        if obs:
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    return program


@evaluators
@pytest.mark.parametrize(
    ("model", "guide"),
    [(no_plate(True), no_plate(False)), (model, no_plate(False)), (no_plate(True), guide)],
    ids=["both", "guide", "model"],
)
@pytest.mark.filterwarnings("ignore:Found plate:UserWarning")  # Pyro's, of the same thing
def test_a_missing_plate_names_the_site(evaluator, model, guide):
    """With validation off its dims are summed: ``tests/elbos/test_undeclared_dims.py``."""
    with pytest.raises(ValueError, match=r"(at |)site ['\"][xz]['\"](.|\n)*pyro.plate"):
        evaluator(model, guide, X)


def test_functions_that_make_arguments_return_them():
    with pytest.raises(ValueError, match="the result of to_args, is None"):
        sandwich(model, guide, X, to_args=lambda given: None)


# What comes of it


def test_inference_data_take_draws():
    for given, message in [
        ({"z": X}, "draws must be the PosteriorDraws that refine returns, got dict"),
        (None, "draws must be the PosteriorDraws .* got NoneType"),
    ]:
        with pytest.raises(ValueError, match=message):
            to_inference_data(given)


@pytest.mark.slow
def test_the_worst_are_counted():
    result = report(model, guide, X, num_particles=5)
    for count in (0, -1, "a", None, 2.5):
        with pytest.raises(ValueError, match="count must be an int of at least 1, got"):
            result.worst(count)


# Baselines


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (WakeSleep, "num_particles"),
        (WakeSleep, "num_dreams"),
        (MonteCarloEM, "num_steps"),
        (MonteCarloEM, "num_particles"),
        (MonteCarloEM, "updates_per_draw"),
    ],
)
def test_baselines_are_counted(cls, name):
    for value in [*COUNTS, 0]:
        with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, got"):
            cls(**{name: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WakeSleep(dream_args="x"), "dream_args must be a function .* got 'x'"),
        (lambda: MonteCarloEM(kernel="hmc"), "kernel must be a Kernel .* got 'hmc'"),
        (lambda: MonteCarloEM(kernel=HMC), "kernel must be a Kernel .* got <class"),
        (lambda: MonteCarloEM(kernel=ULA()), "leaves the posterior invariant, which ULA does not"),
        (lambda: MonteCarloEM(coordinates="x"), "coordinates must be one of noise, latent"),
        (lambda: MonteCarloEM(persistent="yes"), "persistent must be True or False, got 'yes'"),
        (lambda: MonteCarloEM(joint=2), "joint must be True or False, got 2"),
        (lambda: WakeSleep(max_plate_nesting="1"), "max_plate_nesting must be .* got '1'"),
        (lambda: MonteCarloEM(max_plate_nesting=-1), "max_plate_nesting must be .* got -1"),
    ],
)
def test_baselines_name_what_they_do_not_know(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("cls", [WakeSleep, MonteCarloEM])
def test_baselines_name_what_programs_lack(cls):
    for programs, message in [
        ((model, None), "the guide must be a Pyro program"),
        ((no_plate(True), no_plate(False)), r"site ['\"]z['\"]"),
        ((bernoulli(0.3, True), guide), "site 'k' of the model is neither observed nor drawn"),
    ]:
        with pytest.raises(ValueError, match=message):
            cls().loss_and_grads(*programs, X)
    with pytest.raises(ValueError, match="empty minibatch"):
        cls().loss_and_grads(model, guide, X[:0])
