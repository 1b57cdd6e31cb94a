"""When a loss has levelled off: how often that is said too early, and how late."""

import math

import pytest
import torch

from pyro_mcvae import PlateauDetector, load_checkpoint, save_checkpoint

STEPS = 6000
TIMES = torch.arange(STEPS)
CURVES = {
    "flat": 0.0 * TIMES,
    "exponential": 50 * torch.exp(-TIMES / 200.0),
    "two speeds": 5 * torch.exp(-TIMES / 300.0) + 500 * torch.exp(-TIMES / 20.0),
    "power": 50 / (1 + TIMES / 20.0),
    "line": -TIMES / 100.0,
}


def still_gained(curve, steps):
    """The noise's share that the last quarter gained over the quarter before."""
    quarter = steps // 4
    return float(
        curve[steps - 2 * quarter : steps - quarter].mean() - curve[steps - quarter :].mean()
    )


def stops(curve, noise):
    """For each row of noise the step at which the detector speaks, or the last."""
    result = []
    for row in (curve + noise).tolist():
        plateau = PlateauDetector()
        result.append(next((t + 1 for t, loss in enumerate(row) if plateau.step(loss)), STEPS))
    return result


@pytest.mark.parametrize("name", CURVES)
def test_false_alarms_and_delay(name):
    """By the curve without its noise: it never falls by more than was said, and stops in time."""
    curve = CURVES[name].double()
    result = stops(curve, torch.randn(30, STEPS, dtype=torch.float64))
    early = [t for t in result if t < STEPS and still_gained(curve[:t], t) > 0.3]
    assert len(early) <= 1
    first = next((t for t in range(400, STEPS, 20) if still_gained(curve[:t], t) < 0.3), STEPS)
    median = sorted(result)[15]
    assert median <= 2.2 * first
    if name == "line":
        assert result == [STEPS] * 30


def test_correlated_noise_makes_it_wait():
    """Ten batches of each quarter tell the error where neighbours go together."""
    noise, state = torch.randn(30, STEPS, dtype=torch.float64), torch.zeros(30)
    for t in range(STEPS):
        state = 0.8 * state + 0.6 * noise[:, t]
        noise[:, t] = state
    curve = CURVES["exponential"].double()
    early = [t for t in stops(curve, noise) if t < STEPS and still_gained(curve[:t], t) > 0.3]
    assert len(early) <= 3


def test_a_loss_without_noise():
    plateau = PlateauDetector()
    assert not any(plateau.step(math.exp(-t / 500)) for t in range(3000))
    plateau.reset()
    assert plateau.num_steps == 0
    assert any(plateau.step(3.0) for _ in range(500))
    assert plateau.improvement == 0.0
    assert plateau.step(-1e9)  # once levelled off, so until reset


def test_what_is_not_finite_does_not_count():
    plateau = PlateauDetector()
    for loss in (math.nan, math.inf, torch.tensor(1.0)):
        plateau.step(loss)
    assert plateau.num_steps == 1


def test_it_resumes(tmp_path):
    losses = (CURVES["exponential"] + torch.randn(STEPS)).tolist()
    whole, first = PlateauDetector(), PlateauDetector()
    said = [whole.step(loss) for loss in losses]
    for loss in losses[:777]:
        first.step(loss)
    save_checkpoint(tmp_path / "run.pt", {"plateau": first})
    second = PlateauDetector()
    load_checkpoint(tmp_path / "run.pt", {"plateau": second})
    assert [second.step(loss) for loss in losses[777:]] == said[777:]
    assert second.improvement == whole.improvement
    assert said[-1]


def test_arguments():
    for wrong in (0.0, -1.0, "small", True, math.nan, math.inf):
        with pytest.raises(ValueError, match="tolerance must be a positive number"):
            PlateauDetector(wrong)
    with pytest.raises(ValueError, match="min_steps must be an int of at least 1"):
        PlateauDetector(min_steps=0)
