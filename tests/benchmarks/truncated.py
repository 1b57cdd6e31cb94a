"""Seconds per epoch of truncated posteriors over N, H and S, beside the memory of the states.

    PYTHONPATH=. python tests/benchmarks/truncated.py            # settings with published figures
    PYTHONPATH=. python tests/benchmarks/truncated.py --scaling  # slopes over N, H and S

CPU seconds on one thread; the first epoch is not counted.
"""

import argparse
import math
import time

import pyro
import pyro.distributions as dist
import torch

from pyro_mcvae import (
    EvolutionaryUpdate,
    InformedFlips,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    UniformFlips,
)


def measure(
    N=500, H=64, S=64, update=(5, 4, 1), batch=32, mutation=None, gradient_states=None, epochs=3
):
    """CPU seconds of an epoch, and the bytes of the states."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    decoder = torch.nn.Sequential(
        torch.nn.Linear(H, 64), torch.nn.LeakyReLU(0.01), torch.nn.Linear(64, 64)
    )
    logits = torch.nn.Parameter(torch.full((H,), 1.0 / H).logit())
    log_sigma = torch.nn.Parameter(torch.zeros(()))
    x = torch.randn(N, 64)

    def model(index):
        with pyro.plate("data", N, subsample=index):
            z = pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), log_sigma.exp()).to_event(1), obs=x[index])

    guide = TruncatedPosterior(model, S, EvolutionaryUpdate(*update, mutation=mutation))
    elbo = TraceTruncated_ELBO(num_gradient_states=gradient_states, max_plate_nesting=1)
    module = elbo(model, guide)
    optimizer = torch.optim.Adam([*decoder.parameters(), logits, log_sigma], lr=1e-3)
    start = 0.0
    for epoch in range(epochs + 1):
        if epoch == 1:
            start = time.process_time()
        for index in torch.randperm(N).split(batch):
            optimizer.zero_grad()
            module(index).backward()
            optimizer.step()
    seconds = (time.process_time() - start) / epochs
    return seconds, sum(b.numel() * b.element_size() for b in guide.buffers())


def slope(name, values, **fixed):
    """One line per value, and the least-squares slope in log-log."""
    points = []
    for value in values:
        settings = {"mutation": InformedFlips(), **fixed, name: value}
        seconds, memory = measure(**settings)
        full = settings["N"] * settings["S"] * settings["H"]
        points.append((math.log(value), math.log(seconds)))
        print(
            f"{name} = {value}: {seconds:.3f} s, states {memory} of N*S*H = {full} bytes",
            flush=True,
        )
    xs, ys = map(torch.tensor, zip(*points, strict=True))
    xs, ys = xs - xs.mean(), ys - ys.mean()
    print(f"slope over {name}: {(xs * ys).sum() / (xs * xs).sum():.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scaling", action="store_true")
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    if parser.parse_args().scaling:
        slope("N", (250, 500, 1000, 2000), H=64, S=64)
        slope("H", (64, 128, 256, 512, 1000), N=250, S=64)
        slope("S", (32, 64, 128, 256), N=250, H=64)
    else:
        for settings in (
            {"N": 500, "S": 200, "update": (10, 9, 4)},
            {"N": 2000, "S": 64},
            {"N": 2000, "S": 64, "batch": 512},
            {"N": 500, "S": 200, "update": (10, 9, 4), "gradient_states": 20},
            {"N": 2000, "S": 64, "gradient_states": 8},
        ):
            for mutation in (UniformFlips(), InformedFlips()):
                seconds, _ = measure(mutation=mutation, **settings)
                print(f"{settings} {type(mutation).__name__}: {seconds:.3f} s", flush=True)
