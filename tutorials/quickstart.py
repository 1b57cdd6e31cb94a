"""Train one variational autoencoder with every objective of the package, and compare them.

The model and the guide are plain Pyro, and do not depend on the objective. ``compare`` trains a
copy with each objective for the same number of epochs. It evaluates all copies with the same
estimate of log p(x) on held-out images, by annealed chains that start from draws of the encoder.
(The bounds of different objectives are not comparable. Importance weights would underestimate a
model whose encoder was trained with chains.)

Run it::

    python tutorials/quickstart.py
    python tutorials/quickstart.py --objective IWAE-10 --epochs 500 --seed 1
    python tutorials/quickstart.py --compiled --objective SIS-5 --epochs 10
    python tutorials/quickstart.py --dataset mnist --data-root data --device cuda
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_mcvae import (
    CompiledELBO,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    compare,
)
from pyro_mcvae.evaluation.compare import Comparison
from pyro_mcvae.evaluation.plots import STYLES

# The losses to compare, as `pyro.infer.SVI` takes them.
OBJECTIVES = {
    "SGVB": TraceSGVB_ELBO(),
    "IWAE-10": TraceIWAE_ELBO(10),
    "SIS-5": TraceSIS_ELBO(5),
    "AIS-5": TraceAIS_ELBO(5),
}


class VAE(nn.Module):
    """A model and guide of binary images, one row of pixels per image.

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


