"""Denoise an image with a model of binary latents that is trained only on this image.

The data are all overlapping patches of the noisy image. Every patch has a vector of binary latents
and a small network as decoder. The guide is a truncated posterior of S states per patch. The
denoised image is the mean of the posterior means of all patches that cover a pixel. With
``--missing 0.5`` half of the pixels are masked, and the same model fills them in.

    python tutorials/truncated/denoising.py --sigma 25 --epochs 15
    python tutorials/truncated/denoising.py --image house.png --mutation uniform --linear
    python tutorials/truncated/denoising.py --image house.png --paper

``--paper`` is the search of the paper for 8x8 patches: 200 states per patch, uniform flips, 10
parents with 9 children in each of 4 generations of Algorithm 1, closed-form pi and sigma, 500
epochs with minibatches of 32. It takes days on a CPU.
"""

import argparse
import sys
import time
from pathlib import Path

import matplotlib.image
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.nn.functional import fold, unfold
from tqdm import tqdm

from pyro_mcvae import (
    BernoulliPrior,
    CompiledELBO,
    EvolutionaryUpdate,
    GaussianNoise,
    InformedFlips,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    UniformFlips,
    load_checkpoint,
    save_checkpoint,
)

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from data import add_device_flag
from results import Results

MUTATIONS = {"informed": InformedFlips, "uniform": UniformFlips}


def load(path: Path | None, crop: int | None) -> Tensor:
    """Return a gray image with values in 0..255; scikit-image's cameraman without a file."""
    if path is None:
        from skimage import data

        image = torch.tensor(data.camera()).float()
    else:
        image = torch.tensor(matplotlib.image.imread(path)).float()
        if image.dim() == 3:
            image = image[..., :3].mean(-1)
        image = image * 255 if image.max() <= 1 else image
    return image if crop is None else image[:crop, :crop]


def psnr(image: Tensor, truth: Tensor) -> float:
    return float(10 * torch.log10(255.0**2 / (image - truth).square().mean()))


class Patches(nn.Module):
    """z ~ Bernoulli(pi), x | z ~ Normal(decoder(z), sigma); missing pixels are masked out."""

    def __init__(
        self,
        patches: Tensor,
        known: Tensor,
        num_latents: int,
        hidden: int,
        start: float | None = None,
        closed_form: bool = False,
    ) -> None:
        super().__init__()
        size = patches.shape[1]
        layers = [nn.Linear(num_latents, size)]
        if hidden:
            layers = [nn.Linear(num_latents, hidden), nn.LeakyReLU(0.01), nn.Linear(hidden, size)]
        self.decoder = nn.Sequential(*layers)
        for layer in layers:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)
                nn.init.zeros_(layer.bias)
        # The network decodes standardized pixels, so that one learning rate works for all images.
        self.center, self.spread = patches[known].mean(), patches[known].std()
        pi, sigma = torch.full((num_latents,), 1.0 / num_latents), start or self.spread.item()
        self.closed_form = closed_form
        if closed_form:  # buffers, so that no optimizer trains them
            self.register_buffer("pi", pi)
            self.register_buffer("sigma", torch.tensor(sigma))
        else:
            self.logits = nn.Parameter(pi.logit())
            self.log_sigma = nn.Parameter(torch.tensor(sigma).log())
        self.patches, self.known = patches, known

    def decode(self, z: Tensor) -> Tensor:
        """Return the mean of the pixels."""
        return self.center + self.spread * self.decoder(z)

    def forward(self, index: Tensor) -> None:
        if self.closed_form:
            prior, sigma = dist.Bernoulli(self.pi), self.sigma
        else:
            prior, sigma = dist.Bernoulli(logits=self.logits), self.log_sigma.exp()
        with pyro.plate("patches", len(self.patches), subsample=index):
            z = pyro.sample("z", prior.to_event(1))
            pixels = dist.Normal(self.decode(z), sigma)
            known = self.known[index]
            pyro.sample("x", pixels.mask(known).to_event(1), obs=self.patches[index])


def merge(
    patches: Tensor, shape: tuple[int, int], side: int, width: float = float("inf")
) -> Tensor:
    """Average overlapping patches to an image, with Gaussian weights around the patch center."""
    place = (torch.arange(side) - (side - 1) / 2) / (width * side)
    window = (-(place**2 + place[:, None] ** 2) / 2).exp().flatten()
    total, weight = (
        fold(x.t().unsqueeze(0), shape, side) for x in (window * patches, window.expand_as(patches))
    )
    return (total / weight)[0, 0]


@torch.no_grad()
def restore(model: Patches, guide: TruncatedPosterior) -> Tensor:
    """Return the posterior mean of every patch."""
    means = []
    for index in torch.arange(len(model.patches)).split(1000):
        posterior = guide.posterior(index)
        means.append(posterior.expectation(lambda values: model.decode(values["z"])))
    return torch.cat(means)


