"""Train a VAE with DistributedDataParallel over ``elbo(model, guide)``, with checkpoints.

    torchrun --standalone --nproc_per_node 2 tutorials/distributed/torchrun_vae.py --epochs 5

If you interrupt it, run it again with the same --checkpoint, on any number of processes.
"""

import argparse
import os
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pyro_mcvae import RankBatches, TraceSIS_ELBO, load_checkpoint, save_checkpoint


class Model(nn.Module):
    def __init__(self, num_data: int) -> None:
        super().__init__()
        self.num_data = num_data
        self.decoder = nn.Sequential(nn.Linear(8, 100), nn.Tanh(), nn.Linear(100, 64))

    def forward(self, x: Tensor, index: Tensor) -> None:
        # The plate has the number of all data and the indices of the minibatch. Each rank has the
        # scale N / B of its B, and the mean over ranks is the gradient of all minibatches together.
        with pyro.plate("data", self.num_data, subsample=index):
            z = pyro.sample("z", dist.Normal(x.new_zeros(8), x.new_ones(8)).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)


class Guide(nn.Module):
    def __init__(self, num_data: int) -> None:
        super().__init__()
        self.num_data = num_data
        self.encoder = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 16))

    def forward(self, x: Tensor, index: Tensor) -> None:
        loc, log_scale = self.encoder(x).chunk(2, -1)
        with pyro.plate("data", self.num_data, subsample=index):
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank = distributed.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else "cpu"
    pyro.set_rng_seed(rank)  # different noise on every rank

    x = (torch.as_tensor(load_digits().images, dtype=torch.float32).flatten(1) > 7).float()
    x = x.to(device)
    elbo = TraceSIS_ELBO(num_steps=3)(Model(len(x)), Guide(len(x))).to(device)
    wrapped = DistributedDataParallel(elbo)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=1e-3)
    batches = RankBatches(len(x), batch_size=50)
    parts = {"elbo": elbo, "optimizer": optimizer, "batches": batches}
    if args.checkpoint and args.checkpoint.exists():
        load_checkpoint(args.checkpoint, parts)

    while batches.epoch < args.epochs:
        total = torch.zeros((), device=device)
        for index in batches:
            optimizer.zero_grad()
            loss = wrapped(x[index], index.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(x)
        distributed.all_reduce(total)
        total /= distributed.get_world_size() * len(batches)
        if args.checkpoint:
            save_checkpoint(args.checkpoint, parts)
        if rank == 0:
            print(f"epoch {batches.epoch}: loss {total:.3f} nats per image", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
