"""Schedules: exact ends, increasing, and what is learned has a gradient."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from pyro_mcvae.chains.schedules import (
    FixedSchedule,
    LearnedSchedule,
    LinearSchedule,
    Schedule,
    SigmoidSchedule,
    as_schedule,
    check_betas,
)

MAKERS = {
    "linear": LinearSchedule,
    "sigmoid": lambda k: SigmoidSchedule(k, slope=3.0),
    "sigmoid, kept": lambda k: SigmoidSchedule(k, slope=3.0, learn=False),
    "learned": LearnedSchedule,
    "fixed": lambda k: FixedSchedule(torch.linspace(0, 1, k + 1) ** 2),
}
schedules = pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))


def moved(schedule):
    """The same schedule with other values of what it learns."""
    generator = torch.Generator().manual_seed(0)
    for p in schedule.parameters():
        p.data.add_(torch.randn(p.shape, generator=generator))
    return schedule


@schedules
@pytest.mark.parametrize("num_steps", [1, 2, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_from_exactly_0_to_exactly_1_and_increasing(make, num_steps, dtype):
    for schedule in (make(num_steps), moved(make(num_steps))):
        betas = schedule.to(dtype)()
        assert betas.shape == (num_steps + 1,)
        assert betas.dtype == dtype
        assert betas[0] == 0
        assert betas[-1] == 1
        assert (betas.diff() > 0).all()
        check_betas(betas)


@given(slope=st.floats(1e-3, 15), num_steps=st.integers(1, 30))
def test_sigmoid_by_hand(slope, num_steps):
    k = torch.arange(num_steps + 1)
    s = torch.sigmoid(slope * (2 * k / num_steps - 1))
    expected = (s - s[0]) / (s[-1] - s[0])
    result = SigmoidSchedule(num_steps, slope=slope)()
    assert torch.allclose(result, expected, atol=1e-9)
    # Denser at both ends alike.
    assert torch.allclose(result, 1 - result.flip(0), atol=1e-9)


@pytest.mark.parametrize("make", [MAKERS["sigmoid"], MAKERS["learned"]], ids=["sigmoid", "learned"])
def test_what_is_learned_has_the_gradient_of_finite_differences(make):
    schedule = moved(make(4))
    (parameter,) = schedule.parameters()
    direction = torch.randn(parameter.shape)
    weights = torch.randn(5)
    (grad,) = torch.autograd.grad((weights * schedule()).sum(), parameter)
    ends = []
    for step in (1e-5, -1e-5):
        moved_by = {n: p + step * direction for n, p in schedule.named_parameters()}
        ends.append((weights * torch.func.functional_call(schedule, moved_by, ())).sum())
    expected = (ends[0] - ends[1]) / 2e-5
    assert torch.allclose((grad * direction).sum(), expected, rtol=1e-6)
    assert expected.abs() > 1e-3


def test_a_fixed_schedule_is_a_copy():
    betas = torch.tensor([0.0, 0.3, 1.0], requires_grad=True)
    schedule = FixedSchedule(betas)
    with torch.no_grad():
        betas[1] = 0.9
    assert schedule()[1] == 0.3
    assert not schedule().requires_grad


class Returning(Schedule):
    def __init__(self, betas, num_steps=3):
        super().__init__(num_steps)
        self.betas = betas

    def forward(self):
        return self.betas


@pytest.mark.parametrize(
    ("betas", "result"),
    [
        ([0.0, 0.5, 0.6, 1.0], r"\[0.0, 0.5, 0.6, 1.0\]"),
        (None, "None"),
        (torch.linspace(0, 1, 6), r"shape \(6,\)"),
        (torch.linspace(0, 1, 4).unsqueeze(0), r"shape \(1, 4\)"),
    ],
)
def test_what_a_schedule_returns_is_named(betas, result):
    with pytest.raises(
        ValueError, match=rf"Returning.forward must return .* = \[4\], got {result}"
    ):
        as_schedule(Returning(betas))
