"""What lost chains do to a model that has just begun to train, with and without defensive weights.

    python -m tests.benchmarks.diverged_chains --data-root data --seeds 1,2,3,4,5

The VAE of ``tutorials/annealing/mnist.py --dense`` from scratch, with the default chain of
``TraceSIS_ELBO``: for each seed the worst bound of a step after the first twenty, and the mean of
the last ten, in nats per image. Without ``--data-root`` on the digits of scikit-learn.
"""

import argparse
import statistics
from pathlib import Path

import pyro
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from tqdm import tqdm

from pyro_mcvae import TraceSIS_ELBO
from tutorials.annealing.images import Task, load
from tutorials.annealing.mnist import VAE


def bounds(task: Task, seed: int, args: argparse.Namespace, defensive: float) -> list[float]:
    """Of the first steps of a training run."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    vae = VAE(task, 400, 64)
    loss = TraceSIS_ELBO(args.num_steps, defensive=defensive)
    svi = SVI(vae.model, vae.guide, Adam({"lr": 1e-3}), loss=loss)
    batches = task.batches(100)
    steps = tqdm(range(args.steps), f"seed {seed}, {defensive}", leave=False)
    return [-svi.step(next(batches)) / 100 for _ in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", type=Path, metavar="DIR")
    parser.add_argument("--seeds", type=lambda s: [int(n) for n in s.split(",")], default=[1, 2])
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--num-steps", type=int, default=10, help="K")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    task = load(args.data_root, None, 10)
    task.train = task.train[: len(task.train) // 100 * 100]
    shares = [0.0, 0.01]
    print("| seed | " + " | ".join(f"worst, {s} | last ten, {s}" for s in shares) + " |")
    print("| --- " * (1 + 2 * len(shares)) + "|")
    for seed in args.seeds:
        result = [bounds(task, seed, args, fraction) for fraction in shares]
        row = [f"{min(f[20:]):.0f} | {statistics.fmean(f[-10:]):.1f}" for f in result]
        print(f"| {seed} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
