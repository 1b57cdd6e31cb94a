"""Semi-supervised MNIST (Liu et al. 2019, section 5.3): 5,000 labels, 45,000 images without.

Each estimator sums or samples the class y; z | x, y is reparameterized::

    python tutorials/rao_blackwell/semi_supervised.py --data-root data
    python tutorials/rao_blackwell/semi_supervised.py --data-root data --rates 1e-3 3e-4 1e-4
    python tutorials/rao_blackwell/semi_supervised.py --data-root data --paper

``--paper`` is the scale of the paper: 100 epochs of each estimator, with the step size that has the
best accuracy on 10,000 validation images after ``--tuning`` epochs. The paper has 10 runs: repeat
the command with another ``--seed`` and ``--out``. All estimators start with 100 epochs on the
labelled images. ``--compiled`` records each kind of step once and compiles it. If a run was
interrupted, the same command continues it from the last epoch, also with other ``--methods`` or
more ``--epochs``. Times are CPU times of this process on one thread, so they are comparable on a
busy machine. ``--time`` only times an unlabelled step of k = 1 and of the exact sum.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import (
    GumbelSoftmax,
    Results,
    add_data_flags,
    annealed,
    draw_curves,
    mnist,
    same_settings,
    write_table,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from tqdm import tqdm

from pyro_mcvae import (
    NVIL,
    RELAX,
    CompiledELBO,
    IndependentDraw,
    SummedMean,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    load_checkpoint,
    save_checkpoint,
)

LATENT, CLASSES = 8, 10


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(a, b)]
    return nn.Sequential(*layers)


def joined(*parts: Tensor) -> Tensor:
    """Concatenate vectors with different leading dims: slots of y, and data without slots."""
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
    def __init__(self, relaxed: bool = False) -> None:
        """``relaxed``: whether classes have the gradient of Gumbel-softmax."""
        super().__init__()
        self.relaxed = relaxed
        self.register_buffer("temperature", torch.tensor(1.0))
        self.classifier = mlp(784, 256, 256, 256, CLASSES)
        self.encoder = mlp(784 + CLASSES, 128, 128, 2 * LATENT)

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        with pyro.plate("data", len(x)):
            if y is None:
                logits = self.classifier(x)
                law = dist.OneHotCategorical(logits=logits)
                if self.relaxed:
                    law = GumbelSoftmax(logits, self.temperature)
                y = pyro.sample("y", law)
            loc, log_scale = self.encoder(joined(x, y)).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


class Control(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(CLASSES + 784, 64, 1)

    def forward(self, relaxed: Tensor, x: Tensor) -> Tensor:
        return self.layers(joined(relaxed, x)).squeeze(-1)


GUMBEL = "Gumbel-softmax"
METHODS: dict[str, Callable[[], TraceRaoBlackwell_ELBO | TraceSGVB_ELBO]] = {
    "RB-REINFORCE (k = 1)": lambda: TraceRaoBlackwell_ELBO(1),
    "RB, k = 1, mean of summed": lambda: TraceRaoBlackwell_ELBO(1, baseline=SummedMean()),
    "exact sum": lambda: TraceRaoBlackwell_ELBO(math.inf),
    "REINFORCE": lambda: TraceRaoBlackwell_ELBO(0),
    "REINFORCE+": lambda: TraceRaoBlackwell_ELBO(0, baseline=IndependentDraw()),
    "NVIL": lambda: TraceRaoBlackwell_ELBO(0, baseline=NVIL(mlp(784, 64, 1))),
    "RELAX": lambda: TraceRaoBlackwell_ELBO(0, baseline=RELAX(Control())),
    GUMBEL: TraceSGVB_ELBO,
}


# Test accuracies of Table 1 of the paper, with standard errors over 10 runs.
PAPER = {
    "RB-REINFORCE (k = 1)": "0.965 ± 0.001",
    "exact sum": "0.966 ± 0.001",
    "REINFORCE": "0.940 ± 0.002",
    "REINFORCE+": "0.953 ± 0.001",
    "RELAX": "0.966 ± 0.001",
    "NVIL": "0.956 ± 0.002",
    GUMBEL: "0.954 ± 0.001",
}

# Minibatches: images without labels, images with labels, and their labels.
Batch = tuple[Tensor | None, Tensor, Tensor]


class Experiment:
    def __init__(
        self, name: str, seed: int, device: str, compiled: bool = False, rate: float = 1e-3
    ) -> None:
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        self.model, self.guide = Generator().to(device), Inference(name == GUMBEL).to(device)
        # Creating the networks of a baseline does not advance the random state, so that every
        # estimator gets the same minibatches.
        with torch.random.fork_rng():
            elbo = METHODS[name]()
        self.uncompiled = elbo(self.model, self.guide).to(device)
        # The evaluation takes one step per epoch, so recording it would not pay off.
        self.module = CompiledELBO(elbo)(self.model, self.guide) if compiled else self.uncompiled
        self.optimizer = torch.optim.Adam(self.uncompiled.parameters(), lr=rate)

    def step(self, unlabelled: Tensor | None, x: Tensor, label: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.module(x, one_hot(label, CLASSES).to(x))
        loss = loss + cross_entropy(self.guide.classifier(x), label, reduction="sum")
        if unlabelled is not None:
            loss = loss + self.module(unlabelled)
        loss.backward()
        self.optimizer.step()

    def evaluate(self, x: Tensor, label: Tensor) -> tuple[float, float]:
        """Return the test accuracy, and the negative ELBO at the most probable label."""
        with torch.no_grad():
            result = self.guide.classifier(x).argmax(-1)
            loss = self.uncompiled(x, one_hot(result, CLASSES).to(x)) / len(x)
        return (result == label).double().mean().item(), loss.item()

    def epochs(
        self,
        count: int,
        batches: Callable[[], Iterable[Batch]],
        path: Path,
        row: Callable[..., dict[str, Any]] = dict,
    ) -> Iterator[dict[str, Any]]:
        """
        Train. Yield a row for each epoch, including the epochs in the checkpoint.

        :param batches: returns the minibatches of an epoch.
        :param path: the checkpoint. Each epoch replaces it.
        :param row: evaluates an epoch, given its number and seconds.
        """
        parts = {"module": self.uncompiled, "optimizer": self.optimizer}
        rows: Any = load_checkpoint(path, parts)["rows"] if path.exists() else []
        yield from rows[:count]
        for epoch in range(len(rows) + 1, count + 1):
            begun = time.process_time()
            self.guide.temperature.fill_(annealed(epoch - 1))
            for batch in batches():
                self.step(*batch)
            rows.append(row(epoch=epoch, seconds=time.process_time() - begun))
            save_checkpoint(path, parts, rows=rows)
            yield rows[-1]


@dataclass
class Data:
    """Images with labels, images without, and the images for step sizes and for testing."""

    labelled: tuple[Tensor, Tensor]
    unlabelled: Tensor
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def split(args: argparse.Namespace) -> Data:
    """
    Return 5,000 random images with labels, 45,000 without, and the last 10,000 for validation.

    The split depends on the seed. Smaller data sets are divided in the same proportions.
    """
    images, classes = (t.to(args.device) for t in mnist(args.data_root, True, args.download))
    test = [t.to(args.device) for t in mnist(args.data_root, False, args.download)]
    generator = torch.Generator().manual_seed(args.seed)
    count = len(images) * 5 // 6
    order = torch.randperm(count, generator=generator).to(args.device)
    few, rest = order[: count // 10], order[count // 10 :]
    validation = images[count:], classes[count:]
    return Data((images[few], classes[few]), images[rest], validation, (test[0], test[1]))


def warmed_up(args: argparse.Namespace, data: Data) -> list[dict[str, Tensor]]:
    """Return networks trained only on the labelled images, from which every method starts."""
    x, labels = data.labelled
    run = Experiment("exact sum", args.seed, args.device, args.compiled)

    def batches() -> Iterable[Batch]:
        return ((None, x[i], labels[i]) for i in torch.randperm(len(labels)).split(64))

    epochs = run.epochs(args.warmup, batches, args.out / "warmup.pt")
    for _ in tqdm(epochs, "labelled images", args.warmup, unit="epoch", disable=None):
        pass
    accuracy, bound = run.evaluate(*data.test)
    print(f"after {args.warmup} labelled epochs: accuracy {accuracy:.4f}, -ELBO {bound:.2f}")
    return [run.model.state_dict(), run.guide.state_dict()]


def train(
    args: argparse.Namespace,
    name: str,
    rate: float,
    data: Data,
    start: list[dict[str, Tensor]],
    results: Results,
    epochs: int,
) -> list[dict[str, Any]]:
    """Return the rows of one method at one step size."""
    x, labels = data.labelled
    run = Experiment(name, args.seed, args.device, args.compiled, rate)
    run.model.load_state_dict(start[0])
    run.guide.load_state_dict(start[1])

    def batches() -> Iterable[Batch]:
        parts = torch.randperm(len(data.unlabelled)).split(64)
        few = torch.randperm(len(x)).tensor_split(len(parts))
        pairs = tqdm(zip(parts, few, strict=True), name, len(parts), leave=False, disable=None)
        return ((data.unlabelled[part], x[i], labels[i]) for part, i in pairs)

    def row(epoch: int, seconds: float) -> dict[str, Any]:
        accuracy, bound = run.evaluate(*data.test)
        checked = run.evaluate(*data.validation)
        return results.stamped(
            method=name,
            learning_rate=rate,
            epoch=epoch,
            accuracy=accuracy,
            negative_elbo=bound,
            validation_accuracy=checked[0],
            validation_negative_elbo=checked[1],
            seconds=seconds,
        )

    rows = []
    for result in run.epochs(epochs, batches, args.out / f"{name} {rate:g}.pt", row):
        results.add(**result)
        rows.append(result)
        print(
            f"{name:26s} lr {rate:g} epoch {result['epoch']:3d}: "
            f"accuracy {result['accuracy']:.4f}, "
            f"-ELBO {result['negative_elbo']:.2f}, {result['seconds']:.1f} s",
            flush=True,
        )
    return rows


def tuned(rows: dict[float, list[dict[str, Any]]]) -> float:
    """Return the step size with the highest accuracy on the validation images."""
    return max(rows, key=lambda rate: rows[rate][-1]["validation_accuracy"])


def summarize(result: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Print a table of the last epochs, and plot curves, given the rows of each method."""
    header = ["method", "step size", "test accuracy", "the paper's", "mean of last ten"]
    header += ["-ELBO at the MAP label", "s/epoch"]
    table = []
    for name, rows in result.items():
        accuracy, bound = rows[-1]["accuracy"], rows[-1]["negative_elbo"]
        mean = statistics.fmean(row["accuracy"] for row in rows[-10:])
        seconds = statistics.median(row["seconds"] for row in rows)
        paper = PAPER.get(name, "")
        row = [name, f"{rows[-1]['learning_rate']:g}", f"{accuracy:.4f}", paper, f"{mean:.4f}"]
        table.append([*row, f"{bound:.2f}", f"{seconds:.1f}"])
    print(write_table(out / "semi_supervised.md", header, table))
    for key, label, file in (
        ("negative_elbo", "-ELBO at the MAP label", "semi_supervised"),
        ("accuracy", "test accuracy", "semi_supervised_accuracy"),
    ):
        curves = {name: [row[key] for row in rows] for name, rows in result.items()}
        draw_curves(out / f"{file}.png", curves, "epoch", label)


