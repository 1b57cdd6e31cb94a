"""Step sizes: the rules of adaptation, its bounds, and what is saved."""

import math

import hypothesis.strategies as st
import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import given

from pyro_mcvae import HMC, MALA, ULA, TraceAIS_ELBO, TraceSIS_ELBO, UnderdampedLangevin
from pyro_mcvae.chains.kernels import of_moving
from pyro_mcvae.chains.parameters import (
    AdaptiveStepSize,
    LearnedStepSize,
)

NAN, INF = math.nan, math.inf


def number(value):
    return torch.tensor(float(value))


@given(
    acceptance=st.floats(0, 1),
    target=st.floats(0.05, 0.95),
    rate=st.floats(0.01, 0.5),
    initial=st.floats(1e-4, 10),
)
def test_one_update_by_hand(acceptance, target, rate, initial):
    step_size = AdaptiveStepSize(initial, target_acceptance=target, rate=rate)
    step_size.update(number(acceptance))
    change = min(max((acceptance - target) / (1 - target), -2), 1)
    assert step_size().item() == pytest.approx(initial * math.exp(rate * change), rel=1e-12)


@pytest.mark.parametrize("acceptance", [NAN, INF, -INF])
@pytest.mark.parametrize("per_coordinate", [False, True])
def test_an_acceptance_that_is_not_finite_changes_nothing(acceptance, per_coordinate):
    step_size = AdaptiveStepSize(0.5, target_acceptance=0.8, per_coordinate=per_coordinate)
    step_size.update(number(acceptance), torch.randn(10, 3))
    assert (step_size() == 0.5).all()
    assert step_size.base == 0.5


def test_per_coordinate_follows_equation_27():
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(5, 40, 3, generator=generator) * torch.tensor([0.5, 1.0, 4.0])
    step_size = AdaptiveStepSize(0.5, target_acceptance=0.8, per_coordinate=True, rate=0.1)
    step_size.update(number(0.9), gradient)
    base = 0.5 * math.exp(0.1 * 0.5)
    assert step_size.base.item() == pytest.approx(base)
    spread = gradient.reshape(-1, 3).std(0, correction=0)
    # From one value to one per coordinate; the aim is at most twice, at least half the present.
    aim = (base / spread).clamp(0.25, 1.0)
    assert torch.allclose(step_size(), 0.9 * 0.5 + 0.1 * aim)
    for _ in range(300):
        step_size.update(number(0.8), gradient)
    assert torch.allclose(step_size(), base / spread)


@pytest.mark.parametrize("rounding", [0.0, 1e-16], ids=["exact", "rounded"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_gradient_without_spread_says_nothing(rows, rounding):
    """One chain, or a coordinate that all data share: only the acceptance can tell."""
    gradient = torch.tensor([[3.0, -0.5]]).expand(rows, 2) * (1 + rounding * torch.randn(rows, 2))
    step_size = AdaptiveStepSize(1e-3, target_acceptance=0.7, per_coordinate=True)
    for _ in range(600):
        # A kernel whose acceptance falls with its step size.
        step_size.update(torch.exp(-step_size().max()), gradient)
    assert torch.allclose(torch.exp(-step_size()), torch.tensor(0.7), atol=5e-3)


@pytest.mark.parametrize("kernel", [ULA, UnderdampedLangevin])
def test_unadjusted_kernels_take_no_unstable_steps_in_white_noise(kernel):
    """Far from the posterior every move is an improvement, and the acceptance is 1 for ever."""
    for options, most in (
        ({"per_coordinate": False}, 2.0),
        ({"per_coordinate": True}, 1e3),
        ({"bounds": (0.01, 5.0)}, 5.0),
    ):
        step_size = AdaptiveStepSize(0.5, rate=0.5, **options)
        kernel(step_size)
        for _ in range(40):
            step_size.update(number(1.0))
        assert step_size() == most
    # One that rejects cannot lose a chain.
    step_size = MALA(AdaptiveStepSize(0.5, rate=0.5)).step_size
    for _ in range(40):
        step_size.update(number(1.0))
    assert step_size() == 1e3


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_it_begins_as_narrow_as_the_guide(power):
    """In latent coordinates: where the guide's noise would begin, at its narrowest site."""
    scale = torch.tensor([2.0, 0.1, 0.5])
    gradient = -torch.randn(100_000, 3) / scale
    step_size = AdaptiveStepSize(per_coordinate=True)
    step_size.complete(0.01, 0.9, power)
    step_size.begin(gradient)
    assert step_size().item() == pytest.approx(0.01 * 0.1**power, rel=0.02)
    saved = step_size.state_dict()
    step_size.begin(1e3 * gradient)  # and not again
    assert torch.equal(step_size(), saved["value"])
    other = AdaptiveStepSize(per_coordinate=True)
    other.load_state_dict(saved)
    other.begin(1e3 * gradient)  # nor in another process
    assert torch.equal(other(), saved["value"])


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-30, 1e30, 1e100])
def test_flat_and_steep_gradients_stay_in_bounds(scale):
    step_size = AdaptiveStepSize(
        0.5, target_acceptance=0.8, per_coordinate=True, bounds=(0.01, 10.0)
    )
    gradient = scale * torch.randn(10, 2)
    for _ in range(400):
        before = step_size().expand(2)
        step_size.update(number(1.0 if scale < 1 else 0.0), gradient)
        ratio = step_size() / before
        assert (ratio >= 0.95 - 1e-9).all()
        assert (ratio <= 1.1 + 1e-9).all()
    assert torch.allclose(step_size(), torch.tensor(10.0 if scale < 1 else 0.01))


