"""Compare plain, importance weighted and annealed bounds on images of digits.

A VAE of binary pixels is trained with each objective. All are evaluated with the same estimates of
the negative log-likelihood of the test images (NLL, nats per image; lower is better): a long
annealed chain, and the importance weighted bound with 500 draws. The script answers two questions:

1. Which objective is the best at equal epochs (``--epochs``) or equal CPU time (``--seconds``)?
2. Which objective improves a model most after training with the ELBO (``--pretrain``)?

Run it on the digits of scikit-learn, on MNIST, or on color images::

    python tutorials/annealing/mnist.py
    python tutorials/annealing/mnist.py --data-root data --epochs 4
    python tutorials/annealing/mnist.py --data-root data --pretrain 24 --seconds 30 --seeds 0,1,2
    python tutorials/annealing/mnist.py --data-root data --dense
    python tutorials/annealing/mnist.py --data-root data --paper
    python tutorials/annealing/mnist.py --data-root data --dataset cifar10 --paper

The last two commands reproduce Tables 1 and 3 of Thin et al. (2021): convolutional networks, 64
latents (128 for color images, whose pixels are normal with a deviation of 1), 100 epochs, five
seeds, all test images. They take days on a CPU, and hours with ``--epochs 3 --seeds 0
--test-images 1000``. ``--dense`` is Table 1 with one hidden layer of 400 units, and takes hours.
``--dataset celeba`` is Table 2, with images of 64x64 pixels. ``--dataset`` may also name an
``.npz`` file in the folder with ``train_images`` and ``test_images``, bytes of shape [images, 3,
size, size].

If a run was interrupted, the same command continues it from the last epoch. ``--minutes``
interrupts it, and more ``--epochs`` continue a finished run. ``--compiled`` records each step once
and compiles it. Times are CPU times of this process on one thread, so they are comparable on a busy
machine; with ``--device cuda`` they are wall-clock times.
"""

import argparse
import copy
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.distributions.transforms as T
import torch
from matplotlib.figure import Figure
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor, nn
from tqdm import tqdm

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    AdaptiveStepSize,
    CompiledELBO,
    LearnedStepSize,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
    load_checkpoint,
    save_checkpoint,
)

sys.path.append(str(Path(__file__).parents[1]))  # modules of the folder of all tutorials
from annealing.images import Task, load
from annealing.networks import convolutional
from data import add_data_flags
from results import commit, machine, same_settings, write


def longer_steps() -> UnderdampedLangevin:
    return UnderdampedLangevin(AdaptiveStepSize(target_acceptance=0.8))