def compare_times(x: Tensor, rounds: int) -> None:
    """Print the median time of an unlabelled step, alternating between two estimators."""
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_flags(parser)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=100, help="epochs on only labelled images")
    parser.add_argument("--paper", action="store_true", help="100 epochs, step sizes tuned")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1e-3], help="step sizes of Adam to choose from"
    )
    parser.add_argument(
        "--tuning", type=int, default=3, help="epochs before the step size is chosen"
    )
    parser.add_argument("--smoke", action="store_true", help="a trial run of one epoch")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compiled", action="store_true", help="record each step, and compile it")
    parser.add_argument("--out", type=Path, default=Path("results/semi_supervised"))
    parser.add_argument("--time", action="store_true")
    args = parser.parse_args(argv)
    if args.paper:
        args.epochs, args.rates = 100, [1e-3, 3e-4, 1e-4]
    if args.smoke:
        args.epochs = args.warmup = args.tuning = 1
    torch.set_num_threads(1)  # CPU times are comparable only with one thread.
    pyro.enable_validation(False)
    data = split(args)
    if args.time:
        compare_times(data.unlabelled[:64], 100)
        return
    run_only = ("methods", "epochs", "tuning", "rates", "paper", "smoke", "time", "download")
    same_settings(args, may_differ=run_only)
    results = Results(args.out / "semi_supervised.csv", args.seed, argv)
    start = warmed_up(args, data)
    result: dict[str, list[dict[str, Any]]] = {}
    for name in args.methods:
        rate = args.rates[0]
        if len(args.rates) > 1:
            tuning = Results(args.out / "tuning.csv", args.seed, argv)
            few = min(args.tuning, args.epochs)
            rate = tuned({r: train(args, name, r, data, start, tuning, few) for r in args.rates})
            print(f"{name}: step size {rate:g}")
        result[name] = train(args, name, rate, data, start, results, args.epochs)
        summarize(result, args.out)


if __name__ == "__main__":
    main()
