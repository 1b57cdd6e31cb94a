"""Reproduce figures 2 and 3 of Kingma and Welling (2014): AEVB, wake-sleep and Monte Carlo EM.

``--figure bound`` plots the variational lower bound of training and test images over the number of
training samples, for several dimensions of the latent space (figure 2). ``--figure marginal`` plots
the marginal likelihood of few and many training images, for a latent space of 3 dimensions
(figure 3). It is estimated by importance sampling around posterior draws, and by the estimator of
appendix D (see ``estimators.py``). The default data are scikit-learn's digits::

    python tutorials/aevb/figures.py --figure bound
    python tutorials/aevb/figures.py --figure bound --dataset mnist --data-root data --hidden 500
    python tutorials/aevb/figures.py --figure bound --dataset frey --data-root data --hidden 200
    python tutorials/aevb/figures.py --figure marginal --dataset mnist --data-root data \\
        --num-train 1000 50000 --num-evaluated 100
    python tutorials/aevb/figures.py --figure bound --dataset mnist --data-root data --paper

``--paper`` uses the networks, dimensions and training samples of the paper.
It takes days on a CPU.
"""

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import pyro
import torch
from common import LEARNING_RATES, OBJECTIVES, VAE, Data, Training, bound, load
from estimators import Estimates, marginal
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter
from torch import Tensor
from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from data import add_data_flags, add_device_flag
from results import commit, machine, write

from pyro_mcvae.evaluation.plots import STYLES

FIGURES = {
    "bound": {"objectives": "Wake-Sleep,AEVB", "latent": [3, 10, 20], "hidden": 200},
    "marginal": {"objectives": "Wake-Sleep,MCEM,AEVB", "latent": [3], "hidden": 100},
}
# The settings of the paper, by figure and data.
PAPER = {
    ("bound", "mnist"): {"hidden": 500, "latent": [3, 5, 10, 20, 200], "samples": 100_000_000},
    ("bound", "frey"): {"hidden": 200, "latent": [2, 5, 10, 20], "samples": 100_000_000},
    ("marginal", "mnist"): {
        "hidden": 100,
        "latent": [3],
        "samples": 60_000_000,
        "num_train": [1000, 50_000],
    },
}
SERIES = dict(zip(("AEVB", "Wake-Sleep", "MCEM"), STYLES[1:4], strict=True))


@dataclass
class Point:
    """A line of the CSV: a mean over images, in nats per image."""

    figure: str
    dataset: str
    num_train: int
    latent: int
    hidden: int
    objective: str
    samples: int  # training samples evaluated
    split: str
    seed: int
    cpu_seconds: float  # of training
    commit: str
    machine: str
    # As in Estimates.
    value: float
    error: float
    monte_carlo_error: float
    unreliable: float
    appendix_d: float


def marks(first: float, last: float, count: int) -> list[int]:
    """Return sample counts at which to evaluate, evenly spaced on a log scale."""
    powers = torch.linspace(0, 1, count, dtype=torch.float64)
    return [round(first * (last / first) ** float(p)) for p in powers]


def estimate(args: argparse.Namespace, vae: VAE, x: Tensor, name: str) -> Estimates:
    if args.figure == "bound":
        return Estimates(*bound(vae, x))
    # Monte Carlo EM has no encoder from which the chains of the estimate could start.
    guide = vae.prior if name == "MCEM" else vae.guide
    return marginal(vae, x, guide, args.draws, args.particles, args.warmup)


def run(args: argparse.Namespace, data: Data) -> list[Point]:
    """Train every objective in every setting, and evaluate it during training."""
    points: list[Point] = []
    sizes = args.num_train or [len(data.train)]
    for size in sizes:
        train = data.train[:size]
        evaluated = {"train": train[: args.num_evaluated], "test": data.test[: args.num_evaluated]}
        for latent in args.latent:
            for name in args.objectives:
                pyro.set_rng_seed(args.seed)
                vae = VAE(train.shape[-1], args.hidden, latent, data.binary).to(args.device)
                rate = args.learning_rate or LEARNING_RATES[name]
                training = Training(name, vae, train, args.batch_size, rate)
                label = f"{data.name} {size}, {latent} latents, {name}"
                quiet = 30 if "CI" in os.environ else 0.5
                with tqdm(total=args.samples, desc=label, unit="x", mininterval=quiet) as bar:
                    wanted = marks(args.first, args.samples, args.checkpoints)
                    for seen in training.run(wanted):
                        bar.update(seen - bar.n)
                        for split, x in evaluated.items():
                            result = estimate(args, vae, x, name)
                            setting = (args.figure, data.name, size, latent, args.hidden, name)
                            run = args.seed, training.cpu_seconds, args.commit, machine()
                            points.append(Point(*setting, seen, split, *run, *astuple(result)))
                        bar.set_postfix_str(f"test {points[-1].value:.1f}", refresh=False)
                rows = [asdict(point) for point in points]
                write(
                    rows, args.out / f"{args.figure}_{data.name}.csv"
                )  # the run may be interrupted
    return points


def read(path: Path) -> list[Point]:
    """Read the CSV of an earlier run, to plot it again."""
    kinds = Point.__annotations__
    with path.open() as file:
        return [Point(**{k: kinds[k](v) for k, v in row.items()}) for row in csv.DictReader(file)]


