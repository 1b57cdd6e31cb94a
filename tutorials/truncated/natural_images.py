"""Linear and deep decoders of binary latents on natural images (Guiraud et al. 2021, figure 3).

The data are whitened patches of 16x16 pixels of an image of van Hateren. A linear model with 300
binary latents (binary sparse coding) is trained first. Then it is trained on, beside a decoder with
layers of 300, 300 and 256 units, whose last layer starts at the linear weights and whose other
layers start at the identity. Both start at the same free energy, so that the gain is that of the
deeper decoder::

    python tutorials/truncated/natural_images.py --image van_hateren.tiff
    python tutorials/truncated/natural_images.py --image van_hateren.tiff --scaling
    python tutorials/truncated/natural_images.py --image van_hateren.tiff --paper

``--scaling`` trains decoders with 100 hidden units and 125, 250, 500 and 1,000 latents, and prints
the free energy and the seconds of an epoch. ``--paper`` has 100,000 patches and 100 epochs of each
decoder. The paper has patches of many images. It does not have its whitening, its number of states
and its learning rates: here the logarithms of the pixels are centered in each patch, and projected
on the principal components that have 95% of the variance.
"""

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib.image
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from tqdm import tqdm

from pyro_mcvae import (
    BernoulliPrior,
    EvolutionaryUpdate,
    GaussianNoise,
    TraceTruncated_ELBO,
    TruncatedPosterior,
)
from pyro_mcvae.evaluation.plots import STYLES

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from data import add_device_flag
from results import Results


def whitened(image: Tensor, count: int, side: int = 16, kept: float = 0.95) -> Tensor:
    """
    Return random whitened patches, shape ``[count, side^2]``.

    :param float kept: fraction of the variance that the principal components have.
    """
    logs = (1 + image).log()
    top, left = (torch.randint(size - side + 1, (count,)) for size in image.shape)
    square = torch.arange(side)
    rows, columns = top[:, None, None] + square[:, None], left[:, None, None] + square
    patches = logs[rows, columns].flatten(1)
    patches = patches - patches.mean(1, keepdim=True)
    patches = patches - patches.mean(0)
    values, vectors = torch.linalg.eigh(patches.T @ patches / count)
    values, vectors = values.flip(0), vectors.flip(1)
    components = int((values.cumsum(0) < kept * values.sum()).sum()) + 1
    values, vectors = values[:components], vectors[:, :components]
    return patches @ (vectors * values.rsqrt()) @ vectors.T


class Model(nn.Module):
    """z ~ Bernoulli(pi), x | z ~ Normal(decoder(z), sigma), with pi and sigma as buffers."""

    def __init__(self, patches: Tensor, decoder: nn.Sequential) -> None:
        super().__init__()
        num_latents = decoder[0].in_features
        self.patches, self.decoder = patches, decoder
        self.register_buffer("pi", torch.full((num_latents,), 1 / num_latents))
        self.register_buffer("sigma", torch.tensor(0.1))
        self.to(patches.device)

    def forward(self, index: Tensor) -> None:
        with pyro.plate("patches", len(self.patches), subsample=index):
            z = pyro.sample("z", dist.Bernoulli(self.pi).to_event(1))
            pixels = dist.Normal(self.decoder(z), self.sigma).to_event(1)
            pyro.sample("x", pixels, obs=self.patches[index])


def mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers with Xavier weights and zero biases, and leaky ReLUs between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layer = nn.Linear(a, b)
        nn.init.xavier_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.LeakyReLU(0.01)]
    return nn.Sequential(*layers[:-1])


def deepened(linear: nn.Sequential) -> nn.Sequential:
    """Return a decoder of three layers with the same outputs: the first two are the identity."""
    last = copy.deepcopy(linear[0])
    result = mlp(last.in_features, last.in_features, last.in_features, last.out_features)
    for layer in (result[0], result[2]):
        nn.init.eye_(layer.weight)
    result[4] = last
    return result


