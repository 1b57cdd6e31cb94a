"""Train one variational autoencoder with every objective of the package, and compare them.

The model and the guide are plain Pyro: nothing in them knows which objective trains them.
The script

1. trains a fresh copy of the same VAE with each objective in ``OBJECTIVES``;
2. judges all of them by one yardstick, an importance-weighted estimate of log p(x) on held-out
   images (the objectives' own bounds are not comparable with each other);
3. prints a table, and draws learning curves, reconstructions and samples.

Run it::

    python tutorials/quickstart.py
    python tutorials/quickstart.py --objective IWAE-10 --epochs 500 --seed 1
    python tutorials/quickstart.py --compiled --objective SIS-5 --epochs 10
    python tutorials/quickstart.py --dataset mnist --data-root data --device cuda
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn
from tqdm import tqdm

from pyro_mcvae import CompiledELBO, TraceAIS_ELBO, TraceIWAE_ELBO, TraceSGVB_ELBO, TraceSIS_ELBO

# What is compared: one line per objective, each a recipe for the loss that `pyro.infer.SVI` gets.
OBJECTIVES: dict[str, Callable[[], Any]] = {
    "SGVB": lambda: TraceSGVB_ELBO(),
    "IWAE-10": lambda: TraceIWAE_ELBO(10),
    "SIS-5": lambda: TraceSIS_ELBO(5),
    "AIS-5": lambda: TraceAIS_ELBO(5),
}


# --- The model and the guide: the part that you would bring ---------------------------------------


class VAE(nn.Module):
    """A variational autoencoder for binary images, one row of pixels per image.

    model:  z ~ Normal(0, I);   x | z ~ Bernoulli(decoder(z))
    guide:  z | x ~ Normal(loc(x), scale(x))
    """

    def __init__(self, num_pixels: int, num_hidden: int, num_latents: int) -> None:
        super().__init__()
        self.num_latents = num_latents
        self.encoder = nn.Sequential(
            nn.Linear(num_pixels, num_hidden), nn.Tanh(), nn.Linear(num_hidden, 2 * num_latents)
        )
        self.decoder = nn.Sequential(
            nn.Linear(num_latents, num_hidden), nn.Tanh(), nn.Linear(num_hidden, num_pixels)
        )

    def model(self, x: Tensor) -> None:
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(self.num_latents), 1.0).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", len(x)):
            loc, log_scale = self.encoder(x).chunk(2, dim=-1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


# --- The data -------------------------------------------------------------------------------------


@dataclass
class Task:
    """A data set and the settings that suit it. An image is a row of gray values in [0, 1].

    The model is one of binary pixels: a gray value is a pixel's probability of being white. Each
    training step draws anew; the test images are drawn once, the same for every objective.
    """

    train: Tensor
    test: Tensor
    num_hidden: int
    num_latents: int
    batch_size: int
    learning_rate: float
    epochs: int
    test_binary: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.test_binary = self.test.bernoulli(generator=torch.Generator().manual_seed(0))

    def narrow(self, limit: int | None, device: str) -> None:
        """Keep at most ``limit`` images of each kind, and move them to the device."""
        for name in ("train", "test", "test_binary"):
            setattr(self, name, getattr(self, name)[:limit].to(device))


def load_digits() -> Task:
    """The 1,797 digits of 8x8 pixels that come with scikit-learn: nothing to download."""
    from sklearn import datasets

    images = torch.tensor(datasets.load_digits().data, dtype=torch.float) / 16
    # The split does not depend on --seed: runs with different seeds compare.
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    train, test = images[:1500], images[1500:]
    return Task(train, test, 200, 16, batch_size=100, learning_rate=3e-3, epochs=150)


def load_mnist(root: str) -> Task:
    """MNIST from ``root/MNIST/raw``; torchvision downloads what is missing there."""
    from torchvision.datasets import MNIST

    train, test = (
        MNIST(root, train=train, download=True).data.flatten(1).float() / 255
        for train in (True, False)
    )
    return Task(train, test[:1000], 400, 32, batch_size=100, learning_rate=1e-3, epochs=20)


# --- Training and judging -------------------------------------------------------------------------


@dataclass
class Run:
    """What came of one objective; values are in nats per image."""

    name: str
    vae: VAE
    bounds: list[float]  # the objective's own bound, averaged over each epoch
    log_prob_curve: dict[int, float]  # epoch -> mean held-out log p(x)
    log_prob: Tensor  # log p(x) of each held-out image after training, shape [num_test]
    seconds_per_epoch: float


@torch.no_grad()
def held_out_log_prob(vae: VAE, x: Tensor, num_particles: int) -> Tensor:
    """Estimate log p(x) of each image, in the same way whatever objective trained the VAE."""
    iwae = TraceIWAE_ELBO(num_particles)
    chunks = x.split(50)  # num_particles * 50 decoded images fit in memory
    return torch.cat([iwae.bounds(vae.model, vae.guide, chunk).per_datum for chunk in chunks])


def train(name: str, task: Task, seed: int, compiled: bool = False) -> Run:
    """Train a VAE with the objective of this name, and estimate log p(x) on the way."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)  # Every objective starts from the same weights.
    num_train, num_pixels = task.train.shape
    vae = VAE(num_pixels, task.num_hidden, task.num_latents).to(task.train.device)
    loss_fn = CompiledELBO(OBJECTIVES[name]()) if compiled else OBJECTIVES[name]()
    svi = SVI(vae.model, vae.guide, Adam({"lr": task.learning_rate}), loss=loss_fn)

    bounds, seconds, curve = [], [], {}
    quiet = 30 if "CI" in os.environ else 0.1  # A log file needs fewer updates than a terminal.
    label = f"{name}, compiled" if compiled else name
    progress = tqdm(range(1, task.epochs + 1), f"{label:>10}", unit="epoch", mininterval=quiet)
    for epoch in progress:
        start, loss = time.perf_counter(), 0.0
        for rows in torch.randperm(num_train, device=task.train.device).split(task.batch_size):
            loss += svi.step(task.train.index_select(0, rows).bernoulli())
        seconds.append(time.perf_counter() - start)
        bounds.append(-loss / num_train)
        progress.set_postfix_str(f"bound {bounds[-1]:.2f}", refresh=False)
        if epoch % max(1, task.epochs // 25) == 0:
            log_prob = held_out_log_prob(vae, task.test_binary, num_particles=100)
            curve[epoch] = log_prob.mean().item()
    log_prob = held_out_log_prob(vae, task.test_binary, num_particles=1000)
    # The median: the first epoch also pays for warming up, and for the compiler.
    return Run(label, vae, bounds, curve, log_prob, statistics.median(seconds))


# --- The table and the figure ---------------------------------------------------------------------


def mean_and_error(values: Tensor) -> str:
    """Format the mean over images and its standard error."""
    return f"{values.mean():.2f} ± {values.std() / len(values) ** 0.5:.2f}"


def table(runs: Sequence[Run]) -> str:
    """Compare the runs; the gain is paired (same images), so its error is the smaller one."""
    first = runs[0]
    over_first = f"gain over {first.name}"
    rows = [("objective", "training bound", "held-out log p(x)", over_first, "s/epoch")]
    for run in runs:
        gain = "" if run is first else mean_and_error(run.log_prob - first.log_prob)
        bound, seconds = f"{run.bounds[-1]:.2f}", f"{run.seconds_per_epoch:.3f}"
        rows.append((run.name, bound, mean_and_error(run.log_prob), gain, seconds))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def draw_curves(bound_axes: Axes, held_out_axes: Axes, runs: Sequence[Run]) -> None:
    style = "-" if len(runs[0].bounds) > 30 else "o-"  # A single epoch has no line to see.
    for run in runs:
        epochs = range(1, len(run.bounds) + 1)
        bound_axes.plot(epochs, run.bounds, style, label=run.name, lw=1, ms=3.5)
        held_out_axes.plot(*zip(*run.log_prob_curve.items(), strict=True), "o-", ms=3.5)
    bound_axes.set(title="Training: the objective's own bound", ylabel="nats per image")
    bound_axes.legend(loc="lower right")
    held_out_axes.set(title="Held-out images: log p(x), one estimator for all")
    # The first epochs lie far below the rest and would flatten everything else.
    start = len(runs[0].bounds) // 20
    shown = [v for run in runs for v in (*run.bounds[start:], *run.log_prob_curve.values())]
    low, high = min(run.bounds[start] for run in runs), max(shown)
    held_out_axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    for axes in (bound_axes, held_out_axes):
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)


