"""The comparison of annealed chains on images, as a new user runs it, on few images."""

import csv
import gzip
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyro.distributions as dist
import pytest
import torch

from tutorials.annealing import mnist


@pytest.fixture(autouse=True)
def as_a_command(double_precision: None) -> Iterator[None]:
    """Single precision, and the number of threads put back."""
    torch.set_default_dtype(torch.float32)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["ELBO"],
        ["RealNVP", "IWAE-10"],
        ["SIS-5", "SIS-5-reweighted", "AIS-5"],
    ],
)
def test_trains_and_judges(
    names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = mnist.main(["--smoke", "--objectives", ",".join(names), "--out", str(tmp_path)])

    assert [r.objective for r in results] == names
    printed = capsys.readouterr().out
    for r in results:
        assert f"| {r.objective} |" in printed
        # 64 fair coins have 44.4 nats; two steps already do better than that.
        assert 35 < r.nll_chain < 44.4
        assert 35 < r.nll_iwae < 44.4
        assert r.epochs == 1
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["nll_chain"]) for row in rows] == [r.nll_chain for r in results]
    assert all(row["commit"] and row["machine"] for row in rows)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_real_nvp_has_a_density() -> None:
    """The flow starts and stays invertible, and its density integrates to that of the draws."""
    images = torch.rand(3, 64)
    vae = mnist.VAE(mnist.Task("digits", images, images, 1, 8, True), 5, 2)
    vae.add_flow(3, 8)
    law = torch.distributions.TransformedDistribution(
        dist.Normal(torch.tensor([0.3, -0.2]), 0.7).to_event(1), vae.transforms()
    )
    axis = torch.linspace(-8, 8, 401)
    points = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        total = law.log_prob(points).exp().sum() * (axis[1] - axis[0]) ** 2
    assert total.item() == pytest.approx(1, abs=1e-3)


def test_every_recipe_makes_a_loss() -> None:
    assert all(hasattr(make(), "loss_and_grads") for make in mnist.OBJECTIVES.values())


@pytest.mark.slow
def test_all_go_on_from_the_same_pretrained_model(tmp_path: Path) -> None:
    argv = ["--smoke", "--pretrain", "1", "--objectives", "ELBO,SIS-5-reweighted", "--seeds", "0,1"]
    results = mnist.main([*argv, "--out", str(tmp_path)])
    starts = {(r.seed, r.objective): r.curve[0][1] for r in results}
    # The curves' noise differs between the objectives, the model does not.
    assert starts[0, "ELBO"] == pytest.approx(starts[0, "SIS-5-reweighted"], abs=0.3)
    assert starts[0, "ELBO"] != starts[1, "ELBO"]


@pytest.mark.slow
def test_training_stops_at_the_time_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(0.0, 0.06)  # of each step
    clock = SimpleNamespace(process_time=lambda: next(seconds), monotonic=lambda: 0.0)
    monkeypatch.setattr(mnist, "time", clock)
    monkeypatch.setattr(mnist, "held_out", lambda vae, x, *_: torch.arange(float(len(x))))
    monkeypatch.setattr(mnist, "draw", lambda results, path: None)
    argv = ["--objectives", "ELBO", "--seconds", "0.2", "--limit", "200", "--test-images", "2"]
    (result,) = mnist.main([*argv, "--checkpoints", "1", "--out", str(tmp_path)])
    assert result.cpu_seconds == pytest.approx(0.24)  # the last step began before 0.2
    assert result.epochs == 2


def test_reads_archives(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for kind in ("train", "t10k"):
        with gzip.open(folder / f"{kind}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + bytes([255]) + bytes(783) + bytes(783) + bytes([51]))
        with gzip.open(folder / f"{kind}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + bytes([3, 7]))
    task = mnist.load(tmp_path, None, 1)
    images = task.train
    assert (task.name, task.channels, task.size, task.binary) == ("MNIST", 1, 28, True)
    assert task.test.shape == (1, 784)
    assert task.test[0, 0] == 1
    assert images.shape == (2, 784)
    assert images[0, 0] == 1
    assert images[1, -1] == pytest.approx(0.2)
    assert images.sum() == pytest.approx(1.2)


def test_defaults() -> None:
    assert mnist.parse([]).epochs == 20
    assert mnist.parse(["--seconds", "3"]).epochs == math.inf
    assert mnist.parse([]).objectives == mnist.FROM_SCRATCH.split(",")
    assert mnist.parse(["--pretrain", "2"]).objectives == mnist.AFTER_PRETRAINING.split(",")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--objectives", "IWEA-10"], "unknown objective 'IWEA-10'; known are ELBO, "),
        (["--epochs", "0"], "must be positive, got 0"),
        (["--seconds", "-1"], "must be positive, got -1"),
    ],
)
def test_bad_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mnist.main(argv)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    argv = ["--objectives", "IWAE-5,SIS-5-default", "--limit", "200", "--test-images", "2"]
    whole = mnist.main([*argv, "--epochs", "2", "--out", str(tmp_path / "whole")])

    stopped = tmp_path / "stopped"
    (first,) = mnist.main([*argv, "--epochs", "2", "--out", str(stopped), "--objectives", "IWAE-5"])
    save, calls = mnist.save_checkpoint, []

    def stop(*args: object, **extra: object) -> None:
        save(*args, **extra)
        calls.append(args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mnist, "save_checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            mnist.main([*argv, "--epochs", "2", "--out", str(stopped)])
    again = mnist.main([*argv, "--epochs", "2", "--out", str(stopped)])

    assert len(calls) == 1  # the finished row was not trained again
    assert again[0].bound == first.bound
    # Evaluation may take longer than training: of what is evaluated, nothing is evaluated again.
    (stopped / "SIS-5-default-0.json").unlink()
    (stopped / "SIS-5-default-0.paper.pt").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            mnist, "held_out", lambda vae, x, evaluator, *_: evaluator.num_particles + 0 * x[:, 0]
        )
        evaluated = mnist.main([*argv, "--epochs", "2", "--out", str(stopped)])[1]
    assert (evaluated.nll_chain, evaluated.nll_iwae) == (again[1].nll_chain, again[1].nll_iwae)
    assert evaluated.nll_paper == -10
    for a, b in zip(whole, again, strict=True):
        assert (a.bound, a.nll_chain, a.nll_iwae) == (b.bound, b.nll_chain, b.nll_iwae)
    with pytest.raises(SystemExit, match=r"results with latent = 20, but latent is 3"):
        mnist.main([*argv, "--epochs", "2", "--latent", "3", "--out", str(stopped)])


@pytest.mark.slow
def test_more_epochs_continue_a_finished_run(tmp_path: Path) -> None:
    argv = ["--objectives", "ELBO", "--limit", "200", "--test-images", "2"]
    mnist.main([*argv, "--epochs", "1", "--out", str(tmp_path / "continued")])
    (longer,) = mnist.main([*argv, "--epochs", "2", "--out", str(tmp_path / "continued")])
    (at_once,) = mnist.main([*argv, "--epochs", "2", "--out", str(tmp_path / "whole")])
    assert longer.epochs == at_once.epochs == 2
    assert longer.bound == pytest.approx(at_once.bound, abs=3)  # after evaluating: other batches
    assert longer.nll_chain == pytest.approx(at_once.nll_chain, abs=1)
    (same,) = mnist.main([*argv, "--epochs", "1", "--out", str(tmp_path / "continued")])
    assert same.epochs == 2