def draw(points: Sequence[Point], path: Path) -> None:
    """Plot the bound or the likelihood over samples, with a panel for each setting."""
    bounds = points[0].figure == "bound"
    settings = list(dict.fromkeys((p.num_train, p.latent) for p in points))
    figure = Figure(figsize=(3.3 * len(settings) + 2.2, 3.6), layout="constrained")
    panels = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
    for axes, setting in zip(panels, settings, strict=True):
        mine = [p for p in points if (p.num_train, p.latent) == setting]
        for name in dict.fromkeys(p.objective for p in mine):
            for split, style in (("train", "-"), ("test", "--")):
                curve = [p for p in mine if p.objective == name and p.split == split]
                x, y = torch.tensor([(p.samples, p.value) for p in curve]).T
                label = f"{name} ({split})"
                color, marker = SERIES[name]
                axes.plot(x, y, style, marker=marker, color=color, ms=4, lw=1.6, label=label)
        title = f"$N_z$ = {setting[1]}" if bounds else f"$N_{{train}}$ = {setting[0]}"
        axes.set(title=f"{points[0].dataset}, {title}", xlabel="# training samples evaluated")
        axes.grid(alpha=0.3)
        if bounds:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            # Leave out the untrained model, whose value is much lower than all others.
    late = sorted(p.value for p in points if p.samples > points[0].samples)
    low = late[len(late) // 20]
    margin = 0.05 * (late[-1] - low)
    panels[0].set_ylim(low - margin, late[-1] + margin)
    panels[0].set_ylabel("lower bound, nats" if bounds else "marginal log-likelihood, nats")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=150)


def positive(text: str) -> int:
    if not (value := int(float(text))) > 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def names(text: str) -> list[str]:
    chosen = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in chosen if name not in OBJECTIVES]:
        known = ", ".join(OBJECTIVES)
        raise argparse.ArgumentTypeError(f"unknown objective {unknown[0]!r}; known are {known}")
    return chosen


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--figure", choices=list(FIGURES), default="bound")
    add("--dataset", choices=["digits", "mnist", "frey"], default="digits")
    add_data_flags(parser)
    add("--objectives", type=names, metavar="A,B", help=f"some of {', '.join(OBJECTIVES)}")
    add("--latent", type=positive, nargs="+", metavar="N", help="dimensions of the latent space")
    add("--hidden", type=positive, help="units of the hidden layers")
    add("--num-train", type=positive, nargs="+", metavar="N", help="images; default: all")
    add("--samples", type=positive, default=200_000, help="training samples of each objective")
    add("--first", type=positive, default=10_000, help="samples before the first evaluation")
    add("--checkpoints", type=positive, default=10, help="number of evaluations during training")
    add("--draws", type=positive, default=20, help="posterior draws of the marginal's guide")
    add("--particles", type=positive, default=1000, help="weights of the marginal's estimate")
    add("--warmup", type=positive, default=60, help="transitions before the draws of appendix D")
    add(
        "--num-evaluated",
        type=positive,
        default=1000,
        metavar="N",
        help="number of evaluated images of each split",
    )
    add("--batch-size", type=positive, default=100)
    add("--learning-rate", type=float, help="learning rate of Adagrad; default: one per objective")
    add("--seed", type=int, default=0)
    add_device_flag(parser)
    add("--out", type=Path, default=Path("aevb"), metavar="DIR")
    add("--redraw", action="store_true", help="plot the CSV of an earlier run")
    add("--paper", action="store_true", help="settings of the paper, on mnist or frey")
    add("--smoke", action="store_true", help="a trial run with few images and steps")
    args = parser.parse_args(argv)
    if args.paper:
        if (setting := PAPER.get((args.figure, args.dataset))) is None:
            known = ", ".join(f"--figure {f} --dataset {d}" for f, d in PAPER)
            parser.error(f"--paper has the settings of the paper only for {known}")
        vars(args).update(setting)
    defaults = FIGURES[args.figure]
    args.objectives = args.objectives or names(str(defaults["objectives"]))
    args.latent = args.latent or defaults["latent"]
    args.hidden = args.hidden or defaults["hidden"]
    if args.smoke:
        args.samples, args.first, args.checkpoints, args.num_evaluated = 1000, 100, 2, 20
        args.num_train, args.warmup, args.draws, args.particles = [200], 3, 3, 50
        if args.paper:  # a step or two of the paper's networks
            args.samples, args.num_evaluated = 200, 3
        else:
            args.latent, args.hidden = [2], 20
    return args


def main(argv: Sequence[str] | None = None) -> list[Point]:
    args = parse(argv)
    torch.set_num_threads(1)  # CPU times are comparable only with one thread.
    pyro.enable_validation(False)  # Validation takes a large part of a step of such small models.
    args.out.mkdir(parents=True, exist_ok=True)
    args.commit = (
        commit()
    )  # Read the commit at the start, because files may change during a long run.
    stem = args.out / f"{args.figure}_{args.dataset}"
    if args.redraw:
        points = read(stem.with_suffix(".csv"))
    else:
        data = load(args.dataset, args.data_root, args.download)
        points = run(args, data.to(args.device))
    draw(points, stem.with_suffix(".png"))
    print(f"\n{stem}.csv and {stem}.png")
    return points


if __name__ == "__main__":
    main()