def draw(images: tuple[Tensor, Tensor, Tensor], path: Path) -> None:
    """Plot the true, the noisy and the restored image side by side."""
    side_by_side = torch.cat(images, 1).clamp(0, 255)
    matplotlib.image.imsave(path, side_by_side.numpy(), cmap="gray", vmin=0, vmax=255)


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--image", type=Path, help="default: scikit-image's cameraman")
    add("--crop", type=int, help="use the upper left corner of this size")
    add("--sigma", type=float, default=25.0)
    add("--missing", type=float, default=0.0, help="fraction of missing pixels")
    add("--side", type=int, default=8, help="of a patch")
    add("--latents", type=int, default=64)
    add("--states", type=int, default=32)
    add("--gradient-states", type=int, help="number of states in the gradient, minus one")
    add("--search", type=int, nargs=3, default=[5, 4, 1], metavar=("P", "C", "G"))
    add(
        "--not-elitist",
        dest="elitist",
        action="store_false",
        help="generations of Algorithm 1: parents are the children of the generation before",
    )
    add("--mutation", choices=MUTATIONS, default="informed")
    add(
        "--hidden",
        type=int,
        help="units of the hidden layer of the decoder; default: as many as pixels",
    )
    add("--linear", action="store_true", help="a linear decoder: binary sparse coding")
    add("--closed-form", action="store_true", help="update pi and sigma after each epoch")
    add("--start-sigma", type=float, help="initial noise of the model; default: that of all pixels")
    add("--epochs", type=int, default=15)
    add("--every", type=int, default=5, help="epochs between lines of the output")
    add("--batch-size", type=int, default=1000)
    add("--lr", type=float, default=1e-2)
    add(
        "--window",
        type=float,
        default=float("inf"),
        help="width of the weights for merging, in patch sides",
    )
    add("--compiled", action="store_true", help="record the steps and compile them")
    add(
        "--resume",
        action="store_true",
        help="continue from the checkpoint in --out; --epochs may change",
    )
    add("--seed", type=int, default=0)
    add_device_flag(parser)
    add("--paper", action="store_true", help="search of the paper, for 500 epochs")
    add("--smoke", action="store_true", help="a trial run of two epochs on a small crop")
    add("--out", type=Path, default=Path("results"), metavar="DIR")
    args = parser.parse_args(argv)
    if args.paper:
        args.states, args.search, args.epochs, args.batch_size = 200, [10, 9, 4], 500, 32
        args.mutation, args.elitist, args.closed_form = "uniform", False, True
    if args.smoke:
        args.epochs, args.crop = 2, args.side + 5

    pyro.set_rng_seed(args.seed)
    pyro.enable_validation(False)
    truth = load(args.image, args.crop)
    noisy = truth + args.sigma * torch.randn_like(truth)
    known = torch.rand_like(truth) >= args.missing
    shape = (truth.shape[0], truth.shape[1])
    patches, there = (
        unfold(image[None, None].float(), args.side)[0].t().contiguous().to(args.device)
        for image in (noisy, known)
    )
    hidden = 0 if args.linear else args.hidden or args.side**2
    model = Patches(patches, there.bool(), args.latents, hidden, args.start_sigma, args.closed_form)
    model = model.to(args.device)
    mutation = MUTATIONS[args.mutation]()
    evolution = EvolutionaryUpdate(*args.search, mutation=mutation, elitist=args.elitist)
    guide = TruncatedPosterior(model, args.states, evolution=evolution)
    objective = TraceTruncated_ELBO(args.gradient_states, max_plate_nesting=1)
    elbo = (CompiledELBO(objective) if args.compiled else objective)(model, guide)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    results = Results(args.out / "denoising.csv", args.seed, argv)
    # The observed image. A missing pixel has the mean gray value.
    seen = torch.where(known, noisy, noisy[known].mean())
    print(f"seen: {psnr(seen, truth):.2f} dB, {len(patches)} patches", flush=True)
    updates = []
    if args.closed_form:
        updates = [BernoulliPrior("z", model.pi), GaussianNoise("x", model.sigma)]
    parts = {"model": model, "guide": guide, "optimizer": optimizer}
    checkpoint, first, seconds, result = args.out / "denoising.pt", 1, 0.0, 0.0
    if args.resume:
        past = load_checkpoint(checkpoint, parts)
        first, seconds, results.rows = past["epoch"] + 1, past["seconds"], past["rows"]
    else:
        results.add(epoch=0, psnr=psnr(seen, truth))
    num_batches = -(-len(patches) // args.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        args.lr,
        total_steps=args.epochs * num_batches,
        last_epoch=(first - 1) * num_batches - 1,
    )
    for epoch in tqdm(range(first, args.epochs + 1), unit="epoch", disable=None):
        start, total = time.process_time(), 0.0
        # Minibatches of nearly equal size, because a small last one would be a very noisy step.
        for index in torch.randperm(len(patches)).tensor_split(num_batches):
            optimizer.zero_grad()
            loss = elbo(index)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach() * len(index) / len(patches)
        for index in torch.arange(len(patches)).split(1000) if updates else ():
            posterior = guide.posterior(index)
            for update in updates:
                update.add(posterior)
        for update in updates:
            update.update()
        seconds += time.process_time() - start
        if epoch % args.every == 0 or epoch == args.epochs:
            clean = merge(restore(model, guide).cpu(), shape, args.side, args.window)
            result, bound = psnr(clean, truth), -float(total) / len(patches)
            results.add(epoch=epoch, psnr=result, free_energy=bound, train_seconds=seconds)
            save_checkpoint(checkpoint, parts, epoch=epoch, seconds=seconds, rows=results.rows)
            draw((truth, seen, clean), args.out / "denoising.png")
            print(f"epoch {epoch}: F/N {bound:.2f}, {result:.2f} dB, {seconds:.0f} s", flush=True)
    return result


if __name__ == "__main__":
    main()
