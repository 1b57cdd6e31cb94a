"""Seconds per epoch of truncated posteriors over N, H and S, beside the memory of the states.

    PYTHONPATH=. python tests/benchmarks/truncated.py            # settings with published figures
    PYTHONPATH=. python tests/benchmarks/truncated.py --compiled # plain, replayed, compiled
    PYTHONPATH=. python tests/benchmarks/truncated.py --scaling  # slopes over N, H and S
    PYTHONPATH=. python tests/benchmarks/truncated.py --figure scaling.png  # and a log-log plot

CPU seconds on one thread; the first epoch is not counted.
"""

import argparse
import math
import statistics
import time

import pyro
import pyro.distributions as dist
import torch

from pyro_mcvae import (
    CompiledELBO,
    EvolutionaryUpdate,
    InformedFlips,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    UniformFlips,
)


def measure(
    N=500,
    H=64,
    S=64,
    update=(5, 4, 1),
    batch=32,
    mutation=None,
    gradient_states=None,
    epochs=3,
    backend=None,
    warm=1,
):
    """CPU seconds of an epoch, and the bytes of the states; recorded if a backend is given."""
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

    evolution = EvolutionaryUpdate(*update, mutation=mutation or InformedFlips())
    guide = TruncatedPosterior(model, S, evolution=evolution)
    elbo = TraceTruncated_ELBO(num_gradient_states=gradient_states, max_plate_nesting=1)
    module = (elbo if backend is None else CompiledELBO(elbo, backend))(model, guide)
    optimizer = torch.optim.Adam([*decoder.parameters(), logits, log_sigma], lr=1e-3)
    start = 0.0
    for epoch in range(warm + epochs):
        if epoch == warm:
            start = time.process_time()
        for index in torch.randperm(N).split(batch):
            optimizer.zero_grad()
            module(index).backward()
            optimizer.step()
    seconds = (time.process_time() - start) / epochs
    return seconds, sum(b.numel() * b.element_size() for b in guide.buffers())


def sides(rounds=3):
    """Seconds of an epoch: plain, replayed and compiled, in turns, with uniform flips."""
    for settings in (
        {"N": 500, "S": 200, "update": (10, 9, 4)},
        {"N": 2000, "S": 64},
        {"N": 2000, "S": 64, "batch": 512},
    ):
        result = {None: [], "eager": [], "inductor": []}
        for _ in range(rounds):
            for backend, seconds in result.items():
                # Its first epochs record and compile, and the last minibatch is smaller.
                epochs = 4 if "batch" in settings else 2
                run = measure(
                    mutation=UniformFlips(), backend=backend, epochs=epochs, **settings, warm=epochs
                )
                seconds.append(run[0])
        plain, replay, inductor = (statistics.median(s) for s in result.values())
        print(
            f"{settings}: plain {plain:.3f} s, replay {replay:.3f} ({replay / plain:.2f}), "
            f"Inductor {inductor:.3f} ({inductor / plain:.2f})",
            flush=True,
        )


SCALES = {
    "N": {"N": (250, 500, 1000, 2000), "H": 64, "S": 64},
    "H": {"H": (64, 128, 256, 512, 1000), "N": 250, "S": 64},
    "S": {"S": (32, 64, 128, 256), "N": 250, "H": 64},
}


def scaling(name):
    """One line per value of N, H or S: ``(value, seconds, bytes of the states, N * S * H)``."""
    fixed = {key: value for key, value in SCALES[name].items() if key != name}
    points = []
    for value in SCALES[name][name]:
        settings = {"mutation": InformedFlips(), **fixed, name: value}
        # The least of three: what others take of the machine only adds.
        runs = [measure(**settings, epochs=1) for _ in range(3)]
        seconds, memory = min(runs)
        full = settings["N"] * settings["S"] * settings["H"]
        points.append((value, seconds, memory, full))
        print(
            f"{name} = {value}: {seconds:.3f} s, states {memory} of N*S*H = {full} bytes",
            flush=True,
        )
    print(f"slope over {name}: {slope(points):.2f}", flush=True)
    return points


def slope(points):
    """The least-squares slope of seconds over value, log-log."""
    xs, ys = (torch.tensor([math.log(p[i]) for p in points]) for i in (0, 1))
    xs, ys = xs - xs.mean(), ys - ys.mean()
    return float((xs * ys).sum() / (xs * xs).sum())


def draw(result, path):
    """Seconds of an epoch over N, H and S, and bytes of the states over N * S * H."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from pyro_mcvae.evaluation.plots import palette

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes in (left, right):
        axes.set_prop_cycle(palette())
    for name, points in result.items():
        values, seconds, memory, full = zip(*points, strict=True)
        fixed = ", ".join(f"{k} = {v}" for k, v in SCALES[name].items() if k != name)
        label = f"over {name} ({fixed}): slope {slope(points):.2f}"
        left.loglog(values, seconds, label=label)
        right.loglog(full, memory, ls="", label=f"over {name}")
    left.set(xlabel="N, H or S", ylabel="CPU seconds of an epoch")
    everything = sorted(p[3] for points in result.values() for p in points)
    right.loglog(everything, everything, "k--", label="N S H bytes")
    right.loglog(everything, [n / 8 for n in everything], "k:", label="N S H bits")
    right.set(xlabel="N S H", ylabel="bytes of the states")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--figure", metavar="PNG", help="--scaling, drawn")
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    parser.add_argument("--compiled", action="store_true", help="plain, replayed and compiled")
    args = parser.parse_args()
    if args.compiled:
        sides()
    elif args.scaling or args.figure:
        found = {name: scaling(name) for name in SCALES}
        if args.figure:
            draw(found, args.figure)
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
