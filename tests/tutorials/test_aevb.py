"""The experiment of Kingma and Welling as a new user runs it, with few images and steps."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*argv: str, script: str = "figures.py") -> str:
    command = [sys.executable, "-W", "error", str(ROOT / "tutorials" / "aevb" / script)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CI": "1", "PATH": ""}
    done = subprocess.run(
        [*command, *argv], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_short_run_writes_its_bounds(tmp_path: Path) -> None:
    run("--smoke", "--objectives", "AEVB", "--latent", "2", "--out", str(tmp_path))
    with (tmp_path / "bound_digits.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["objective"], r["split"]) for r in rows] == [("AEVB", "train"), ("AEVB", "test")] * 2
    # 64 fair coins have 44.4 nats, where the model begins.
    assert all(-60 < float(r["value"]) < -20 for r in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("figure", "objectives"),
    [
        ("bound", ["Wake-Sleep", "AEVB"]),
        ("marginal", ["Wake-Sleep", "MCEM", "AEVB"]),
    ],
)
def test_figures(tmp_path: Path, figure: str, objectives: list[str]) -> None:
    printed = run("--smoke", "--figure", figure, "--out", str(tmp_path))
    path = tmp_path / f"{figure}_digits.csv"
    assert str(path) in printed
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [r["objective"] for r in rows] == [o for o in objectives for _ in range(4)]
    assert {r["split"] for r in rows} == {"train", "test"}
    for row in rows:
        # 64 fair coins have 44.4 nats, where every model begins.
        assert -60 < float(row["value"]) < -20
        assert float(row["cpu_seconds"]) > 0
        assert row["commit"]
        assert row["machine"]
    image = path.with_suffix(".png")
    assert image.read_bytes().startswith(b"\x89PNG")
    if figure == "bound":
        image.unlink()
        run("--redraw", "--out", str(tmp_path))
        assert image.exists()


@pytest.mark.slow
def test_a_posterior_over_weights(tmp_path: Path) -> None:
    run("--smoke", "--out", str(tmp_path), script="weights.py")
    with (tmp_path / "weights.csv").open() as file:
        points, posterior = csv.DictReader(file)
    assert (points["guide"], posterior["guide"]) == ("points", "posterior")
    for row in (points, posterior):
        assert -60 < float(row["test_bound"]) < -20
    # Both have the same start; only the posterior pays for its weights by their KL divergence.
    assert float(points["test_bound"]) == pytest.approx(float(posterior["test_bound"]), abs=3)
    assert (tmp_path / "weights.png").exists()
