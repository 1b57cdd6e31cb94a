"""The quickstart, as a new user runs it, on few images."""

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


@pytest.mark.parametrize(
    "names",
    [["SGVB"], pytest.param(list(quickstart.OBJECTIVES), marks=pytest.mark.slow)],
)
def test_trains_every_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str]
) -> None:
    figure = tmp_path / "figure.png"
    result = quickstart.main([*SMALL, "--objective", ",".join(names), "--output", str(figure)])

    assert list(result) == names
    rows = capsys.readouterr().out.splitlines()
    for name, copy in result.items():
        (row,) = [row for row in rows if row.split()[:1] == [name]]
        assert row.split()[1] == "5"  # steps
        # 64 fair coins have -44.4 nats; five steps already do better than that.
        assert -50 < copy.last_bound < -30
        assert -44 < copy.evidence.mean < -30
        assert copy.evidence.log_evidence.shape == (100,)
        assert copy.seconds_per_step > 0
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_same_seed_same_result(tmp_path: Path) -> None:
    name = next(iter(quickstart.OBJECTIVES))
    argv = [*SMALL, "--objective", name, "--output", str(tmp_path / "figure.png"), "--seed"]
    first, again, other = (quickstart.main([*argv, seed])[name] for seed in ("1", "1", "2"))
    assert first.bounds == again.bounds
    assert torch.equal(first.evidence.log_evidence, again.evidence.log_evidence)
    assert first.bounds != other.bounds


@pytest.mark.slow
def test_compiled_losses_have_the_numbers_of_plain_ones(tmp_path: Path) -> None:
    argv = [*SMALL, "--objective", "IWAE-10", "--compiled", "--output", str(tmp_path / "f.png")]
    plain, compiled = quickstart.main(argv).values()
    assert compiled.bounds == pytest.approx(plain.bounds, rel=1e-4)


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
            "no GPU is available; use --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quickstart.main(argv)
    assert message in capsys.readouterr().err
