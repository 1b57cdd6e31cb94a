"""Moving MNIST (Liu et al. 2019, section 5.4): a digit at some position on 68 x 68 pixels.

The position has 4,624 values, and the k = 5 most probable are summed. The appearance of the digit
is a reparameterized site that depends on the position::

    python tutorials/rao_blackwell/moving_mnist.py --data-root data
    python tutorials/rao_blackwell/moving_mnist.py --data-root data --paper

``--paper`` is the scale of the paper, 50 epochs of 50,000 images. Its networks are
larger, and not published in full. Other flags override it.
``--memory`` prints the peak memory of one step of one method in a new process.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from common import Results, add_data_flags, draw_curves, mnist, write_table
from scipy.fft import next_fast_len
from torch import Tensor, nn
from torch.nn.functional import pad

from pyro_mcvae import NVIL, RELAX, IndependentDraw, TraceRaoBlackwell_ELBO

SIZE, DIGIT, LATENT = 68, 28, 8
HALF = DIGIT // 2
# Probability that a pixel outside the digit is white.
BLANK = 1e-3


def place(digits: Tensor) -> Tensor:
    """Return digits ``[N, 784]`` at random positions: ``[N, 68, 68]``, binary."""
    frames = torch.zeros(len(digits), SIZE, SIZE)
    corners = torch.randint(0, SIZE - DIGIT + 1, (len(digits), 2))
    binary = (digits.reshape(-1, DIGIT, DIGIT) > 0.5).float()
    for frame, digit, (i, j) in zip(frames, binary, corners.tolist(), strict=True):
        frame[i : i + DIGIT, j : j + DIGIT] = digit
    return frames


def crop(x: Tensor, position: Tensor) -> Tensor:
    """Return the 28 x 28 pixels around positions ``[*slots, N]``: ``[*slots, N, 784]``."""
    wide = pad(x, (HALF, HALF, HALF, HALF))
    width = wide.shape[-1]
    offset = torch.arange(DIGIT, device=x.device)
    window = (offset[:, None] * width + offset).flatten()
    corner = (position // SIZE) * width + position % SIZE
    number = torch.arange(len(x), device=x.device) * width * width
    return wide.flatten()[(corner + number).unsqueeze(-1) + window]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, 256), nn.ReLU(), nn.Linear(256, DIGIT * DIGIT)
        )

    def forward(self, x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            position = pyro.sample("l", dist.Categorical(logits=x.new_zeros(SIZE * SIZE)))
            z = pyro.sample("z", dist.Normal(x.new_zeros(LATENT), 1.0).to_event(1))
            seen = crop(x, position)
            inside = dist.Bernoulli(logits=self.decoder(z), validate_args=False).log_prob(seen)
            ones = x.sum((-1, -2)) - seen.sum(-1)
            zeros = SIZE * SIZE - DIGIT * DIGIT - ones
            outside = ones * math.log(BLANK) + zeros * math.log1p(-BLANK)
            pyro.factor("x", inside.sum(-1) + outside)


class WideConv2d(nn.Conv2d):
    """A convolution by Fourier transforms, eight times as fast on a CPU for wide kernels."""

    def forward(self, x: Tensor) -> Tensor:
        pad, (height, width) = self.kernel_size[0] // 2, x.shape[-2:]
        # Transforms of 84 numbers take half the time of those of 82 = 2 * 41.
        size = next_fast_len(height + 2 * pad), next_fast_len(width + 2 * pad)
        frames = torch.fft.rfft2(x, s=size)
        kernels = torch.fft.rfft2(self.weight.flip(-1, -2), s=size)
        result = torch.fft.irfft2((frames.unsqueeze(1) * kernels).sum(2), s=size)
        return result[..., pad : pad + height, pad : pad + width] + self.bias[:, None, None]


class Inference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(WideConv2d(1, 8, 15), nn.ReLU(), WideConv2d(8, 1, 15))
        self.encoder = nn.Sequential(
            nn.Linear(DIGIT * DIGIT, 256), nn.ReLU(), nn.Linear(256, 2 * LATENT)
        )

    def forward(self, x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            logits = self.attention(x.unsqueeze(1)).flatten(1)
            position = pyro.sample("l", dist.Categorical(logits=logits))
            loc, log_scale = self.encoder(crop(x, position)).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def baseline_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 64), nn.ReLU(), nn.Linear(64, 1))


class Control(nn.Module):
    """The control variate of RELAX, a function of a relaxed position and the frame."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Linear(SIZE * SIZE, 64)
        self.frame = nn.Linear(SIZE * SIZE, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, relaxed: Tensor, x: Tensor) -> Tensor:
        return self.out((self.position(relaxed) + self.frame(x.flatten(1))).tanh())


