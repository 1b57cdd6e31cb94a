"""The quickstart, as a stranger runs it, on few images."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tutorials import quickstart

SMALL = ["--epochs", "1", "--limit", "100", "--batch-size", "20"]


@pytest.fixture(autouse=True)
def as_a_command(double_precision: None) -> Iterator[None]:
    """Single precision, and the number of threads put back."""
    torch.set_default_dtype(torch.float32)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_trains_every_objective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "figure.png"
    runs = quickstart.main([*SMALL, "--output", str(figure)])

    assert [run.name for run in runs] == list(quickstart.OBJECTIVES)
    rows = capsys.readouterr().out.splitlines()
    for run in runs:
        (row,) = [row for row in rows if row.split()[:1] == [run.name]]
        bound, log_prob, plus_minus, error = row.split()[1:5]
        assert plus_minus == "±"
        assert all(math.isfinite(float(cell)) for cell in (bound, log_prob, error))
        # 64 fair coins have -44.4 nats; five steps already do better than that.
        assert -50 < run.bounds[-1] < -30
        assert -44 < run.log_prob.mean() < -30
        assert run.log_prob.shape == (100,)
        assert run.seconds_per_epoch > 0
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_same_seed_same_result(tmp_path: Path) -> None:
    name = next(iter(quickstart.OBJECTIVES))
    argv = [*SMALL, "--objective", name, "--output", str(tmp_path / "figure.png"), "--seed"]
    first, again, other = (quickstart.main([*argv, seed])[0] for seed in ("1", "1", "2"))
    assert first.bounds == again.bounds
    assert torch.equal(first.log_prob, again.log_prob)
    assert first.bounds != other.bounds


def test_objectives_are_chosen_by_name(tmp_path: Path) -> None:
    names = list(quickstart.OBJECTIVES)[:2]
    chosen = quickstart.parse(["--objective", ",".join(reversed(names)), "--objective", names[0]])
    assert chosen.objective == names[::-1]
    assert quickstart.parse([]).objective == list(quickstart.OBJECTIVES)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--objective", "IWEA-10"], "unknown objective 'IWEA-10'; known are SGVB, IWAE-10"),
        (["--epochs", "0"], "must be at least 1, got 0"),
        pytest.param(
            ["--device", "cuda"],
            "torch sees no GPU here; use --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quickstart.main(argv)
    assert message in capsys.readouterr().err
