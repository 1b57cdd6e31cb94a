"""Learn correlated bars with a decoder of two layers: pairs of bars that never appear together.

The images come from a network with a unit per bar and the bars as fields. The first bar of the rows
sets the unit of the second bar below zero, and the last bar of the columns the unit of the bar
before it. These two pairs never appear together, although their latents are independent. A linear
decoder cannot represent this, but the network of 8-8-16 units of ``bars.py`` can (Guiraud et al.
2021, appendix B.1). For each learned model, the script prints the exact log p(x) of the images (256
states), and the log probability of the two excluded pairs relative to other pairs.

    python tutorials/truncated/correlated_bars.py
    python tutorials/truncated/correlated_bars.py --paper

``--paper`` takes the best of ten starts.
"""

import argparse
import copy
import sys
from pathlib import Path

import pyro
import torch
from torch import Tensor

from pyro_mcvae import TruncatedPosterior
from pyro_mcvae.evaluation.plots import STYLES

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from data import add_device_flag
from results import Results
from truncated.bars import NUM_BARS, PI, SIDE, SIGMA, Model, bars, best_of

# The first bar of each pair switches off the second.
PAIRS = ((0, 1), (7, 6))


@torch.no_grad()
def true_model(images: Tensor) -> Model:
    """Return the network that generates the images."""
    model = Model(images)
    first, _, second = model.decoder
    first.weight.copy_(torch.eye(NUM_BARS))
    for bar, other in PAIRS:
        first.weight[other, bar] = -1.0
    second.weight.copy_(bars().t())
    model.pi.fill_(PI)
    model.sigma.fill_(SIGMA)
    return model


@torch.no_grad()
def draws(model: Model, count: int) -> Tensor:
    """Return images that a model generates."""
    z = torch.bernoulli(model.pi.expand(count, NUM_BARS))
    mean = model.decoder(z)
    return mean + model.sigma * torch.randn_like(mean)


def make_data(count: int) -> Tensor:
    return draws(true_model(torch.randn(2, SIDE**2)), count)


def evidence(model: Model, images: Tensor) -> Tensor:
    """Return the exact log p(x) of each image under the parameters of a model."""
    other = copy.copy(model)  # with the same parameters
    other.images = images
    return TruncatedPosterior(other, 2**NUM_BARS).posterior(torch.arange(len(images))).free_energy


def pairs() -> tuple[list[tuple[int, int]], Tensor]:
    """Return all pairs of bars, and images of both bars without noise."""
    result = [(a, b) for a in range(NUM_BARS) for b in range(a + 1, NUM_BARS)]
    fields = bars()
    return result, torch.stack([fields[a] + fields[b] for a, b in result])


def ratios(model: Model) -> Tensor:
    """
    Return log p(image of both bars) for the excluded pairs, minus the mean over the other pairs.
    """
    result, images = pairs()
    discouraged = torch.tensor([set(p) in [set(q) for q in PAIRS] for p in result])
    value = evidence(model, images.to(model.images)).cpu()
    return value[discouraged] - value[~discouraged].mean()


def draw(
    data: Tensor, best: dict[str, Model], curves: dict[str, list[list[float]]], path: Path
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    images = pairs()[1]
    truth = evidence(true_model(images), images)
    for (name, own), (color, marker) in zip(curves.items(), STYLES[1:3], strict=True):
        for i, curve in enumerate(own):
            left.plot(range(1, len(curve) + 1), curve, lw=0.8, color=color, label=name * (i == 0))
        at = evidence(best[name], images.to(best[name].images)).cpu()
        middle.plot(truth, at, linestyle="", marker=marker, ms=4, color=color, label=name)
    left.set(title="Free energy per image, every start", xlabel="epoch", ylabel="nats")
    left.legend()
    ends = [float(truth.min()), float(truth.max())]
    middle.plot(ends, ends, "k-", lw=0.6)
    middle.set(title="Images of two bars", xlabel="true log p(x), nats", ylabel="learned")
    middle.legend()
    rows = [data[:6], *(draws(m, 6) for m in best.values())]
    shown = torch.nn.functional.pad(
        torch.stack(rows).cpu().reshape(len(rows), 6, SIDE, SIDE), (0, 1, 0, 1), value=torch.nan
    )
    right.imshow(shown.permute(0, 2, 1, 3).flatten(2).flatten(0, 1), cmap="gray")
    right.set(title="Images and draws", xticks=[], facecolor="C0")
    at = [SIDE / 2 - 0.5 + i * (SIDE + 1) for i in range(len(rows))]
    right.set_yticks(at, ["images", *best])
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paper", action="store_true", help="ten starts")
    add_device_flag(parser)
    parser.add_argument("--output", type=Path, default=Path("correlated_bars.png"))
    args = parser.parse_args(argv)
    if args.paper:
        args.starts = 10
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    pyro.set_rng_seed(args.seed)
    images = make_data(args.images).to(args.device)
    best, curves = {}, {}
    for name in ("two layers", "linear"):
        linear = name == "linear"
        best[name], curves[name] = best_of(images, args.starts, args.epochs, linear)
        ends = ", ".join(f"{curve[-1]:.2f}" for curve in curves[name])
        print(f"{name}: F/N of the starts {ends}", flush=True)
    models = {"true": true_model(images), **best}
    results = Results(args.output.with_suffix(".csv"), args.seed, argv)
    for name, model in models.items():
        mean = evidence(model, images).mean()
        said = ", ".join(f"{r:.1f}" for r in ratios(model))
        print(f"{name}: log p(x) {mean:.2f} per image, excluded pairs {said} nats")
        of_pairs = {f"pair_{i}": float(r) for i, r in enumerate(ratios(model))}
        results.add(model=name, evidence=float(mean), **of_pairs)
    draw(images, best, curves, args.output)
    return tuple(ratios(model) for model in models.values())


if __name__ == "__main__":
    main()
