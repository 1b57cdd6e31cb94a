"""``log_evidence`` along 200 transitions of HMC: as the kernel takes them, and recorded, in turns.

    python -m tests.benchmarks.recorded_evaluators

Thirty data with a normal latent each, ten chains, double precision, one thread: CPU seconds of the
whole call, recording and warm-up included, and whether the evidences are the same to the bit.
"""

import argparse
import statistics
import time
from unittest import mock

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_mcvae import HMC, log_evidence
from pyro_mcvae.evaluation import options as annealing

KERNELS = {
    "HMC(), which adapts first": HMC(),
    "HMC(0.5)": HMC(0.5),
    "HMC(0.5, num_leapfrog=10)": HMC(0.5, num_leapfrog=10),
}


def model(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 0.7), obs=x)


def guide(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(0.4 * x, 0.9))


def seconds(x: Tensor, kernel: HMC, least: int, seed: int) -> tuple[float, Tensor]:
    """:param least: from how many transitions on they are recorded."""
    pyro.set_rng_seed(seed)
    start = time.process_time()
    with mock.patch.object(annealing, "_LONG", least):
        result = log_evidence(model, guide, x, num_particles=10, schedule=200, kernel=kernel)
    return time.process_time() - start, result.log_evidence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    x = torch.randn(30)
    for name, kernel in KERNELS.items():
        plain, recorded, same = [], [], True
        for seed in range(args.repeats):
            (a, one), (b, two) = seconds(x, kernel, 10**9, seed), seconds(x, kernel, 50, seed)
            plain.append(a)
            recorded.append(b)
            same &= torch.equal(one, two)
        first, second = statistics.median(plain), statistics.median(recorded)
        print(f"{name}: {first:.2f} s, recorded {second:.2f} s, {first / second:.1f} times faster")
        print(f"  {'the same evidences to the bit' if same else 'OTHER EVIDENCES'}")


if __name__ == "__main__":
    main()