def train(
    model: Model, guide: TruncatedPosterior, epochs: int, args: argparse.Namespace
) -> tuple[list[float], float]:
    """Train in place. Return the free energy per patch after each epoch, and CPU seconds."""
    elbo = TraceTruncated_ELBO(args.gradient_states, max_plate_nesting=1)(model, guide)
    optimizer = torch.optim.Adam(model.decoder.parameters(), lr=args.lr)
    count = len(model.patches)
    batches = -(-count // args.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, epochs * batches)
    updates = BernoulliPrior("z", model.pi), GaussianNoise("x", model.sigma)
    curve, start = [], time.process_time()
    for _ in tqdm(range(epochs), unit="epoch", leave=False, disable=None):
        for index in torch.randperm(count).tensor_split(batches):
            optimizer.zero_grad()
            elbo(index).backward()
            optimizer.step()
            schedule.step()
        for index in torch.arange(count).split(1000):
            posterior = guide.posterior(index)
            for update in updates:
                update.add(posterior)
        for update in updates:
            update.update()
        # At the new parameters, and the same states for all decoders.
        parts = [guide.posterior(i).free_energy for i in torch.arange(count).split(1000)]
        curve.append(torch.cat(parts).mean().item())
    return curve, time.process_time() - start


def new_guide(model: Model, args: argparse.Namespace) -> TruncatedPosterior:
    return TruncatedPosterior(model, args.states, evolution=EvolutionaryUpdate(*args.search))


def compare(patches: Tensor, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the free energies of the linear model, and of both decoders from there."""
    linear = Model(patches, mlp(args.latents[0], patches.shape[1]))
    guide = new_guide(linear, args)
    curves = {"linear, first": train(linear, guide, args.epochs, args)[0]}
    deep = Model(patches, deepened(linear.decoder))
    deep.pi.copy_(linear.pi)
    deep.sigma.copy_(linear.sigma)
    guides = {"linear": guide, "deep": new_guide(deep, args)}
    guides["deep"].load_state_dict(guide.state_dict())
    for (name, guide), model in zip(guides.items(), (linear, deep), strict=True):
        curves[name], seconds = train(model, guide, args.epochs, args)
        print(f"{name}: F/N {curves[name][-1]:.2f}, {seconds:.0f} CPU seconds", flush=True)
    return curves


def draw(curves: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    first = len(curves["linear, first"])
    for (name, curve), (color, marker) in zip(curves.items(), STYLES, strict=False):
        start = 1 if name == "linear, first" else first + 1
        epochs, every = range(start, start + len(curve)), max(1, first // 10)
        axes.plot(epochs, curve, color=color, marker=marker, markevery=every, label=name)
    # The first epochs are much lower than all others.
    shown = [value for curve in curves.values() for value in curve[len(curve) // 5 :]]
    margin = 0.05 * (max(shown) - min(shown))
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.set(xlabel="epoch", ylabel="free energy per patch, nats")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--image", type=Path, required=True, help="the image of van Hateren")
    add("--patches", type=int, default=5000, help="number of patches")
    add("--latents", type=int, nargs="+", help="default: 300; with --scaling: 125, ..., 1000")
    add("--states", type=int, default=64)
    add("--gradient-states", type=int, default=8, help="number of states in the gradient, minus 1")
    add("--search", type=int, nargs=3, default=[5, 4, 1], metavar=("P", "C", "G"))
    add("--epochs", type=int, default=30, help="of each decoder")
    add("--batch-size", type=int, default=200)
    add("--lr", type=float, default=2e-3)
    add("--scaling", action="store_true", help="free energy and time over the number of latents")
    add("--paper", action="store_true", help="100,000 patches, 100 epochs")
    add("--smoke", action="store_true", help="a trial run with few patches")
    add("--seed", type=int, default=0)
    add_device_flag(parser)
    add("--out", type=Path, default=Path("results"), metavar="DIR")
    args = parser.parse_args(argv)
    if args.paper:
        args.patches, args.epochs = 100_000, 100
    if args.smoke:
        args.patches, args.epochs = 50, 2
    args.latents = args.latents or ([125, 250, 500, 1000] if args.scaling else [300])
    torch.set_num_threads(1)  # CPU times are comparable only with one thread.
    pyro.enable_validation(False)
    pyro.set_rng_seed(args.seed)
    image = torch.from_numpy(matplotlib.image.imread(args.image).astype("float32"))
    patches = whitened(image, args.patches).to(args.device)
    if not args.scaling:
        curves = compare(patches, args)
        results = Results(args.out / "natural_images.csv", args.seed, argv)
        for name, curve in curves.items():
            for epoch, value in enumerate(curve, 1):
                results.add(decoder=name, epoch=epoch, free_energy=value)
        draw(curves, args.out / "natural_images.png")
        return curves
    results, curves = Results(args.out / "natural_images_scaling.csv", args.seed, argv), {}
    for latents in args.latents:
        model = Model(patches, mlp(latents, 100, patches.shape[1]))
        curve, seconds = train(model, new_guide(model, args), args.epochs, args)
        curves[f"{latents} latents"], each = curve, seconds / args.epochs
        results.add(latents=latents, free_energy=curve[-1], seconds_per_epoch=each)
        print(f"{latents} latents: F/N {curve[-1]:.2f}, {each:.2f} s/epoch", flush=True)
    return curves


if __name__ == "__main__":
    main()