def draw_images(axes: Axes, images: Tensor) -> None:
    """Draw square images side by side, with white gaps between them."""
    side = round(images.shape[-1] ** 0.5)
    gap = side // 8
    tiles = nn.functional.pad(images.view(-1, side, side), (0, gap), value=float("nan"))
    strip = tiles.permute(1, 0, 2).flatten(1)[:, :-gap].cpu().numpy()
    axes.imshow(strip, cmap="gray", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


@torch.no_grad()
def draw(runs: Sequence[Run], task: Task, path: Path, num_images: int = 12) -> None:
    """Save the figure: curves above, one row of images per objective below."""
    num_rows = len(runs) + 2
    figure = Figure(figsize=(10, 3.6 + 0.5 * num_rows), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(3.6, 0.5 * num_rows))
    draw_curves(*upper.subplots(1, 2, sharey=True), runs)

    rows = lower.subplots(num_rows, 2)
    rows[0, 0].set(title="Held-out images and their reconstructions")
    rows[0, 1].set(title="Training images and samples from the model")
    draw_images(rows[0, 0], task.test[:num_images])
    draw_images(rows[0, 1], task.train[:num_images])
    x = task.test_binary[:num_images]
    draw_images(rows[1, 0], x)
    draw_images(rows[1, 1], task.train[:num_images].bernoulli())
    for (left, right), run in zip(rows[2:], runs, strict=True):
        loc, _ = run.vae.encoder(x).chunk(2, dim=-1)
        z = torch.randn_like(loc)
        draw_images(left, run.vae.decoder(loc).sigmoid())
        draw_images(right, run.vae.decoder(z).sigmoid())
    labels = ["images", "binarized", *(run.name for run in runs)]
    for axes, label in zip(rows[:, 0], labels, strict=True):
        axes.set_ylabel(label, rotation=0, ha="right", va="center")
    figure.savefig(path, dpi=150)


# --- The command line -----------------------------------------------------------------------------


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dataset", choices=("digits", "mnist"), default="digits")
    add("--data-root", default="data", metavar="DIR", help="where MNIST is, or is downloaded to")
    add("--objective", action="append", metavar="NAME", help="one or more; default: all")
    add("--epochs", type=positive_int, help="default: 150 for digits, 20 for mnist")
    add("--batch-size", type=positive_int, help="default: 100")
    add("--limit", type=positive_int, metavar="N", help="train and test on N images at most")
    add("--seed", type=int, default=0)
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--compiled", action="store_true", help="each twice: plain and compiled")
    add("--output", type=Path, default=Path("quickstart.png"), metavar="FILE")
    args = parser.parse_args(argv)

    names = [name for names in args.objective or OBJECTIVES for name in names.split(",")]
    if unknown := [name for name in names if name not in OBJECTIVES]:
        parser.error(f"unknown objective {unknown[0]!r}; known are {', '.join(OBJECTIVES)}")
    args.objective = list(dict.fromkeys(names))  # Without repetitions, in the order given.
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no GPU here; use --device cpu")
    return args


def main(argv: Sequence[str] | None = None) -> list[Run]:
    args = parse(argv)
    if args.dataset == "digits":
        # Matrices this small gain little from a second thread, and lose much on a busy machine.
        torch.set_num_threads(1)
    task = load_digits() if args.dataset == "digits" else load_mnist(args.data_root)
    task.narrow(args.limit, args.device)
    task.epochs = args.epochs or task.epochs
    task.batch_size = args.batch_size or task.batch_size

    ways = (False, True) if args.compiled else (False,)
    runs = [train(name, task, args.seed, way) for name in args.objective for way in ways]
    print(f"\n{args.dataset}, {task.epochs} epochs; nats per image, ± standard error over images")
    print(table(runs))
    draw(runs, task, args.output)
    print(f"figure: {args.output}")
    return runs


if __name__ == "__main__":
    main()
