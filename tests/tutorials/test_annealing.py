"""The tutorials on annealed chains, as a new user runs them, at a size for tests."""

import csv
import math
from pathlib import Path

import pytest
import torch

from tutorials.annealing import ppca_gaps, ring


@pytest.fixture(autouse=True)
def as_a_command(double_precision: None) -> None:
    torch.set_default_dtype(torch.float32)


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_gaps_to_the_exact_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--p", "20", "--d", "4", "--data", "200", "--repeats", "3"]
    result = ppca_gaps.main([*sizes, "--out", str(tmp_path)])
    rows = read(tmp_path / "ppca_gaps.csv")
    assert [row["bound"] for row in rows] == list(result) == list(ppca_gaps.rows())
    printed = capsys.readouterr().out
    for name, row in result.items():
        assert name in printed
        # A lower bound, never looser than the ELBO that it begins with.
        assert row["gap"] < 5 * row["error"] + 0.01, name
        assert row["gap"] > result["ELBO"]["gap"] - 5 * row["error"] - 0.02, name
    assert result["ELBO"]["gap"] < result["IWAE-5"]["gap"] < result["IWAE-50"]["gap"]
    # What the project's notes found belongs to their size alone.
    assert not any(row["earlier"] for row in rows)
    assert (tmp_path / "ppca_gaps.png").read_bytes().startswith(b"\x89PNG")


# Twenty steps leave a guide that misses most of the ring, which the log says.
@pytest.mark.filterwarnings("ignore:the Pareto k of the weights")
@pytest.mark.slow
def test_the_ring_of_every_objective(tmp_path: Path) -> None:
    result = ring.main(["--steps", "20", "--draws", "200", "--out", str(tmp_path)])
    rows = read(tmp_path / "ring.csv")
    assert [row["objective"] for row in rows] == [method.name for method in result]
    exact = ring.log_evidence()
    for method in result:
        assert method.bound < exact + 5 * method.error, method.name
        assert method.draws is not None
        assert method.draws.shape == (200, 2)
        if method.refined is not None:
            assert method.refined.isfinite().all()
            assert method.refined.shape[1] == 2
    assert (tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")


def test_the_rings_evidence_in_polar_coordinates() -> None:
    # r^2 of two standard normal variables is exponential with mean 2.
    square = torch.linspace(0, 40, 400_001, dtype=torch.float64)
    density = torch.exp(-square / 2) / 2
    likelihood = torch.distributions.Normal(ring.XI * (square + ring.ZETA), ring.SIGMA)
    total = torch.trapezoid(density * likelihood.log_prob(torch.tensor(ring.X)).exp(), square)
    assert ring.log_evidence() == pytest.approx(math.log(total), abs=1e-4)


def test_the_distance_of_angles() -> None:
    angle = torch.linspace(0, 2 * math.pi, 1001)
    whole = torch.stack([angle.cos(), angle.sin()], -1)
    assert ring.ring_distance(whole) < 0.01
    assert ring.ring_distance(whole[:500]) == pytest.approx(0.5, abs=0.01)