METHODS: dict[str, Callable[[], TraceRaoBlackwell_ELBO]] = {
    "RB-REINFORCE+ (k = 5)": lambda: TraceRaoBlackwell_ELBO(5, baseline=IndependentDraw()),
    "REINFORCE+": lambda: TraceRaoBlackwell_ELBO(0, baseline=IndependentDraw()),
    "NVIL": lambda: TraceRaoBlackwell_ELBO(0, baseline=NVIL(baseline_network())),
    "RELAX": lambda: TraceRaoBlackwell_ELBO(0, baseline=RELAX(Control())),
    "exact sum": lambda: TraceRaoBlackwell_ELBO(math.inf),
}


def at_most_probable(model: Generator, guide: Inference, x: Tensor) -> float:
    """Return the negative ELBO of a frame at its most probable position."""

    def fixed(frames: Tensor) -> None:
        with pyro.plate("data", len(frames)):
            best = guide.attention(frames.unsqueeze(1)).flatten(1).argmax(-1)
            pyro.sample("l", dist.Delta(best))
            loc, log_scale = guide.encoder(crop(frames, best)).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))

    return TraceRaoBlackwell_ELBO(0).loss(model, fixed, x) / len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_flags(parser)
    parser.add_argument("--epochs", type=int, help="default: 4")
    parser.add_argument("--images", type=int, help="default: 6,400")
    parser.add_argument("--paper", action="store_true", help="50 epochs of 50,000 images")
    parser.add_argument("--methods", nargs="*", default=list(METHODS)[:4], choices=list(METHODS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    args.epochs = args.epochs or (50 if args.paper else 4)
    args.images = args.images or (50_000 if args.paper else 6400)
    pyro.enable_validation(False)
    pyro.set_rng_seed(args.seed)
    if args.memory:  # reading images must not determine the peak before the step
        train = test = torch.rand(args.batch, SIZE, SIZE).round().to(args.device)
    else:
        train = place(mnist(args.data_root, True, args.download)[0][: args.images]).to(args.device)
        test = place(mnist(args.data_root, False, args.download)[0][:1000]).to(args.device)
    rows, curves = [], {}
    results = None if args.memory else Results(args.out / "moving_mnist.csv", args.seed)
    for name in args.methods:
        pyro.clear_param_store()
        pyro.set_rng_seed(args.seed)
        model, guide = Generator().to(args.device), Inference().to(args.device)
        module = METHODS[name]().to(args.device)(model, guide)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        losses, seconds = [], 0.0
        for epoch in range(args.epochs):
            begun = time.perf_counter()
            for chosen in torch.randperm(len(train), device=args.device).split(args.batch):
                optimizer.zero_grad()
                module(train[chosen]).backward()
                optimizer.step()
                if args.memory:
                    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                    print(f"{name}, batch {args.batch}: {(peak - before) / 1024:.0f} MiB more")
                    return
            seconds += time.perf_counter() - begun
            losses.append(at_most_probable(model, guide, test))
            assert results is not None
            results.add(method=name, epoch=epoch + 1, negative_elbo=losses[-1], seconds=seconds)
            print(f"{name:24s} epoch {epoch + 1}: -ELBO {losses[-1]:.1f}", flush=True)
        curves[name] = losses
        rows.append([name, f"{losses[-1]:.1f}", f"{seconds / args.epochs:.1f}"])
        header = ["method", "-ELBO at the MAP position", "s/epoch"]
        print(write_table(args.out / "moving_mnist.md", header, rows))
        draw_curves(args.out / "moving_mnist.png", curves, "epoch", "-ELBO at the MAP position")


if __name__ == "__main__":
    main()
