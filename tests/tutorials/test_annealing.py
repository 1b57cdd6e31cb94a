"""The tutorials on annealed chains, as a new user runs them, at a size for tests."""

import csv
import math
from pathlib import Path

import pytest
import torch
from pyro import poutine

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


@pytest.mark.slow
# A few steps leave guides that miss most of the ring.
@pytest.mark.filterwarnings("ignore:the Pareto k of the weights")
@pytest.mark.parametrize("learn", [False, True])
def test_the_ring_of_every_objective(tmp_path: Path, learn: bool) -> None:
    sizes = ["--steps", "3", "--data", "200", "--draws", "200", "--out", str(tmp_path)]
    result = ring.main([*sizes, *(["--learn"] * learn)])
    stem = "ring_learned" if learn else "ring"
    rows = read(tmp_path / f"{stem}.csv")
    assert [row["objective"] for row in rows] == [method.name for method in result]
    if learn:
        assert len({method.xi for method in result}) > 1
    for method, row in zip(result, rows, strict=True):
        assert (method.xi, method.zeta) != (ring.XI, ring.ZETA) if learn else method.xi == ring.XI
        assert method.bound < float(row["likelihood"]) + 5 * method.error, method.name
        # No xi and zeta are better than the maximum of the likelihood.
        assert float(row["likelihood"]) < float(row["log_evidence"]) + 1e-5
        assert method.draws is not None
        assert method.draws.shape == (200, 2)
        assert (method.refined is None) == (method.name in ("VAE", "Real NVP"))
    assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")


def test_the_rings_evidence_in_polar_coordinates() -> None:
    # r^2 of two standard normal variables is exponential with mean 2.
    square = torch.linspace(0, 60, 600_001, dtype=torch.float64)
    density = torch.exp(-square / 2) / 2
    for x in (-1.0, 5.0, 20.0):
        likelihood = torch.distributions.Normal(1.5 * (square + 0.7), ring.SIGMA)
        total = torch.trapezoid(density * likelihood.log_prob(torch.tensor(x)).exp(), square)
        exact = ring.log_evidence(torch.tensor(x).double(), 1.5, 0.7)
        assert exact == pytest.approx(total.log().item(), abs=1e-4)


def test_the_maximum_of_the_rings_likelihood() -> None:
    x = ring.make_data(20_000)
    # Four standard errors: x has mean xi (2 + zeta), and variance 4 xi^2 + sigma^2.
    assert ring.most_likely(x) == pytest.approx((ring.XI, ring.ZETA), abs=0.06)


@pytest.mark.slow
def test_real_nvp_has_a_density() -> None:
    """The density of a guide with coupling layers integrates to one."""
    guide, x = ring.Guide(layers=3), torch.tensor([ring.X])
    side = torch.linspace(-9, 9, 901)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).reshape(-1, 1, 2)
    with torch.no_grad():
        trace = poutine.trace(poutine.condition(guide, {"z": grid})).get_trace(x)
        trace.compute_log_prob()
    total = trace.nodes["z"]["log_prob"].exp().sum() * (18 / 900) ** 2
    assert total.item() == pytest.approx(1, abs=0.01)


def test_the_distance_of_angles() -> None:
    angle = torch.linspace(0, 2 * math.pi, 1001)
    whole = torch.stack([angle.cos(), angle.sin()], -1)
    assert ring.ring_distance(whole) < 0.01
    assert ring.ring_distance(whole[:500]) == pytest.approx(0.5, abs=0.01)