def load_digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 digits of 8x8 pixels: gray values, train and test."""
    from sklearn import datasets

    images = torch.tensor(datasets.load_digits().data, dtype=torch.float) / 16
    # The split does not depend on --seed, so that runs with different seeds are comparable.
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    return images[:1500], images[1500:]


def load_mnist(root: str) -> tuple[Tensor, Tensor]:
    """Return MNIST from ``root/MNIST/raw``. torchvision (extra ``tutorials``) downloads it."""
    from torchvision.datasets import MNIST

    train, test = (
        MNIST(root, train=train, download=True).data.flatten(1).float() / 255
        for train in (True, False)
    )
    return train, test[:1000]


def draw_images(axes: Axes, images: Tensor) -> None:
    """Plot square images side by side, with white gaps between them."""
    side = round(images.shape[-1] ** 0.5)
    gap = side // 8
    tiles = nn.functional.pad(images.view(-1, side, side), (0, gap), value=float("nan"))
    strip = tiles.permute(1, 0, 2).flatten(1)[:, :-gap].cpu().numpy()
    axes.imshow(strip, cmap="gray", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def draw_curves(figure: SubFigure, result: Comparison) -> None:
    """Plot each objective's own bound, and the evidence of the held-out images, over the steps."""
    training, held_out = figure.subplots(1, 2)
    for (name, trained), (color, marker) in zip(result.items(), cycle(STYLES), strict=False):
        # At most 200 points, each the mean of some steps.
        size = max(1, len(trained.bounds) // 200)
        means = torch.tensor(trained.bounds).unfold(0, size, size).mean(-1)
        steps = size * torch.arange(1, len(means) + 1)
        training.plot(steps, means, color=color, linewidth=1)
        evidences = [evidence for _, evidence in trained.curve.values()]
        errors = [2 * float(e.mean_standard_error) for e in evidences]
        values = [float(e.mean) for e in evidences]
        held_out.errorbar(
            list(trained.curve),
            values,
            errors,
            color=color,
            marker=marker,
            markersize=5,
            label=name,
        )
    for axes in (training, held_out):
        # Leave out the first steps, whose bounds are far below all others.
        late = [v for line in axes.lines for v in line.get_ydata()[len(line.get_ydata()) // 5 :]]
        margin = 0.1 * (max(late) - min(late)) + 1e-3
        axes.set_ylim(min(late) - margin, max(late) + margin)
        axes.set_xlabel("steps of training")
        axes.grid(alpha=0.3)
    training.set(title="Each objective's own bound: not comparable", ylabel="nats per image")
    held_out.legend(loc="lower right")
    held_out.set(title="Held-out log p(x): higher is better")


@torch.no_grad()
def draw(result: Comparison, vae: VAE, train: Tensor, test: Tensor, x: Tensor, path: Path) -> None:
    """Save the figure: curves above, one row of images per objective below."""
    count, num_rows = 12, len(result) + 2
    figure = Figure(figsize=(10, 3.6 + 0.5 * num_rows), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(3.6, 0.5 * num_rows))
    draw_curves(upper, result)

    rows = lower.subplots(num_rows, 2)
    rows[0, 0].set(title="Held-out images and their reconstructions")
    rows[0, 1].set(title="Training images and samples from the model")
    draw_images(rows[0, 0], test[:count])
    draw_images(rows[0, 1], train[:count])
    draw_images(rows[1, 0], x[:count])
    draw_images(rows[1, 1], train[:count].bernoulli())
    for name, (left, right) in zip(result, rows[2:], strict=True):
        result.use(name)  # The VAE now has the parameters of this objective.
        loc, _ = vae.encoder(x[:count]).chunk(2, dim=-1)
        draw_images(left, vae.decoder(loc).sigmoid())
        draw_images(right, vae.decoder(torch.randn_like(loc)).sigmoid())
    for axes, label in zip(rows[:, 0], ["images", "binarized", *result], strict=True):
        axes.set_ylabel(label, rotation=0, ha="right", va="center")
    figure.savefig(path, dpi=150)


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dataset", choices=("digits", "mnist"), default="digits")
    add(
        "--data-root", default="data", metavar="DIR", help="folder with MNIST, or to download it to"
    )
    add("--objective", action="append", metavar="NAME", help="one or more; default: all")
    add("--epochs", type=positive_int, help="default: 50 for digits, 20 for mnist")
    add("--batch-size", type=positive_int, default=100)
    add("--limit", type=positive_int, metavar="N", help="train and test on N images at most")
    add("--seed", type=int, default=0)
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--compiled", action="store_true", help="run each objective uncompiled and compiled")
    add("--output", type=Path, default=Path("quickstart.png"), metavar="FILE")
    args = parser.parse_args(argv)

    names = [name for names in args.objective or OBJECTIVES for name in names.split(",")]
    if unknown := [name for name in names if name not in OBJECTIVES]:
        parser.error(f"unknown objective {unknown[0]!r}; known are {', '.join(OBJECTIVES)}")
    args.objective = list(dict.fromkeys(names))  # Remove repetitions, and keep the order.
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: no GPU is available; use --device cpu")
    return args


def main(argv: Sequence[str] | None = None) -> Comparison:
    args = parse(argv)
    if args.dataset == "digits":
        # For small matrices a second thread gains little, and costs much on a busy machine.
        torch.set_num_threads(1)
        images, sizes, learning_rate, epochs = load_digits(), (200, 16), 3e-3, 50
    else:
        images, sizes, learning_rate, epochs = load_mnist(args.data_root), (400, 32), 1e-3, 20
    train, test = (gray[: args.limit] for gray in images)
    # Pixels are binary: a gray value is the probability that a pixel is white. Test images are
    # drawn once, and training images again in every epoch.
    x = test.bernoulli(generator=torch.Generator().manual_seed(0)).to(args.device)
    train = train.to(args.device)

    def minibatches() -> Iterator[Tensor]:
        for rows in torch.randperm(len(train), device=train.device).split(args.batch_size):
            yield train.index_select(0, rows).bernoulli()

    losses = {}
    for name in args.objective:
        if args.compiled:
            losses[name] = OBJECTIVES[name]
            losses[f"{name}, compiled"] = CompiledELBO(OBJECTIVES[name])
        else:  # Replay the operations of a step: the same numbers in half of the time.
            losses[name] = CompiledELBO(OBJECTIVES[name], backend="eager")

    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    vae = VAE(train.shape[1], *sizes).to(args.device)
    result = compare(
        vae.model,
        vae.guide,
        x,
        losses=losses,
        optim=Adam({"lr": learning_rate}),
        batches=minibatches,
        num_epochs=args.epochs or epochs,
        num_checks=12,
        # Evaluate with 30 chains of 10 steps for each image.
        schedule=10,
        num_particles=30,
        seed=args.seed,
    )
    print(result)
    draw(result, vae, train, test, x, args.output)
    print(f"figure: {args.output}")
    return result


if __name__ == "__main__":
    main()
