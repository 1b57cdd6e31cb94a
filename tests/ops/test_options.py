"""Options are fixed when an object is made: assigning one is an error, and changes nothing."""

import copy
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    ULA,
    CompiledELBO,
    EvolutionaryUpdate,
    LinearSchedule,
    MonteCarloELBO,
    MonteCarloEM,
    SigmoidSchedule,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceRenyi_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    WakeSleep,
    local_estimate,
)
from pyro_mcvae.ops.checks import options_of

X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def model():
    with pyro.plate("data", 3):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=X)


def guide():
    with pyro.plate("data", 3):
        pyro.sample("z", dist.Normal(X / 2, 0.7))


MADE = {
    "sgvb": TraceSGVB_ELBO,
    "iwae": lambda: TraceIWAE_ELBO(3),
    "renyi": lambda: TraceRenyi_ELBO(0.5, 3),
    "sis": lambda: TraceSIS_ELBO(3),
    "ais": lambda: TraceAIS_ELBO(3),
    "rao-blackwell": TraceRaoBlackwell_ELBO,
    "truncated": TraceTruncated_ELBO,
    "wake-sleep": WakeSleep,
    "em": MonteCarloEM,
    "vectorized": lambda: TraceIWAE_ELBO(3, vectorize_particles=True),
    "posterior": lambda: TruncatedPosterior(model, 4),
    "linear": lambda: LinearSchedule(3),
    "sigmoid": lambda: SigmoidSchedule(3),
}


@pytest.mark.parametrize("name", MADE)
def test_every_option_is_readable_and_fixed(name):
    made = MADE[name]()
    options = options_of(made)
    assert options
    for option in options:
        before = getattr(made, option)
        with pytest.raises(AttributeError, match=f"^{option} of a {type(made).__name__} is fixed"):
            setattr(made, option, 7)
        assert getattr(made, option) is before or torch.is_tensor(before)


@pytest.mark.parametrize("name", ["sis", "iwae", "sigmoid"])
@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_made_and_fixed_too(name, way):
    made = way(MADE[name]())
    for option in options_of(made):
        with pytest.raises(AttributeError, match="is fixed at construction"):
            setattr(made, option, 7)


@pytest.mark.parametrize("name", ["sgvb", "iwae", "renyi", "sis", "ais", "rao-blackwell"])
def test_what_is_read_at_each_step_can_be_assigned(name):
    made = MADE[name]()
    made.num_particles = 4
    made.retain_graph = True
    made.max_plate_nesting = 2  # as Pyro's Forecaster does
    assert (made.num_particles, made.retain_graph, made.max_plate_nesting) == (4, True, 2)
    with pytest.raises(ValueError, match="num_particles must be an int of at least 1"):
        made.num_particles = 0


@pytest.mark.parametrize("option", ["vectorize_particles", "gradient_estimator", "multi_sample"])
def test_options_of_a_compiled_loss_are_those_of_the_plain_one(option):
    compiled = CompiledELBO(TraceSIS_ELBO(2), backend="eager")
    with pytest.raises(AttributeError, match=f"{option} of a TraceSIS_ELBO is fixed"):
        setattr(compiled, option, True)
    compiled.retain_graph = True
    assert compiled.plain.retain_graph
    with pytest.raises(AttributeError, match="backend of a CompiledELBO is fixed"):
        compiled.backend = "inductor"
    compiled.train(False)
    assert not compiled.training
    assert not compiled.plain.training


def test_options_of_pyros_own_losses_reach_them():
    compiled = CompiledELBO(pyro.infer.Trace_ELBO(), backend="eager")
    compiled.num_particles = 3
    compiled.vectorize_particles = True
    assert compiled.plain.vectorize_particles


def test_options_of_a_users_subclass_are_the_users():
    class Tempered(MonteCarloELBO):
        def __init__(self, power=1.0, **options):
            super().__init__(3, **options)
            self.power = power

        def estimate(self, programs):
            sample = self.sampler.sample(programs)
            bound = self.power * sample.log_weight.mean(0)
            return local_estimate(sample, bound.detach(), bound)

    elbo = Tempered()
    elbo.power = 0.0
    assert elbo.loss(model, guide) == 0
    with pytest.raises(AttributeError, match="vectorize_particles of a Tempered is fixed"):
        elbo.vectorize_particles = True


def test_a_search_may_change_between_steps():
    posterior = TruncatedPosterior(model, 4)
    posterior.evolution = update = EvolutionaryUpdate(num_children=3)
    assert posterior.evolution is update


def test_arguments_without_a_meaning_say_so():
    with pytest.raises(
        TypeError, match="Truncated_ELBO does not accept the argument num_particles=3"
    ):
        TraceTruncated_ELBO(num_particles=3)
    with pytest.raises(ValueError, match=r"=3: their number is TruncatedPosterior\("):
        TraceTruncated_ELBO().num_particles = 3
    for make, known in (
        (TraceSGVB_ELBO, "analytic_kl, num_particles, and Pyro's"),
        (
            TraceSIS_ELBO,
            "baseline, budget, coordinates, defensive, gradient_estimator, joint, kernel",
        ),
    ):
        with pytest.raises(TypeError, match=f"{make.__name__} does not accept.* width=3.*{known}"):
            make(width=3)
    for option in ({"multi_sample": True}, {"num_categories": 2}, {"schedule": 3}):
        with pytest.raises(
            TypeError, match=f"MonteCarloEM does not accept the argument {next(iter(option))}"
        ):
            MonteCarloEM(**option)


def test_the_schedule_and_kernel_are_those_of_the_objective():
    elbo = TraceSIS_ELBO(2)
    for option, value in (("schedule", LinearSchedule(4)), ("kernel", ULA(0.1)), ("num_steps", 4)):
        with pytest.raises(AttributeError, match=f"{option} of a TraceSIS_ELBO is fixed"):
            setattr(elbo, option, value)
    assert elbo.num_steps == 2
    assert math.isfinite(elbo.loss(model, guide))
