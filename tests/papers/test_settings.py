"""The papers' settings (``--paper``) take a step: networks and flags, on a handful of images."""

import csv
import gzip
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imsave
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_mcvae import TraceSGVB_ELBO, save_checkpoint
from tutorials.annealing import mnist
from tutorials.annealing.networks import convolutional
from tutorials.data import color, frey
from tutorials.data import mnist as mnist_images

ROOT = Path(__file__).parents[2]


@pytest.fixture
def as_a_command(double_precision: None) -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with archives like MNIST's, of noise."""
    folder = tmp_path / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for kind, count in (("train", 200), ("t10k", 3)):
        pixels = torch.randint(256, (count * 784,), dtype=torch.uint8).numpy().tobytes()
        labels = torch.arange(count).remainder(10).to(torch.uint8).numpy().tobytes()
        with gzip.open(folder / f"{kind}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + pixels)
        with gzip.open(folder / f"{kind}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + labels)
    return tmp_path / "data"


def run(script: str, *argv: str) -> None:
    path = ROOT / "tutorials" / script
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CI": "1"}
    done = subprocess.run(
        [sys.executable, str(path), *argv], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_monte_carlo_vae(data: Path, tmp_path: Path, as_a_command: None) -> None:
    argv = ["--paper", "--data-root", str(data), "--out", str(tmp_path)]
    args = mnist.parse(argv)
    assert (args.latent, args.epochs, len(args.seeds), args.test_images) == (64, 100, 5, 10_000)
    assert args.objectives == mnist.PAPER.split(",")
    threads = torch.get_num_threads()
    objectives = "ELBO,RealNVP,SIS-5-ULA"
    results = mnist.main([*argv, "--smoke", "--seeds", "0", "--objectives", objectives])
    torch.set_num_threads(threads)
    # 784 fair coins have 543.4 nats, where networks begin and noise stays.
    for result in results:
        assert 530 < result.nll_chain < 570


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(32, id="CIFAR-10"), pytest.param(64, id="CelebA")])
def test_monte_carlo_vae_in_colour(size: int, tmp_path: Path, as_a_command: None) -> None:
    images = torch.randint(256, (53, 3, size, size), dtype=torch.uint8).numpy()
    path = tmp_path / "noise.npz"
    np.savez(path, train_images=images[:50], test_images=images[50:])
    argv = ["--paper", "--data-root", str(path), "--out", str(tmp_path)]
    args = mnist.parse(argv)
    assert (args.latent, args.batch_size, args.epochs, len(args.seeds)) == (128, 50, 100, 5)
    threads = torch.get_num_threads()
    (elbo,) = mnist.main([*argv, "--smoke", "--seeds", "0", "--objectives", "SIS-5-ULA"])
    torch.set_num_threads(threads)
    # Means of 0, where networks begin, and of 1/2, the best of noise; per pixel.
    constant = math.log(2 * math.pi) / 2
    assert constant + 1 / 24 < elbo.nll_chain / images[0].size < constant + 1 / 6 + 0.02


def test_the_papers_networks() -> None:
    encoder, decoder = convolutional(64)
    assert sum(p.numel() for p in encoder.parameters()) == 219_504  # as published
    assert sum(p.numel() for p in decoder.parameters()) == 74_441
    assert encoder(torch.rand(3, 784)).shape == (3, 128)
    result = decoder(torch.randn(3, 64))
    assert result.shape == (3, 784)
    # Convolutions come after the upsampling: else pixels would be equal in blocks.
    assert len(result[0].unique()) > 700


@pytest.mark.slow
def test_all_of_the_papers_networks_are_trained(tmp_path: Path) -> None:
    images = torch.rand(4, 784).bernoulli()
    vae = mnist.VAE(mnist.Task("MNIST", images, images, 1, 28, True), None, 64)
    before = [p.detach().clone() for p in vae.parameters()]
    SVI(vae.model, vae.guide, Adam({"lr": 1e-3}), TraceSGVB_ELBO()).step(images)
    assert not any(map(torch.equal, before, vae.parameters()))


@pytest.mark.slow
def test_aevb(data: Path, tmp_path: Path) -> None:
    flags = ["--paper", "--smoke", "--dataset", "mnist", "--data-root", str(data)]
    run("aevb/figures.py", *flags, "--out", str(tmp_path), "--objectives", "AEVB")
    result = rows(tmp_path / "bound_mnist.csv")
    assert list(dict.fromkeys(row["latent"] for row in result)) == ["3", "5", "10", "20", "200"]
    assert {row["hidden"] for row in result} == {"500"}


@pytest.mark.slow
def test_rao_blackwell(data: Path, tmp_path: Path) -> None:
    flags = ["--paper", "--smoke", "--data-root", str(data), "--out", str(tmp_path)]
    run("rao_blackwell/semi_supervised.py", *flags)
    result = rows(tmp_path / "semi_supervised.csv")
    assert {row["epoch"] for row in result} == {"1"}
    assert len({row["method"] for row in result}) == 8
    tuning = rows(tmp_path / "tuning.csv")
    assert {row["learning_rate"] for row in tuning} == {"0.001", "0.0003", "0.0001"}
    assert all(row["commit"] and row["machine"] for row in result)


@pytest.fixture
def rao_blackwell(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs the top of a script in this process, and returns its names."""
    folder = ROOT / "tutorials" / "rao_blackwell"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "common", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "common")  # other folders have a module of this name
    return lambda name: runpy.run_path(str(folder / f"{name}.py"))


@pytest.mark.parametrize(
    ("name", "flags", "columns", "count"),
    [
        pytest.param(
            "bernoullis",
            ["--draws", "3"],
            ("estimator", "k", "eta"),
            16,
            marks=pytest.mark.slow,
        ),
        pytest.param("mixture", [], ("method",), 7, marks=pytest.mark.slow),
    ],
    ids=["bernoullis", "mixture"],
)
def test_the_papers_scale_is_the_default(
    name: str,
    flags: list[str],
    columns: tuple[str, ...],
    count: int,
    rao_blackwell: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    as_a_command: None,
) -> None:
    """So that a few steps are all that is left to try: every estimator has its rows."""
    argv = [f"{name}.py", *flags, "--steps", "2", "--repeats", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    threads = torch.get_num_threads()
    rao_blackwell(name)["main"]()
    torch.set_num_threads(threads)
    result = rows(tmp_path / f"{name}.csv")
    assert len({tuple(row[c] for c in columns) for row in result if row[columns[-1]]}) == count
    assert all(row["seed"] == "0" and row["commit"] and row["machine"] for row in result)
    assert (tmp_path / f"{name}.png").exists()


def test_estimators_begin_alike(rao_blackwell: Callable[[str], dict[str, Any]]) -> None:
    """Same seed, same networks and same minibatches, whichever estimators ran before."""
    script = rao_blackwell("semi_supervised")

    def begin(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        run = script["Experiment"](name, 3, "cpu")
        model = [*run.model.parameters(), *run.guide.parameters()]
        return model, [*run.module.parameters()], torch.randperm(1000)

    first = {name: begin(name) for name in script["METHODS"]}
    for name in reversed(script["METHODS"]):
        again = begin(name)
        for a, b in zip(first[name][1], again[1], strict=True):
            assert torch.equal(a, b)
        for a, b in zip(
            (*first["exact sum"][0], first["exact sum"][2]), (*again[0], again[2]), strict=True
        ):
            assert torch.equal(a, b)
    assert len(first["RELAX"][1]) > len(first["exact sum"][1])


@pytest.mark.slow
def test_a_run_that_was_stopped_prints_what_a_whole_one_does(
    data: Path,
    tmp_path: Path,
    rao_blackwell: Callable[[str], dict[str, Any]],
    as_a_command: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main, saves, threads = rao_blackwell("semi_supervised")["main"], [], torch.get_num_threads()
    monkeypatch.setitem(main.__globals__, "draw_curves", lambda *_: None)  # to be quick
    argv = ["--methods", "NVIL", "--data-root", str(data), "--warmup", "1"]

    def without_times(text: str) -> list[str]:
        return [re.sub(r"[\d.]+( s| \|)$", "", line) for line in text.splitlines()]

    main([*argv, "--epochs", "2", "--out", str(tmp_path / "whole")])
    whole = without_times(capsys.readouterr().out)

    def stop(*args: Any, **extra: Any) -> None:
        save_checkpoint(*args, **extra)
        saves.append(args)
        if len(saves) in (1, 2):  # in front of a method, and within it
            raise KeyboardInterrupt

    monkeypatch.setitem(main.__globals__, "save_checkpoint", stop)
    parts = [*argv, "--out", str(tmp_path / "parts")]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            main([*parts, "--epochs", "1"])
    capsys.readouterr()
    main([*parts, "--epochs", "2"])
    assert without_times(capsys.readouterr().out) == whole
    torch.set_num_threads(threads)
    assert len(saves) == 3  # no epoch was trained twice

    first, again = (rows(tmp_path / run / "semi_supervised.csv") for run in ("whole", "parts"))
    for key in ("method", "epoch", "accuracy", "negative_elbo"):
        assert [row[key] for row in again] == [row[key] for row in first]
    assert ["--epochs 1" in row["command"] for row in again] == [True, False]  # who made it
    with pytest.raises(SystemExit, match="results with seed = 0, but seed is 1"):
        main([*parts, "--seed", "1"])


@pytest.mark.slow
def test_estimators_of_similar_names_are_trained_each(
    data: Path, tmp_path: Path, rao_blackwell: Callable[[str], dict[str, Any]], as_a_command: None
) -> None:
    """None begins with the checkpoint of another."""
    threads = torch.get_num_threads()
    argv = ["--smoke", "--data-root", str(data), "--out", str(tmp_path), "--methods"]
    rao_blackwell("semi_supervised")["main"]([*argv, "REINFORCE", "REINFORCE+"])
    torch.set_num_threads(threads)
    first, second = rows(tmp_path / "semi_supervised.csv")
    assert (first["method"], second["method"]) == ("REINFORCE", "REINFORCE+")
    assert first["negative_elbo"] != second["negative_elbo"]


@pytest.mark.slow
def test_moving_mnist(data: Path, tmp_path: Path) -> None:
    flags = ["--paper", "--data-root", str(data), "--batch", "200", "--epochs", "1"]
    run("rao_blackwell/moving_mnist.py", *flags, "--out", str(tmp_path), "--methods", "NVIL")
    (row,) = rows(tmp_path / "moving_mnist.csv")
    assert (row["method"], row["epoch"]) == ("NVIL", "1")


@pytest.mark.slow
def test_figure_2_of_thin(data: Path, tmp_path: Path) -> None:
    flags = ["--data-root", str(data), "--out", str(tmp_path), "--draws", "2", "--reverse", "1"]
    run("annealing/ppca_gradients.py", *flags, "--fit", "1", "--search", "1", "--images", "3")
    result = rows(tmp_path / "ppca_gradients.csv")
    assert [row["estimator"] for row in result] == [
        *("L-5", "L-5, learned reversal", "L-5, learned correction", "L-10"),
        *("A-5", "A-5, CV", "A-10", "A-10, CV"),
    ]
    assert (tmp_path / "ppca_gradients.png").exists()


@pytest.mark.slow
def test_manifolds(data: Path, tmp_path: Path) -> None:
    flags = ["--paper", "--smoke", "--dataset", "mnist", "--data-root", str(data)]
    run("aevb/manifold.py", *flags, "--out", str(tmp_path))
    assert [row["latent"] for row in rows(tmp_path / "manifold_mnist.csv")] == [
        "2",
        "5",
        "10",
        "20",
    ]
    assert (tmp_path / "manifold_mnist.png").exists()
    assert (tmp_path / "samples_mnist.png").exists()


@pytest.mark.slow
def test_bars(tmp_path: Path) -> None:
    path = tmp_path / "bars.png"
    run("truncated/bars.py", "--paper", "--seeds", "1", "--epochs", "1", "--output", str(path))
    (row,) = rows(path.with_suffix(".csv"))
    assert row["energy_9"]  # ten starts


@pytest.mark.slow
def test_correlated_bars(tmp_path: Path) -> None:
    path = tmp_path / "correlated.png"
    argv = ["--paper", "--images", "40", "--epochs", "1", "--output", str(path)]
    run("truncated/correlated_bars.py", *argv)
    assert [row["model"] for row in rows(path.with_suffix(".csv"))] == [
        "true",
        "two layers",
        "linear",
    ]


def test_missing_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"MNIST is not at .*train-images.*: pass --data-root"):
        mnist_images(tmp_path, True)
    with pytest.raises(SystemExit, match="Frey faces are not at"):
        frey(tmp_path)
    with pytest.raises(SystemExit, match="CIFAR10 is not at"):
        color("cifar10", tmp_path)


@pytest.mark.slow
def test_truncated_posteriors(tmp_path: Path, as_a_command: None) -> None:
    path = tmp_path / "image.png"
    imsave(path, torch.rand(20, 20).numpy(), cmap="gray", vmin=0, vmax=1)
    main = runpy.run_path(str(ROOT / "tutorials" / "truncated" / "denoising.py"))["main"]
    main(["--paper", "--smoke", "--image", str(path), "--out", str(tmp_path)])
    result = rows(tmp_path / "denoising.csv")
    assert [row["epoch"] for row in result] == ["0", "2"]
    assert (tmp_path / "denoising.png").exists()
