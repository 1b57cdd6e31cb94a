"""Train a VAE on several processes, with the gradient of the union of their minibatches.

Run it on one process, on two CPU processes, or on the GPUs of one machine::

    python tutorials/several_processes.py
    torchrun --standalone --nproc-per-node 2 tutorials/several_processes.py
    torchrun --standalone --nproc-per-node gpu tutorials/several_processes.py
"""

import argparse
import os
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pyro_mcvae import RankBatches, TraceSIS_ELBO, UnderdampedLangevin


class Model(nn.Module):
    """A model of the data of a minibatch, with their indices. The scale of the plate is N/B."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 32))

    def forward(self, x: Tensor, index: Tensor | None = None, size: int | None = None) -> None:
        with pyro.plate("data", size or len(x), subsample=index):
            z = pyro.sample("z", dist.Normal(x.new_zeros(8), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.decoder(z), 0.5).to_event(1), obs=x)


class Guide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x: Tensor, index: Tensor | None = None, size: int | None = None) -> None:
        with pyro.plate("data", size or len(x), subsample=index):
            loc, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def make_data(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(count, 8, generator=generator)
    weight = torch.randn(8, 32, generator=generator)
    return torch.tanh(z @ weight) + 0.5 * torch.randn(count, 32, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--data", type=int, default=1000, help="number of simulated data")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    joined = "RANK" in os.environ  # set by torchrun
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else "cpu"
    if joined:
        distributed.init_process_group("nccl" if gpu else "gloo")
    rank = distributed.get_rank() if joined else 0

    pyro.set_rng_seed(0)  # the same initial parameters on all ranks
    chain = TraceSIS_ELBO(5, UnderdampedLangevin())
    elbo: Any = chain(Model(), Guide()).to(device)
    if joined:
        elbo = DistributedDataParallel(elbo)
    pyro.set_rng_seed(1 + rank)  # and different noise

    data = make_data(args.data).to(device)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=2e-3)
    batches = RankBatches(len(data), batch_size=50)
    for _ in range(args.epochs):
        for index in batches:
            index = index.to(device)
            optimizer.zero_grad()
            loss = elbo(data[index], index, len(data))
            loss.backward()
            optimizer.step()
    weights = sum(p.sum().item() for p in elbo.parameters())
    # Write the line at once, because the processes share the terminal.
    print(
        f"rank {rank}: {len(batches)} steps an epoch, bound {-loss.item() / len(data):.1f}, "
        f"sum of weights {weights:.6f}, step size {chain.kernel.step_size().item():.6f}\n",
        end="",
        flush=True,
    )
    if joined:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
