"""A VAE with a posterior over the weights of its decoder (Kingma and Welling 2014, appendix F).

The decoder's weights have the prior N(0, I). The guide has a normal distribution for each weight,
and an encoder for the latents of each image. One loss estimates both parts of the bound with
minibatches: N/M times the terms of the images, minus the KL divergence of the weights, which has a
closed form (eq. 21 and 24). The same model with a guide of points finds the most probable weights,
as in the other experiments of the paper::

    python tutorials/aevb/weights.py
    python tutorials/aevb/weights.py --num-train 100 400 1497

The data are scikit-learn's digits. The paper has no experiment with weights, so the sizes are ours.
The script prints the bound of held-out images, on average over draws of the weights, for few and
for many training images.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from common import load
from matplotlib.figure import Figure
from pyro.optim.clipped_adam import ClippedAdam
from torch import Tensor, nn

from pyro_mcvae import TraceSGVB_ELBO
from pyro_mcvae.evaluation.plots import STYLES

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from data import add_device_flag
from results import Results

GUIDES = ("points", "posterior")


class VAE(nn.Module):
    """
    z ~ Normal(0, I), x | z ~ Bernoulli, with weights ~ Normal(0, 1).

    :param bool points: whether the guide has points instead of normal distributions of the weights.
    """

    def __init__(self, num_pixels: int, num_hidden: int, num_latents: int, points: bool) -> None:
        super().__init__()
        self.num_latents, self.points = num_latents, points
        self.encoder = nn.Sequential(
            nn.Linear(num_pixels, num_hidden), nn.Tanh(), nn.Linear(num_hidden, 2 * num_latents)
        )
        shapes = {
            "weight_1": (num_hidden, num_latents),
            "bias_1": (num_hidden,),
            "weight_2": (num_pixels, num_hidden),
            "bias_2": (num_pixels,),
        }
        self.loc = nn.ParameterDict({k: 0.1 * torch.randn(s) for k, s in shapes.items()})
        self.log_scale = nn.ParameterDict({k: torch.full(s, -3.0) for k, s in shapes.items()})

    def model(self, x: Tensor, rows: Tensor | None = None, size: int | None = None) -> None:
        """``rows`` are the indices of the images ``x`` in the data set of ``size`` images."""
        weights = {
            k: pyro.sample(k, dist.Normal(torch.zeros_like(v), 1.0).to_event(v.dim()))
            for k, v in self.loc.items()
        }
        with pyro.plate("data", size or len(x), subsample=rows, dim=-1):
            z = pyro.sample("z", dist.Normal(x.new_zeros(self.num_latents), 1.0).to_event(1))
            hidden = (z @ weights["weight_1"].mT + weights["bias_1"]).tanh()
            logits = hidden @ weights["weight_2"].mT + weights["bias_2"]
            pyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=x)

    def guide(self, x: Tensor, rows: Tensor | None = None, size: int | None = None) -> None:
        for name, loc in self.loc.items():
            law = dist.Delta(loc) if self.points else dist.Normal(loc, self.log_scale[name].exp())
            pyro.sample(name, law.to_event(loc.dim()))
        with pyro.plate("data", size or len(x), subsample=rows, dim=-1):
            loc, log_variance = self.encoder(x).chunk(2, dim=-1)
            pyro.sample("z", dist.Normal(loc, (0.5 * log_variance).exp()).to_event(1))


def train(vae: VAE, x: Tensor, steps: int, batch_size: int) -> float:
    """Train in place. Return the bound of all images, per image, over the last tenth of steps."""
    batch_size = min(batch_size, len(x))
    loss = TraceSGVB_ELBO()(vae.model, vae.guide)
    schedule = {"lr": 1e-2, "lrd": 1e-2 ** (1 / steps)}
    optimizer = ClippedAdam(vae.parameters(), **schedule)
    values = []
    for _ in range(steps):
        rows = torch.randperm(len(x), device=x.device)[:batch_size]
        optimizer.zero_grad()
        value = loss(x[rows], rows, len(x))
        value.backward()
        optimizer.step()
        values.append(-value.item() / len(x))
    last = values[-max(1, steps // 10) :]
    return sum(last) / len(last)


def held_out(vae: VAE, x: Tensor, draws: int) -> tuple[float, float]:
    """Return the bound of images on average over draws of the weights, and its standard error."""
    elbo = TraceSGVB_ELBO()
    each = torch.stack([elbo.bounds(vae.model, vae.guide, x).per_datum for _ in range(draws)])
    values = each.mean(0)
    return values.mean().item(), values.std().item() / len(x) ** 0.5


def draw(rows: list[dict[str, object]], path: Path) -> None:
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, (color, marker) in zip(GUIDES, STYLES, strict=False):
        mine = [row for row in rows if row["guide"] == name]
        x, y, error = ([row[k] for row in mine] for k in ("num_train", "test_bound", "error"))
        axes.errorbar(x, y, error, color=color, marker=marker, capsize=3, label=name)
    axes.set_xscale("log")
    axes.set(xlabel="training images", ylabel="bound of held-out images, nats")
    axes.grid(alpha=0.3)
    axes.legend(title="weights")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--num-train", type=int, nargs="+", default=[100, 400, 1497], metavar="N")
    add("--hidden", type=int, default=50)
    add("--latent", type=int, default=5)
    add("--steps", type=int, default=2000)
    add("--batch-size", type=int, default=100)
    add("--seed", type=int, default=0)
    add_device_flag(parser)
    add("--smoke", action="store_true", help="a trial run with few steps")
    add("--out", type=Path, default=Path("aevb"), metavar="DIR")
    args = parser.parse_args(argv)
    if args.smoke:
        args.num_train, args.steps = [100], 5
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    data = load("digits", Path()).to(args.device)
    results = Results(args.out / "weights.csv", args.seed, argv)
    for size in args.num_train:
        for name in GUIDES:
            pyro.set_rng_seed(args.seed)
            pixels = data.train.shape[1]
            vae = VAE(pixels, args.hidden, args.latent, name == "points").to(args.device)
            bound = train(vae, data.train[:size], args.steps, args.batch_size)
            test, error = held_out(vae, data.test, 20)
            row = {"guide": name, "num_train": size, "bound": bound}
            results.add(**row, test_bound=test, error=error)
            print(
                f"{size} images, {name}: bound {bound:.2f}, held-out images {test:.2f} ± "
                f"{error:.2f}",
                flush=True,
            )
    draw(results.rows, args.out / "weights.png")
    return results.rows


if __name__ == "__main__":
    main()