# The losses to compare. Step sizes adapt by default.
OBJECTIVES: dict[str, Callable[[], Any]] = {
    "ELBO": lambda: TraceSGVB_ELBO(),
    "RealNVP": lambda: TraceSGVB_ELBO(),  # with a flow in the guide
    "IWAE-3": lambda: TraceIWAE_ELBO(3),
    "IWAE-5": lambda: TraceIWAE_ELBO(5),
    "IWAE-10": lambda: TraceIWAE_ELBO(10),
    "IWAE-50": lambda: TraceIWAE_ELBO(50),
    # The gradient of Burda et al. (2016). The default is doubly reparameterized.
    "IWAE-5-reparam": lambda: TraceIWAE_ELBO(5, gradient_estimator="reparam"),
    "IWAE-10-reparam": lambda: TraceIWAE_ELBO(10, gradient_estimator="reparam"),
    "SIS-5-ULA": lambda: TraceSIS_ELBO(5, ULA()),
    "SIS-10-ULA": lambda: TraceSIS_ELBO(10, ULA()),
    # In the coordinates of the paper. Other chains move the noise of the encoder.
    "SIS-1-ULA-latent": lambda: TraceSIS_ELBO(1, ULA(), coordinates="latent"),
    "SIS-3-ULA-latent": lambda: TraceSIS_ELBO(3, ULA(), coordinates="latent"),
    "SIS-5-ULA-latent": lambda: TraceSIS_ELBO(5, ULA(), coordinates="latent"),
    "SIS-10-ULA-latent": lambda: TraceSIS_ELBO(10, ULA(), coordinates="latent"),
    "SIS-5": lambda: TraceSIS_ELBO(5, UnderdampedLangevin()),
    "SIS-10": lambda: TraceSIS_ELBO(10, UnderdampedLangevin()),
    "SIS-5-reweighted": lambda: TraceSIS_ELBO(
        5, UnderdampedLangevin(), gradient_estimator="reweighted"
    ),
    "AIS-3": lambda: TraceAIS_ELBO(3, MALA(), num_particles=2),
    "AIS-5": lambda: TraceAIS_ELBO(5, MALA(), num_particles=2),
    # The defaults: trained transitions, and Hamiltonian moves along a learned schedule.
    "SIS-5-default": lambda: TraceSIS_ELBO(5),
    "SIS-10-default": lambda: TraceSIS_ELBO(10),
    "AIS-5-default": lambda: TraceAIS_ELBO(5),
    # Variants of SIS-5 with a less noisy gradient or a tighter bound.
    "SIS-5-multi-2": lambda: TraceSIS_ELBO(
        5, UnderdampedLangevin(), num_particles=2, multi_sample=True
    ),
    "SIS-5-multi-3": lambda: TraceSIS_ELBO(
        5, UnderdampedLangevin(), num_particles=3, multi_sample=True
    ),
    "SIS-5-momentum-0.5": lambda: TraceSIS_ELBO(5, UnderdampedLangevin(momentum=0.5)),
    # Longer steps than the default: tighter for a trained model, worse at the start of training.
    "SIS-5-target-0.8": lambda: TraceSIS_ELBO(5, longer_steps()),
    "SIS-10-target-0.8": lambda: TraceSIS_ELBO(10, longer_steps()),
    # A step size that is trained with the gradient of the bound, without a target acceptance.
    "SIS-5-learned": lambda: TraceSIS_ELBO(5, UnderdampedLangevin(LearnedStepSize(0.01))),
    "SIS-10-learned": lambda: TraceSIS_ELBO(10, UnderdampedLangevin(LearnedStepSize(0.01))),
    "SIS-5-reweighted-target-0.8": lambda: TraceSIS_ELBO(
        5, longer_steps(), gradient_estimator="reweighted"
    ),
}
FROM_SCRATCH = "ELBO,IWAE-10,IWAE-50,SIS-5-ULA,SIS-10-ULA,SIS-5,SIS-10,AIS-5"
PAPER = "ELBO,RealNVP,IWAE-10,IWAE-50,SIS-5-ULA-latent,SIS-10-ULA-latent,AIS-3,AIS-5"
DENSE = "ELBO,IWAE-10,SIS-5-ULA,SIS-5-default,AIS-5-default,SIS-10-ULA,AIS-5,SIS-10-default"
AFTER_PRETRAINING = "ELBO,IWAE-5,IWAE-10,SIS-5,SIS-5-reweighted,SIS-5-ULA"


class VAE(nn.Module):
    """
    A VAE of binary or color images.

    model: z ~ Normal(0, I), x | z ~ Bernoulli(decoder(z)), or Normal(decoder(z), I) for color
    images; guide: z | x ~ Normal(encoder(x)), transformed by the flow if there is one.
    """

    def __init__(self, task: Task, num_hidden: int | None, num_latents: int) -> None:
        """``num_hidden``: None for convolutional networks."""
        super().__init__()
        self.num_latents, self.binary = num_latents, task.binary
        self.flow = nn.ModuleList()
        if num_hidden is None:
            self.encoder, self.decoder = convolutional(num_latents, task.channels, task.size)
            return
        num_pixels = task.train.shape[-1]
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
            pyro.sample("x", self.likelihood(z).to_event(1), obs=x)

    def likelihood(self, z: Tensor) -> Any:
        result = self.decoder(z)
        return dist.Bernoulli(logits=result) if self.binary else dist.Normal(result, 1.0)

    def guide(self, x: Tensor) -> None:
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", len(x)):
            loc, log_scale = self.encoder(x).chunk(2, dim=-1)
            law = dist.Normal(loc, log_scale.exp()).to_event(1)
            if self.flow:
                pyro.module("flow", self.flow)
                law = dist.TransformedDistribution(law, self.transforms())
            pyro.sample("z", law)

    def add_flow(self, num_layers: int = 8, num_hidden: int = 128) -> None:
        """Transform the guide's draws by affine couplings (Real NVP, Dinh et al. 2017)."""
        d, hidden = self.num_latents, [num_hidden] * 2
        self.flow.extend(T.affine_coupling(d, hidden) for _ in range(num_layers))

    def transforms(self) -> list[Any]:
        """Return the couplings; the halves of the latents change places after each."""
        turned = torch.arange(self.num_latents).flip(0)
        return [part for layer in self.flow for part in (layer, T.Permute(turned))]


