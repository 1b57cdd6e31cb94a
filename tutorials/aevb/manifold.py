"""Figures 4 and 5 of Kingma and Welling (2014): manifolds and samples of VAEs.

Figure 4: the decoder's means on a grid of the unit square, whose points are mapped to two latents
by the inverse CDF of the normal prior, for MNIST and Frey faces. Figure 5: random samples of models
of MNIST with 2, 5, 10 and 20 latents. The default data are scikit-learn's digits::

    python tutorials/aevb/manifold.py
    python tutorials/aevb/manifold.py --dataset mnist --data-root data --hidden 500 --samples 1e6
    python tutorials/aevb/manifold.py --dataset frey --data-root data --hidden 200 --samples 1e6

The paper does not have the number of training samples; ``--paper`` uses 10 million.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pyro
import torch
from common import LEARNING_RATES, VAE, Data, Training, bound, load
from matplotlib.figure import Figure
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from data import add_data_flags, add_device_flag
from results import Results

SIDES = {"digits": (8, 8), "mnist": (28, 28), "frey": (28, 20)}
HIDDEN = {"digits": 100, "mnist": 500, "frey": 200}


def trained(data: Data, hidden: int, latent: int, samples: int, seed: int) -> VAE:
    pyro.set_rng_seed(seed)
    vae = VAE(data.train.shape[-1], hidden, latent, data.binary).to(data.train.device)
    for _ in Training("AEVB", vae, data.train, 100, LEARNING_RATES["AEVB"]).run([samples]):
        pass
    return vae


def manifold(count: int) -> Tensor:
    """Return latents at the quantiles of a grid of the unit square, shape [count^2, 2]."""
    quantiles = (torch.arange(count) + 0.5) / count
    grid = torch.distributions.Normal(0.0, 1.0).icdf(quantiles)
    return torch.cartesian_prod(grid.flip(0), grid).flip(-1)


@torch.no_grad()
def tiles(vae: VAE, z: Tensor, sides: tuple[int, int], columns: int) -> Tensor:
    """Return the decoder's means of latents as one image."""
    weight = next(vae.parameters())
    images = vae.likelihood(z.to(weight)).mean.cpu().clamp(0, 1).reshape(-1, columns, *sides)
    return torch.cat([torch.cat(list(row), 1) for row in images], 0)


def main(argv: Sequence[str] | None = None) -> list[Path]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_data_flags(parser)
    add_device_flag(parser)
    parser.add_argument("--dataset", choices=list(SIDES), default="digits")
    parser.add_argument("--hidden", type=int, help="default: the paper's")
    parser.add_argument("--samples", type=float, default=100_000, help="training samples")
    parser.add_argument("--latent", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--grid", type=int, default=20, help="images along each side")
    parser.add_argument("--paper", action="store_true", help="10 million training samples")
    parser.add_argument("--smoke", action="store_true", help="a trial run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("aevb"), metavar="DIR")
    args = parser.parse_args(argv)
    samples = int(1e7 if args.paper else args.samples)
    if args.smoke:
        samples, args.grid = 200, 3
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    data = load(args.dataset, args.data_root, args.download).to(args.device)
    sides = SIDES[args.dataset]
    results = Results(args.out / f"manifold_{args.dataset}.csv", args.seed, argv)
    paths, panels = [], {}
    for latent in args.latent if args.dataset != "frey" else [2]:
        vae = trained(data, args.hidden or HIDDEN[args.dataset], latent, samples, args.seed)
        value, error = bound(vae, data.test[:1000])
        results.add(latent=latent, samples=samples, bound=value, error=error)
        print(f"{latent} latents: bound of test images {value:.1f} ± {error:.1f}", flush=True)
        panels[latent] = tiles(vae, torch.randn(100, latent), sides, 10)
        if latent == 2:
            paths.append(args.out / f"manifold_{args.dataset}.png")
            figure = Figure(figsize=(6, 6 * sides[0] / sides[1]), layout="constrained")
            axes = figure.subplots()
            image = tiles(vae, manifold(args.grid), sides, args.grid)
            axes.imshow(image, cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            figure.savefig(paths[-1], dpi=100)
    if len(panels) > 1:
        paths.append(args.out / f"samples_{args.dataset}.png")
        figure = Figure(figsize=(2.6 * len(panels), 2.9), layout="constrained")
        for axes, (latent, image) in zip(
            figure.subplots(1, len(panels)), panels.items(), strict=True
        ):
            axes.imshow(image, cmap="gray", vmin=0, vmax=1)
            axes.set(title=f"{latent} latents", xticks=[], yticks=[])
        figure.savefig(paths[-1], dpi=100)
    print(", ".join(map(str, paths)))
    return paths


if __name__ == "__main__":
    main()
