"""
One training run on one process, or on several that DistributedDataParallel joins.

Under torchrun, or ``forked.py``, it writes what every rank found.
"""

import contextlib
import inspect
import os
import sys
from pathlib import Path

import pyro
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_mcvae import RankBatches, load_checkpoint, save_checkpoint
from pyro_mcvae.ops import distributed as ranks
from tests.training.runs import Run, data

# No other size in a program is one of these: a dimension of this size is the data's.
SIZE, BATCH, STEPS = 23, 7, 3
# What ranks do differently: nothing, adapting step sizes, several updates, baselines, states.
JOINED = ["sgvb", "rb-nvil"]
ALSO = ["sis-trained", "ais-hmc", "truncated", "iwae", "sis-latent", "em"]


class NoiseByDatum(TorchDispatchMode):
    """
    Draws whose values belong to the data, for every minibatch and on every rank.

    :param index: which data the minibatch holds.
    :param seed: other noise for each step.
    """

    def __init__(self, index, seed):
        super().__init__()
        self.index, self.seed, self.count = index, seed, 0
        self.fork_rng = torch.random.fork_rng

    def __enter__(self):
        # Runs beside a step put the generators back, of which this is one.
        torch.random.fork_rng = self.forked
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.random.fork_rng = self.fork_rng

    @contextlib.contextmanager
    def forked(self, *args, **kwargs):
        before = self.count
        with self.fork_rng(*args, **kwargs):
            yield
        self.count = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        self.count += 1
        name = func.overloadpacket.__name__
        if name in ("normal", "normal_", "randn", "randn_like"):
            drawn = self.noise(torch.randn, result.shape)
        elif name in ("rand", "rand_like", "uniform_"):
            drawn = self.noise(torch.rand, result.shape)
        elif name in ("randint", "randint_like"):
            high = next(a for a in args if isinstance(a, int))
            drawn = (self.noise(torch.rand, result.shape) * high).floor()
        elif name in ("bernoulli", "bernoulli_"):
            drawn = self.noise(torch.rand, result.shape) < args[0]
        elif name == "exponential_":
            drawn = self.noise(torch.rand, result.shape).log().neg()
        elif name == "multinomial":
            shape = (*args[0].shape[:-1], args[1], args[0].shape[-1])
            gumbel = -self.noise(torch.rand, shape).log().neg().log()
            drawn = (args[0].log().unsqueeze(-2) + gumbel).argmax(-1)
        else:
            raise NotImplementedError(f"{func} draws {tuple(result.shape)}")
        return result.copy_(drawn)

    def noise(self, draw, shape):
        shape = list(shape)
        generator = torch.Generator().manual_seed(1000 * self.seed + self.count)
        where = [d for d, n in enumerate(shape) if n == len(self.index)]
        if not where:
            return draw(shape, generator=generator)
        shape[where[0]] = SIZE
        return draw(shape, generator=generator).index_select(where[0], self.index)


def parts_of(rank, num_ranks):
    sizes = {"num_data": SIZE, "batch_size": BATCH, "num_ranks": num_ranks}
    return RankBatches(**sizes, rank=rank)


def minibatches(rank):
    """Of one rank of two, or for a single process the union of both ranks' minibatches."""
    if rank is not None:
        yield from parts_of(rank, 2)
        yield from parts_of(rank, 2)
        return
    for _ in range(2):
        for pair in zip(parts_of(0, 2), parts_of(1, 2), strict=True):
            yield torch.cat(pair)


def begin(name, rank, known=True):
    pyro.clear_param_store()
    pyro.set_rng_seed(5)
    run = Run(name, "module")
    x, everything = data(SIZE), torch.arange(SIZE)
    if known:
        with NoiseByDatum(everything, 0):
            run.elbo(x, everything, SIZE)
    # What each rank draws by itself from here on is its own.
    pyro.set_rng_seed(6 if rank is None else rank)
    # The states of all data are buffers: the ranks exchange what has changed, not all of them.
    if rank is None:
        return run, x, run.elbo
    newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    option = {"forward_sync_buffers" if newer else "broadcast_buffers": known}
    return run, x, DistributedDataParallel(run.elbo, **option)


def train(name, rank=None):
    """Losses, gradients and all state, step by step."""
    run, x, module = begin(name, rank)
    optimizer = torch.optim.SGD(run.elbo.parameters(), lr=1e-4)
    record = []
    for step, index in zip(range(STEPS), minibatches(rank), strict=False):
        optimizer.zero_grad()
        with NoiseByDatum(index, step + 1):
            loss = module(x[index], index, SIZE)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in run.elbo.named_parameters()}
        optimizer.step()
        state = {n: v.clone() for n, v in run.elbo.state_dict().items()}
        record.append((loss.detach(), gradients, state))
    return record


def continued(path, again):
    """
    Save in the middle of an epoch, go on, and return what followed; or load, and return the same.

    The noise is each rank's own, also that of the first states.
    """
    rank = ranks.rank() if ranks.num_ranks() > 1 else None
    run, x, module = begin("truncated", rank, known=False)
    optimizer = torch.optim.Adam(run.elbo.parameters(), lr=1e-2)
    batches, generator = RankBatches(SIZE, 2), torch.Generator().manual_seed(ranks.rank())
    parts = {"elbo": module, "optimizer": optimizer, "batches": batches, "own": generator}

    def steps(count):
        losses = []
        while True:
            for index in batches:
                optimizer.zero_grad()
                loss = module(x[index], index, SIZE)
                loss.backward()
                optimizer.step()
                losses.append((loss.item(), index, torch.rand((), generator=generator)))
                if len(losses) == count:
                    return losses

    if again:
        load_checkpoint(path, parts)
    else:
        steps(3)
        save_checkpoint(path, parts)
    losses = steps(4)
    return losses, {n: v.clone() for n, v in run.elbo.state_dict().items()}


def main(out):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = f"file://{Path(out) / 'group'}"
    torch.distributed.init_process_group("gloo", place, None, num_ranks, rank)
    result = {name: train(name, rank) for name in os.environ["OBJECTIVES"].split(",")}
    path = Path(out) / "run.pt"
    result["continued"] = [continued(path, again) for again in (False, True)]
    torch.save(result, Path(out) / f"rank{rank}.pt")
    torch.distributed.barrier()  # nobody leaves before all have what was sent
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