# --- Training -------------------------------------------------------------------------------------


@dataclass
class Result:
    """A line of the CSV, with values in nats per image and times in CPU seconds."""

    objective: str
    seed: int
    pretrained_epochs: float
    epochs: float
    cpu_seconds: float  # wall-clock seconds on a GPU
    bound: float  # the bound of the objective over the last tenth of the steps
    nll_chain: float
    nll_chain_error: float  # standard error over the test images
    nll_iwae: float
    nll_paper: float  # by the short chain with which the paper evaluates
    step_size: float | None
    acceptance: float | None
    commit: str
    machine: str
    curve: list[tuple[float, float]] = field(default_factory=list)  # CPU seconds, quick NLL
    each: list[float] = field(default_factory=list)  # nll_chain of each test image


@dataclass
class Limits:
    """The end of training, in epochs and CPU seconds."""

    epochs: float
    seconds: float = float("inf")


def quiet() -> float:
    """Return the seconds between updates of a progress bar: more for a log file."""
    return 30 if "CI" in os.environ or not sys.stderr.isatty() else 0.5


def train(
    name: str, vae: VAE, task: Task, args: argparse.Namespace, limits: Limits, path: Path
) -> tuple[list[float], list[tuple[float, float]], Any]:
    """
    Train until the limit of epochs or CPU seconds is reached.

    Return the bounds, a few test NLLs during training with their CPU times, and the loss.

    :param path: the checkpoint. Each epoch replaces it, and a second call starts from it.
    :raises SystemExit: at the end of an epoch after ``--minutes``.
    """
    pyro.clear_param_store()
    loss = OBJECTIVES[name]()
    adam = Adam({"lr": args.learning_rate})
    cuda = args.device.startswith("cuda")
    clock = time.perf_counter if cuda else time.process_time
    options = {"mode": "reduce-overhead"} if cuda else {}  # as CUDA graphs
    wrapped = CompiledELBO(loss, **options) if args.compiled else loss
    svi = SVI(vae.model, vae.guide, adam, loss=wrapped)
    past: Any = {"bounds": [], "curve": [], "spent": 0.0}
    if path.exists():
        past = load_checkpoint(path, {"svi": svi})
    bounds, curve, spent = past["bounds"], [(a, b) for a, b in past["curve"]], past["spent"]

    def save() -> None:
        save_checkpoint(path, {"svi": svi}, bounds=bounds, curve=curve, spent=spent)

    def quick_nll() -> tuple[float, float]:
        # A thousand images are enough for the curves.
        return spent, -held_out(vae, task.test[:1000], TraceIWAE_ELBO(50)).mean().item()

    per_epoch = -(-len(task.train) // args.batch_size)
    batches = task.batches(args.batch_size)
    with tqdm(total=100, desc=f"{name:>18}", unit="%", mininterval=quiet()) as progress:
        while (
            fraction := max(len(bounds) / per_epoch / limits.epochs, spent / limits.seconds)
        ) < 1:
            progress.update(round(100 * fraction) - progress.n)
            if fraction >= len(curve) / args.checkpoints:
                curve.append(quick_nll())
            x = next(batches)
            start = clock()
            bounds.append(-svi.step(x) / len(x))
            spent += clock() - start
            progress.set_postfix_str(f"{bounds[-1]:.1f}", refresh=False)
            if len(bounds) % per_epoch == 0:
                save()
                if time.monotonic() > args.end:
                    raise SystemExit(f"{path} has {len(bounds) // per_epoch} epochs: no time left")
    save()  # Also save within an epoch, because the stored evaluations are of this model.
    curve.append(quick_nll())
    return bounds, curve, loss


# --- Evaluation -----------------------------------------------------------------------------------


def estimators() -> dict[str, TraceSIS_ELBO | TraceIWAE_ELBO | TraceAIS_ELBO]:
    """
    Return the estimators for all models. Each estimates log p(x) from below.

    The last estimator is that of the paper: five annealing steps of HMC, ten chains in the log.
    """
    # The step size is fixed, and small enough for the guides of all objectives.
    kernel = UnderdampedLangevin(0.4, momentum=0.9)
    return {
        "chain": TraceSIS_ELBO(40, kernel, num_particles=10, multi_sample=True),
        "IWAE-500": TraceIWAE_ELBO(500),
        "paper": TraceAIS_ELBO(5, HMC(0.05, num_leapfrog=3), num_particles=10, multi_sample=True),
    }


@torch.no_grad()
def held_out(vae: VAE, x: Tensor, estimator: Any, progress: str | None = None) -> Tensor:
    """Return the estimate of log p(x) for each image."""
    # The decoded copies of a chunk of images fit into the cache of the processor, or fill a GPU.
    most = 20_000 if x.is_cuda else min(1000, 20 * estimator.num_particles)
    chunks = x.split(max(1, most // estimator.num_particles))
    with tqdm(chunks, progress, disable=progress is None, mininterval=quiet()) as shown:
        return torch.cat(
            [estimator.bounds(vae.model, vae.guide, chunk).per_datum for chunk in shown]
        )


def evaluations(vae: VAE, x: Tensor, path: Path) -> list[Tensor]:
    """Return the NLL of each image by each estimator. Read finished estimates from files."""
    result = []
    for name, estimator in estimators().items():
        kept = path.with_suffix(f".{name}.pt")
        if not kept.exists():
            pyro.set_rng_seed(0)  # The noise of the estimators is the same for all models.
            torch.save(-held_out(vae, x, estimator, f"{path.stem}, {name}"), kept)
        result.append(torch.load(kept, weights_only=True, map_location="cpu"))
    return result


def run(name: str, vae: VAE, task: Task, args: argparse.Namespace, seed: int) -> Result:
    """Train the VAE with the objective, and evaluate it. Read finished parts from files."""
    path = args.out / f"{name}-{seed}.json"
    if path.exists():
        past = Result(**json.loads(path.read_text()))
        if past.epochs >= args.epochs or math.isinf(args.epochs):
            return past
        for estimate in path.parent.glob(f"{path.stem}.*.pt"):  # of fewer epochs
            estimate.unlink()
    pyro.set_rng_seed(seed + 1000)
    limits = Limits(args.epochs, args.seconds)
    bounds, curve, loss = train(name, vae, task, args, limits, path.with_suffix(".pt"))
    record = getattr(loss, "last_step", None)
    chain, iwae, paper = evaluations(vae, task.test, path)
    result = Result(
        name,
        seed,
        args.pretrain,
        len(bounds) * args.batch_size / len(task.train),
        curve[-1][0],
        statistics.fmean(bounds[-max(1, len(bounds) // 10) :]),
        chain.mean().item(),
        chain.std().item() / len(chain) ** 0.5,
        iwae.mean().item(),
        paper.mean().item(),
        None if record is None else record.step_size.mean().item(),
        None if record is None else record.acceptance.mean().item(),
        args.commit,
        machine(),
        curve,
        chain.tolist(),
    )
    path.write_text(json.dumps(asdict(result)))
    return result


# --- The table, the CSV and the figure ------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """
    Return a Markdown table with a row per objective, a column per seed, and the gain over the first
    row. The standard error of the gain is that of the mean of differences per image.
    """
    seeds = list(dict.fromkeys(r.seed for r in results))
    head = [
        "objective",
        *(f"NLL, seed {s}" for s in seeds),
        "mean gain",
        "IWAE-500",
        "short AIS",
        "epochs",
    ]
    lines = [[*head, "CPU s"]]
    first = {r.seed: Tensor(r.each) for r in results if r.objective == results[0].objective}
    for name in dict.fromkeys(r.objective for r in results):
        mine = {r.seed: r for r in results if r.objective == name}
        gains = torch.stack([first[s] - Tensor(r.each) for s, r in mine.items()]).mean(0)
        gain = f"{gains.mean():+.2f} ± {gains.std() / len(gains) ** 0.5:.2f}"
        nlls = [f"{mine[s].nll_chain:.2f}" if s in mine else "" for s in seeds]
        rest = [
            statistics.fmean(getattr(r, key) for r in mine.values())
            for key in ("nll_iwae", "nll_paper", "epochs", "cpu_seconds")
        ]
        lines.append(
            [
                name,
                *nlls,
                gain,
                *map("{:.2f}".format, rest[:2]),
                *map("{:.1f}".format, rest[2:]),
            ]
        )
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(results: Sequence[Result], path: Path) -> None:
    """Plot the NLL of each seed (left), and the NLL over CPU time for the first seed (right)."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(r.objective for r in results))
    for i, name in enumerate(names):
        mine = [r for r in results if r.objective == name]
        left.plot([r.nll_chain for r in mine], [i] * len(mine), "o", color=f"C{i}", alpha=0.6)
        mean = statistics.fmean(r.nll_chain for r in mine)
        left.plot([mean], [i], "|", ms=22, mew=2, color=f"C{i}")
        x, y = zip(*mine[0].curve, strict=True)
        right.plot(x, y, "o-", ms=3, lw=1.2, color=f"C{i}", label=name)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set(title="Test NLL after training (dots: seeds, bar: mean)", xlabel="nats per image")
    # Leave out the first value, which is of an untrained model, or the same for all.
    shown = [value for r in results for _, value in r.curve[1:]]
    margin = 0.05 * (max(shown) - min(shown)) + 1e-3
    right.set_ylim(min(shown) - margin, max(shown) + margin)
    right.set(
        title="Test NLL during training (IWAE-50)", xlabel="CPU seconds", ylabel="nats per image"
    )
    right.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


# --- The command line -----------------------------------------------------------------------------


def names(text: str) -> list[str]:
    chosen = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in chosen if name not in OBJECTIVES]:
        known = ", ".join(OBJECTIVES)
        raise argparse.ArgumentTypeError(f"unknown objective {unknown[0]!r}; known are {known}")
    return chosen


def positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add_data_flags(parser, default=None)
    add("--dataset", default="mnist", help="mnist, cifar10, celeba or an .npz file in --data-root")
    add("--objectives", type=names, metavar="A,B", help=f"some of {', '.join(OBJECTIVES)}")
    add("--epochs", type=positive, help="epochs of each objective; default: 20 without --seconds")
    add("--seconds", type=positive, help="CPU seconds of each objective, without evaluation")
    add(
        "--pretrain", type=positive, default=0, metavar="EPOCHS", help="epochs with the ELBO before"
    )
    add("--seeds", type=lambda text: [int(s) for s in text.split(",")], metavar="0,1")
    add("--hidden", type=int, default=200)
    add("--latent", type=int, default=20)
    add("--batch-size", type=int, help="default: 100; 50 for color images")
    add("--learning-rate", type=positive, default=2e-3)
    add("--limit", type=int, metavar="N", help="train on the first N images; default: all")
    add("--test-images", type=int, metavar="N", help="default: 1000; all with --paper, --dense")
    add("--checkpoints", type=int, default=5, help="number of test NLLs during training")
    add("--out", type=Path, default=Path("mnist_annealing"), metavar="DIR")
    add("--device", default="cpu", help="of the networks and the images: cpu, or cuda")
    add("--minutes", type=positive, default=math.inf, help="of this run, without evaluation")
    add("--compiled", action="store_true", help="record each step once, and compile it")
    add("--dense", action="store_true", help="settings of the paper, but one hidden layer of 400")
    add("--paper", action="store_true", help="networks, epochs and seeds of the paper")
    add("--smoke", action="store_true", help="a trial run with few images and steps")
    args = parser.parse_args(argv)
    if args.data_root is not None and args.data_root.suffix == ".npz":
        args.data_root, args.dataset = args.data_root.parent, args.data_root.name
    colour = args.data_root is not None and args.dataset != "mnist"
    args.batch_size = args.batch_size or (50 if colour else 100)
    if args.paper or args.dense:
        if args.data_root is None:
            flag = "--paper" if args.paper else "--dense"
            parser.error(f"{flag} needs --data-root, the folder of MNIST or a file of images")
        args.hidden, args.latent = 400 if args.dense else None, 128 if colour else 64
        args.epochs, args.learning_rate = args.epochs or 100.0, 1e-3
        args.test_images = args.test_images or 10_000
        args.seeds = args.seeds or ([0, 1] if args.dense else [0, 1, 2, 3, 4])
        args.objectives = args.objectives or names(DENSE if args.dense else PAPER)
        args.compiled = args.compiled or args.dense
    args.seeds, args.test_images = args.seeds or [0], args.test_images or 1000
    default = AFTER_PRETRAINING if args.pretrain else FROM_SCRATCH
    args.objectives = args.objectives or names(default)
    if args.smoke:
        args.epochs, args.limit, args.test_images, args.checkpoints = 1.0, 200, 20, 1
        args.pretrain = min(args.pretrain, 1.0)
    if args.epochs is None:
        args.epochs = 20.0 if args.seconds is None else float("inf")
    args.seconds = args.seconds or float("inf")
    args.end = time.monotonic() + 60 * args.minutes
    return args


def main(argv: Sequence[str] | None = None) -> list[Result]:
    args = parse(argv)
    torch.set_num_threads(1)  # CPU times are comparable only with one thread.
    pyro.enable_validation(False)  # Validation takes a large part of a step of such small models.
    same_settings(args, may_differ=("objectives", "seeds", "download", "epochs", "minutes", "end"))
    args.commit = (
        commit()
    )  # Read the commit at the start, because files may change during a long run.
    task = load(args.data_root, args.limit, args.test_images, args.dataset, args.download)
    task = task.to(args.device)
    results: list[Result] = []
    for seed in args.seeds:
        pyro.set_rng_seed(seed)
        start = VAE(task, args.hidden, args.latent).to(args.device)
        if args.pretrain:
            train("ELBO", start, task, args, Limits(args.pretrain), args.out / f"start-{seed}.pt")
        for name in args.objectives:
            vae = copy.deepcopy(start)
            if name == "RealNVP":
                vae.add_flow()
            results.append(run(name, vae.to(args.device), task, args, seed))
            # Write now, because a long run may be interrupted.
            long = {"curve", "each"}
            rows = [{k: v for k, v in asdict(r).items() if k not in long} for r in results]
            write(rows, args.out / "results.csv")
    print(f"\n{task.name}, {len(task.train)} training and")
    print(f"{len(task.test)} test images; NLL in nats per image, standard error over images")
    print(f"{results[0].nll_chain_error:.2f}, the same images for all\n\n{table(results)}")
    (args.out / "results.md").write_text(table(results) + "\n")
    draw(results, args.out / "figure.png")
    print(f"\nresults and figure: {args.out}")
    return results


if __name__ == "__main__":
    # Derivatives of GELU far from zero are denormal numbers, which are slow on Intel processors.
    # The setting affects only this process, not programs that import the script.
    torch.set_flush_denormal(True)
    main()
