"""TraceSIS_ELBO: gradients against finite differences, the counts of runs, its own errors."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    ULA,
    LearnedSchedule,
    LinearSchedule,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from tests.chains.densities import learned_moves
from tests.elbos.chain_gradients import assert_slopes, bound, gradients, learning, parameters_of
from tests.zoo import EXAMPLES

SMOOTH = [n for n in EXAMPLES if n not in ("two-independent", "mixture", "implicit")]


KERNELS = {
    "ULA": lambda: ULA(0.03),
    "UnderdampedLangevin": lambda: UnderdampedLangevin(0.2, momentum=0.8),
    "learned moves": lambda: learned_moves(0.2, momentum=0.8),
}


def check(example, kernel, num_steps=3, **options):
    options.setdefault("vectorize_particles", True)
    elbo = learning(
        TraceSIS_ELBO,
        num_steps,
        kernel,
        num_particles=2,
        max_plate_nesting=example.nesting,
        **options,
    )
    outside, own = parameters_of(elbo, example)
    grads = gradients(elbo, example, outside + own)
    grads = [grads[: len(outside)], grads[len(outside) :]]
    assert_slopes([outside, own], grads, lambda: bound(elbo, example))


@pytest.mark.parametrize(
    ("name", "vectorize", "multi_sample", "coordinates"),
    [
        pytest.param(
            n,
            bool((i + j) % 2) or i % 5 == 0,
            bool(i // 2 % 2),
            c,
            marks=() if i % 5 == 0 and i // 5 % 2 == j else pytest.mark.slow,
        )
        for i, n in enumerate(SMOOTH)
        for j, c in enumerate(["noise", "latent"])
    ],
)
def test_gradient_is_that_of_finite_differences(name, vectorize, multi_sample, coordinates):
    options = {"multi_sample": multi_sample, "coordinates": coordinates}
    kernel = UnderdampedLangevin(0.2 if coordinates == "noise" else 0.1, momentum=0.8)
    check(EXAMPLES[name](), kernel, vectorize_particles=vectorize, **options)


@pytest.mark.parametrize(
    ("kernel", "multi_sample", "vectorize"),
    [
        ("ULA", False, False),
        ("ULA", True, True),
        ("UnderdampedLangevin", True, False),
        ("learned moves", False, True),
    ],
)
def test_gradient_with_every_kernel(kernel, multi_sample, vectorize):
    options = {"vectorize_particles": vectorize, "multi_sample": multi_sample}
    check(EXAMPLES["vae"](), KERNELS[kernel](), **options)


def test_defaults():
    elbo = TraceSIS_ELBO()
    assert isinstance(elbo.kernel, UnderdampedLangevin)
    assert isinstance(elbo.schedule, LearnedSchedule)
    assert elbo.num_steps == 5
    learned = {name: p.shape for name, p in elbo.named_parameters() if p.requires_grad}
    assert learned == dict.fromkeys(
        ("schedule.logits", "kernel.step_size.log_value", "kernel.momentum.logit"), (5,)
    )
    assert elbo.num_particles == 1
    assert elbo.coordinates == "noise"


@pytest.mark.parametrize("options", [{"kernel": ULA()}, {"gradient_estimator": "reweighted"}])
def test_where_nothing_trains_the_chain_is_the_papers(options):
    elbo = TraceSIS_ELBO(4, **options)
    assert isinstance(elbo.kernel, ULA)
    assert isinstance(elbo.schedule, LinearSchedule)
    assert not list(elbo.parameters())


# --- Defensive weights ----------------------------------------------------------------------------

LOST = 1.9  # ten times the width of the posterior: the steps of such chains multiply


def five():
    return torch.linspace(-1.0, 1.0, 5)


def narrow(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 0.2), obs=x)


def wide(x):
    slope = pyro.param("slope", torch.tensor(0.9))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(slope * x, 0.6))


def lost(defensive, step_size=LOST, **options):
    return TraceSIS_ELBO(4, UnderdampedLangevin(step_size), defensive=defensive, **options)


def evidence(x):
    return dist.Normal(0.0, 1.04**0.5).log_prob(x)


@pytest.mark.parametrize(
    ("defensive", "step_size", "multi_sample"), [(0.01, 0.4, False), (0.3, 0.1, True)]
)
def test_the_mean_defensive_weight_is_the_evidence(defensive, step_size, multi_sample):
    torch.manual_seed(0)
    x = five().repeat(1500)
    particles = 3 if multi_sample else 1
    elbo = lost(defensive, step_size, num_particles=particles, multi_sample=multi_sample)
    weight = (elbo.bounds(narrow, wide, x).per_datum - evidence(x)).exp()
    assert abs(weight.mean() - 1) < 4.5 * weight.std() / len(x) ** 0.5


@pytest.mark.parametrize("defensive", [0.01, 0.3])
def test_a_lost_chain_counts_as_its_first_draw(defensive):
    """The same draws with and without; the plain weight is that of a chain that stands still."""
    result = {}
    for name, elbo in {
        "defended": lost(defensive),
        "chain": lost(0.0),
        "plain": lost(0.0, step_size=1e-12),
    }.items():
        torch.manual_seed(0)
        result[name] = elbo.bounds(narrow, wide, five()).per_datum
    assert result["chain"].min() < -1000
    expected = torch.logaddexp(
        result["chain"] + math.log1p(-defensive), result["plain"] + math.log(defensive)
    )
    torch.testing.assert_close(result["defended"], expected, rtol=1e-6, atol=1e-6)
    assert (result["defended"] >= result["plain"] + math.log(defensive) - 1e-6).all()


@pytest.mark.parametrize("step_size", [0.1, 0.4, LOST])
def test_its_gradient_is_that_of_finite_differences(step_size):
    def value(slope):
        torch.manual_seed(3)
        pyro.clear_param_store()
        pyro.param("slope", torch.tensor(slope))
        return lost(0.2, step_size).differentiable_loss(narrow, wide, five())

    value(0.9).backward()
    result = float(pyro.param("slope").grad)
    h = 1e-5
    expected = float((value(0.9 + h) - value(0.9 - h)).detach()) / (2 * h)
    assert result == pytest.approx(expected, rel=1e-5)


def test_which_chains_are_defended():
    assert TraceSIS_ELBO().defensive == TraceSIS_ELBO(10).defensive == 0.01
    assert TraceSIS_ELBO(5, ULA()).defensive == 0.0
    assert TraceSIS_ELBO(5, gradient_estimator="reweighted").defensive == 0.0
    assert TraceSIS_ELBO(5, ULA(), defensive=0.1).defensive == 0.1
    assert TraceSIS_ELBO(defensive=0.0).defensive == 0.0


def test_a_chain_of_no_number_is_told_of_and_not_hidden():
    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal((z**2).exp(), 1.0), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(0.1 * x, 1.0))

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="the loss is inf"):
        TraceSIS_ELBO(4, UnderdampedLangevin(50.0), defensive=0.01).loss_and_grads(
            model, guide, five()
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vae", {"vectorize_particles": False, "multi_sample": True}),
        ("structured", {"coordinates": "latent", "multi_sample": True}),
    ],
)
def test_defensive_gradients_in_every_mode(name, options):
    check(EXAMPLES[name](), UnderdampedLangevin(0.2, momentum=0.8), defensive=0.3, **options)
