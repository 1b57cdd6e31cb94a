"""The results file of the experiments."""

import csv
import sys
from pathlib import Path

import pytest

from tutorials import results


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_rows_say_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/ring.py", "--steps", "3"])
    result = results.Results(tmp_path / "deep" / "ring.csv", seed=5)
    result.add(objective="ELBO", bound=-1.5)
    result.add(objective="IWAE", bound=-1.25, step_size=0.1, seed=7)
    first, second = read(result.path)
    assert (first["objective"], first["bound"], first["step_size"]) == ("ELBO", "-1.5", "")
    assert (second["step_size"], first["seed"], second["seed"]) == ("0.1", "5", "7")
    for row in (first, second):
        assert row["command"] == "ring.py --steps 3"
        assert row["commit"]
        assert "torch" in row["machine"]
    assert 0 < float(first["cpu_seconds"]) <= float(second["cpu_seconds"])


def test_a_row_is_there_before_the_next_one_is(tmp_path: Path) -> None:
    result = results.Results(tmp_path / "long.csv", argv=["--epochs", "100"])
    for epoch in range(3):
        result.add(epoch=epoch)
        assert [row["epoch"] for row in read(result.path)] == [str(e) for e in range(epoch + 1)]
    assert read(result.path)[0]["command"].endswith("--epochs 100")


def test_no_git_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert results.commit() == "unknown"
