"""Semi-supervised MNIST (Liu et al. 2019, section 5.3): 5,000 labels, 45,000 images without.

The class y is summed or sampled by each estimator in turn; z | x, y is reparameterized::

    python tutorials/rao_blackwell/semi_supervised.py --data-root data
    python tutorials/rao_blackwell/semi_supervised.py --data-root data --full

``--full`` is the paper's scale, 100 epochs of each estimator. All begin with 100 epochs on the
labelled images.
``--time`` only times one unlabelled step of k = 1 beside the exact sum, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from common import Results, draw_curves, read_mnist, write_table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from pyro_mcvae import (
    NVIL,
    RELAX,
    GumbelSoftmax,
    IndependentDraw,
    SummedMean,
    TraceRaoBlackwell_ELBO,
)

LATENT, CLASSES = 8, 10


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(a, b)]
    return nn.Sequential(*layers)


def joined(*parts: Tensor) -> Tensor:
    """Concatenate vectors that have other leading dims: slots of y, and data without them."""
    shape = torch.broadcast_shapes(*(p.shape[:-1] for p in parts))
    return torch.cat([p.expand(*shape, -1) for p in parts], -1)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = mlp(LATENT + CLASSES, 128, 128, 784)

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        with pyro.plate("data", len(x)):
            prior = dist.OneHotCategorical(logits=x.new_zeros(CLASSES))
            y = pyro.sample("y", prior, obs=y)
            z = pyro.sample("z", dist.Normal(x.new_zeros(LATENT), 1.0).to_event(1))
            logits = self.decoder(joined(z, y))
            pyro.sample("x", dist.Bernoulli(logits=logits, validate_args=False).to_event(1), obs=x)


class Inference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = mlp(784, 256, 256, 256, CLASSES)
        self.encoder = mlp(784 + CLASSES, 128, 128, 2 * LATENT)

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        with pyro.plate("data", len(x)):
            if y is None:
                y = pyro.sample("y", dist.OneHotCategorical(logits=self.classifier(x)))
            loc, log_scale = self.encoder(joined(x, y)).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


class Control(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(CLASSES + 784, 64, 1)

    def forward(self, relaxed: Tensor, x: Tensor) -> Tensor:
        return self.layers(joined(relaxed, x)).squeeze(-1)


METHODS: dict[str, Callable[[], TraceRaoBlackwell_ELBO]] = {
    "RB-REINFORCE (k = 1)": lambda: TraceRaoBlackwell_ELBO(1),
    "RB, k = 1, mean of summed": lambda: TraceRaoBlackwell_ELBO(1, baseline=SummedMean()),
    "exact sum": lambda: TraceRaoBlackwell_ELBO(math.inf),
    "REINFORCE": lambda: TraceRaoBlackwell_ELBO(0),
    "REINFORCE+": lambda: TraceRaoBlackwell_ELBO(0, baseline=IndependentDraw()),
    "NVIL": lambda: TraceRaoBlackwell_ELBO(0, baseline=NVIL(mlp(784, 64, 1))),
    "RELAX": lambda: TraceRaoBlackwell_ELBO(0, baseline=RELAX(Control())),
    "Gumbel-softmax": lambda: TraceRaoBlackwell_ELBO(baseline=GumbelSoftmax(0.5), entropy="exact"),
}


class Experiment:
    def __init__(self, name: str, seed: int, device: str) -> None:
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        self.model, self.guide = Generator().to(device), Inference().to(device)
        # A baseline's networks come from the seed as well, and take no draws from what follows:
        # every estimator begins with the same model, and meets the same minibatches.
        with torch.random.fork_rng():
            elbo = METHODS[name]()
        self.module = elbo.to(device)(self.model, self.guide)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-3)

    def step(self, unlabelled: Tensor | None, x: Tensor, label: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.module(x, one_hot(label, CLASSES).to(x))
        loss = loss + cross_entropy(self.guide.classifier(x), label, reduction="sum")
        if unlabelled is not None:
            loss = loss + self.module(unlabelled)
        loss.backward()
        self.optimizer.step()

    def evaluate(self, x: Tensor, label: Tensor) -> tuple[float, float]:
        """Test accuracy, and the negative ELBO of an image at its most probable label."""
        with torch.no_grad():
            found = self.guide.classifier(x).argmax(-1)
            loss = self.module(x, one_hot(found, CLASSES).to(x)) / len(x)
        return (found == label).double().mean().item(), loss.item()


def warmed_up(args: argparse.Namespace, data: list[Tensor]) -> list[dict[str, Tensor]]:
    """Networks trained on the labelled images alone: where every method begins."""
    labelled, labels = data[:2]
    run = Experiment("exact sum", args.seed, args.device)
    for _ in range(args.warmup):
        for chosen in torch.randperm(len(labelled)).split(64):
            run.step(None, labelled[chosen], labels[chosen])
    accuracy, bound = run.evaluate(*data[3:])
    print(f"after {args.warmup} labelled epochs: accuracy {accuracy:.4f}, -ELBO {bound:.2f}")
    return [run.model.state_dict(), run.guide.state_dict()]


def train(
    args: argparse.Namespace, name: str, data: list[Tensor], start: list[dict[str, Tensor]]
) -> tuple[list[float], ...]:
    labelled, labels, unlabelled, test, truth = data
    run = Experiment(name, args.seed, args.device)
    run.model.load_state_dict(start[0])
    run.guide.load_state_dict(start[1])
    accuracy, bounds, seconds = [], [], []
    for epoch in range(args.epochs):
        begun = time.perf_counter()
        parts = torch.randperm(len(unlabelled)).split(64)
        few = torch.randperm(len(labelled)).tensor_split(len(parts))
        for part, chosen in zip(parts, few, strict=True):
            run.step(unlabelled[part], labelled[chosen], labels[chosen])
        seconds.append(time.perf_counter() - begun)
        for values, value in zip((accuracy, bounds), run.evaluate(test, truth), strict=True):
            values.append(value)
        print(
            f"{name:24s} epoch {epoch + 1:3d}: accuracy {accuracy[-1]:.4f}, "
            f"-ELBO {bounds[-1]:.2f}, {seconds[-1]:.1f} s",
            flush=True,
        )
    return accuracy, bounds, seconds


def compare_times(x: Tensor, rounds: int) -> None:
    """Median time of one unlabelled step, with the two estimators taking turns."""
    steps = {
        name: Experiment(name, 0, str(x.device)) for name in ("RB-REINFORCE (k = 1)", "exact sum")
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 10):
        for name, run in steps.items():
            begun = time.perf_counter()
            run.optimizer.zero_grad()
            run.module(x).backward()
            run.optimizer.step()
            if x.is_cuda:
                torch.cuda.synchronize()
            if i >= 10:
                times[name].append(time.perf_counter() - begun)
    first, second = (statistics.median(t) for t in times.values())
    print(f"k = 1: {1e3 * first:.2f} ms, exact sum: {1e3 * second:.2f} ms")
    print(f"ratio {first / second:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=100, help="epochs on labelled images alone")
    parser.add_argument("--full", action="store_true", help="100 epochs of each estimator")
    parser.add_argument("--smoke", action="store_true", help="one epoch, to see that it runs")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--time", action="store_true")
    args = parser.parse_args()
    if args.full:
        args.epochs = 100
    if args.smoke:
        args.epochs = args.warmup = 1
    images, classes = (t.to(args.device) for t in read_mnist(args.data_root, True))
    pyro.enable_validation(False)
    if args.time:
        compare_times(images[:64], 100)
        return
    test = [t.to(args.device) for t in read_mnist(args.data_root, False)]
    few = min(5000, len(images) // 2)
    data = [images[:few], classes[:few], images[few:50_000], *test]
    start = warmed_up(args, data)
    curves, rows, results = {}, [], Results(args.out / "semi_supervised.csv", args.seed)
    for name in args.methods:
        accuracy, bounds, seconds = train(args, name, data, start)
        curves[name] = bounds
        for i, (right, bound, time_of) in enumerate(zip(accuracy, bounds, seconds, strict=True), 1):
            results.add(method=name, epoch=i, accuracy=right, negative_elbo=bound, seconds=time_of)
        spread = f"{statistics.median(seconds):.1f}"
        rows.append([name, f"{accuracy[-1]:.4f}", f"{bounds[-1]:.2f}", spread])
        header = ["method", "test accuracy", "-ELBO at the MAP label", "s/epoch"]
        print(write_table(args.out / "semi_supervised.md", header, rows))
        draw_curves(args.out / "semi_supervised.png", curves, "epoch", "-ELBO at the MAP label")


if __name__ == "__main__":
    main()