@pytest.mark.parametrize("per_coordinate", [False, True])
def test_state_dict_round_trip(per_coordinate):
    gradient = torch.randn(10, 3)

    def make():
        return AdaptiveStepSize(0.5, target_acceptance=0.8, per_coordinate=per_coordinate)

    saved, loaded = make(), make()
    for _ in range(5):
        saved.update(number(0.95), gradient)
    loaded.load_state_dict(saved.state_dict())
    assert loaded().shape == ((3,) if per_coordinate else ())
    for a in (0.9, 0.2):  # They also go on alike.
        assert torch.equal(loaded(), saved())
        assert torch.equal(loaded.base, saved.base)
        saved.update(number(a), gradient)
        loaded.update(number(a), gradient)
    # A state of one value replaces one per coordinate.
    saved.load_state_dict(make().state_dict())
    assert torch.equal(saved(), number(0.5))


SEQUENCES = {
    "ula": lambda: TraceSIS_ELBO(3, ULA(), coordinates="latent"),
    "mala": lambda: TraceAIS_ELBO(
        3, MALA(), num_particles=2, multi_sample=True, coordinates="latent"
    ),
    "learned": lambda: TraceSIS_ELBO(
        3, UnderdampedLangevin(LearnedStepSize(AdaptiveStepSize())), coordinates="latent"
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_of_other_lengths_are_weighed_right(name):
    """z ~ N(0, I), x ~ N(cumsum(z), I) in each of so many steps; E exp W is the evidence."""

    def model(x):
        with pyro.plate("series", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(x.shape[1]), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.cumsum(-1), 1.0).to_event(1), obs=x)

    def guide(x):
        with pyro.plate("series", len(x)):
            pyro.sample("z", dist.Normal(0.3 * x, 0.7).to_event(1))

    torch.manual_seed(0)
    loss = SEQUENCES[name]()
    for length in (5, 1, 7):
        x = torch.linspace(-1.0, 1.0, length).expand(1000, length)
        triangle = torch.ones(length, length).tril()
        cov = triangle @ triangle.mT + torch.eye(length)
        exact = dist.MultivariateNormal(torch.zeros(length), cov).log_prob(x[0])
        for training in (False, True):
            loss.train(training)
            bound = loss.bounds(model, guide, x).per_datum
            weight = (bound - exact).exp()
            assert abs(weight.mean() - 1) < 5 * weight.std() / 1000**0.5
            if training:
                loss.loss_and_grads(model, guide, x[:20])


def test_what_does_not_move_is_no_part_of_the_spread():
    gradient, moves = 2 + torch.randn(5, 10, 3), torch.rand(5, 10, 3) < 0.6
    moves[..., 2] = False
    result = of_moving(gradient, moves.to(gradient))
    for i in range(2):
        some = gradient[..., i][moves[..., i]]
        assert torch.allclose(result[..., i].mean(), some.mean())
        assert torch.allclose(result[..., i].var(correction=0), some.var(correction=0))
    assert not result[..., 2].any()
    gradient[~moves] = NAN
    assert torch.equal(of_moving(gradient, moves.to(gradient)), result)


def test_a_kernel_serves_no_second_loss_in_other_coordinates():
    # Its step size would keep the setting of the first loss.
    def model():
        pyro.sample("z", dist.Normal(0.0, 1.0))

    guide = model
    kernel = ULA(AdaptiveStepSize())
    first, other = TraceSIS_ELBO(2, kernel), TraceSIS_ELBO(2, kernel, coordinates="latent")
    assert kernel.step_size.per_coordinate is None  # constructors leave their arguments unchanged
    other.loss(model, guide)
    TraceSIS_ELBO(2, kernel, coordinates="latent").loss(model, guide)
    with pytest.raises(ValueError, match=r"coordinates='latent'.*make a kernel for each"):
        first.loss(model, guide)


def test_a_step_size_serves_no_second_kernel_with_other_defaults():
    # It has the initial value, the target and the power of the first kernel.
    step_size = AdaptiveStepSize()
    ULA(step_size)
    ULA(step_size)
    with pytest.raises(ValueError, match=r"defaults of another kernel.*a step size for each"):
        HMC(step_size)


@pytest.mark.parametrize(("acceptance", "bound"), [(1.0, 2.0), (0.0, 0.25)])
def test_values_stay_within_their_bounds(acceptance, bound):
    step_size = AdaptiveStepSize(0.5, target_acceptance=0.8, bounds=(0.25, 2.0))
    for _ in range(200):
        step_size.update(number(acceptance))
    assert step_size() == bound
    # And it leaves them again.
    step_size.update(number(1 - acceptance))
    assert step_size() != bound


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_gradient_that_is_not_finite_leaves_its_coordinate(bad):
    gradient = torch.randn(20, 3)
    step_size = AdaptiveStepSize(0.5, target_acceptance=0.8, per_coordinate=True)
    step_size.update(number(0.8), gradient)
    before = step_size()
    gradient[4, 1] = bad
    step_size.update(number(0.8), gradient)
    assert step_size().isfinite().all()
    assert step_size()[1] == before[1]
    assert (step_size()[[0, 2]] != before[[0, 2]]).all()


@pytest.mark.parametrize("per_coordinate", [False, True])
def test_eval_freezes_it(per_coordinate):
    step_size = AdaptiveStepSize(0.5, target_acceptance=0.8, per_coordinate=per_coordinate)
    torch.nn.ModuleDict({"kernel": step_size}).eval()
    step_size.update(number(1.0), torch.randn(10, 2))
    assert torch.equal(step_size(), number(0.5))
    step_size.train()
    step_size.update(number(1.0), torch.randn(10, 2))
    assert step_size.base > 0.5
