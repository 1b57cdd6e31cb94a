"""
One training run of a truncated posterior, whose states are dealt out over the processes.

Under torchrun, or ``forked.py``, each rank writes what it found.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pyro
import torch
from torch.nn.parallel import DistributedDataParallel

from pyro_mcvae import (
    RankBatches,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    load_checkpoint,
    save_checkpoint,
)
from pyro_mcvae.ops import ranks
from tests.training.distributed import BATCH, SIZE, STEPS, NoiseByDatum
from tests.training.runs import Run, data


def begin():
    """A run that has found states of some data, and has taken no step on others."""
    pyro.clear_param_store()
    pyro.set_rng_seed(5)
    run = Run("truncated", "module")
    run.guide = TruncatedPosterior(run.model, num_states=6, shard="data")
    run.elbo = TraceTruncated_ELBO()(run.model, run.guide)
    run.optimizer = torch.optim.Adam(run.elbo.parameters(), lr=1e-2)
    pyro.set_rng_seed(6 + ranks.rank())
    return run, data(SIZE)


def batches(rank, num_ranks):
    return RankBatches(SIZE, BATCH, fixed=True, rank=rank, num_ranks=num_ranks)


def unions(num_ranks):
    """For a single process: the minibatches of all ranks."""
    many = [batches(r, num_ranks) for r in range(num_ranks)]
    for _ in range(2):
        yield from map(torch.cat, zip(*many, strict=True))


def train(run, module, x, own, noise=NoiseByDatum):
    """Losses, gradients and marginals of some steps, in more than one epoch."""
    record = []
    # What a first call finds out about programs and minibatches draws as well, and keeps nothing.
    known = torch.arange(ranks.rank(), SIZE - 1, ranks.num_ranks())
    with torch.no_grad():
        run.elbo(x[known], known, SIZE)
        run.guide.posterior(x[known], known, SIZE)
    for step, index in zip(range(STEPS), (i for _ in range(2) for i in own), strict=False):
        run.optimizer.zero_grad()
        with noise(index, step + 1):
            loss = module(x[index], index, SIZE)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in run.elbo.named_parameters()}
        run.optimizer.step()
        posterior = run.guide.posterior(x[index], index, SIZE)
        for closed in run.closed:
            closed.add(posterior)
            if step % 2:
                closed.update()
        record.append((index, loss.detach(), gradients, posterior.marginals()["z"]))
    return record


def parts(run, own):
    closed = {f"closed-{i}": c for i, c in enumerate(run.closed)}
    return {"elbo": run.elbo, "optimizer": run.optimizer, "batches": own, **closed}


def own_noise(index, seed):
    """Each rank's, from its generator."""
    return nullcontext()


def on_two(out, rank):
    run, x = begin()
    own = batches(rank, 2)
    load_checkpoint(out / "1.pt", {"elbo": run.elbo})
    # As it is by default: it gives all ranks the buffers of the first.
    module = DistributedDataParallel(run.elbo)
    found = {"trained": train(run, module, x, own)}
    save_checkpoint(out / "2.pt", parts(run, own))
    found["kept"] = {name: value.clone() for name, value in run.elbo.state_dict().items()}
    found["buffers"] = [name for name, _ in run.guide.named_buffers()]
    found["then"] = train(run, module, x, own, own_noise)
    run, x = begin()
    own = batches(rank, 2)
    load_checkpoint(out / "2.pt", parts(run, own))
    module = DistributedDataParallel(run.elbo)
    found["again"] = train(run, module, x, own, own_noise)
    return found


def on_three(out, rank):
    run, _ = begin()
    own = batches(rank, 3)
    load_checkpoint(out / "2.pt", parts(run, own))
    save_checkpoint(out / "3.pt", parts(run, own))
    buffers = [name for name, _ in run.guide.named_buffers()]
    return {"kept": dict(run.elbo.state_dict()), "buffers": buffers, "left": torch.cat(list(own))}


def main(out):
    out = Path(out)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    # First two of the processes, and then all three, which begin anew.
    for num_ranks, work in ((2, on_two), (3, on_three)):
        if rank < num_ranks:
            place = f"file://{out / f'group{num_ranks}'}"
            torch.distributed.init_process_group("gloo", place, None, num_ranks, rank)
            torch.save(work(out, rank), out / f"{num_ranks}-rank{rank}.pt")
            torch.distributed.barrier()  # nobody leaves before all have what was sent
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
