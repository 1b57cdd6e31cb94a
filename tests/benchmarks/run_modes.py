"""
What a step takes by each way to run several particles: a leading dim, ``vmap``, a loop.

    python -m tests.benchmarks.run_modes
    python -m tests.benchmarks.run_modes --device cuda --steps 50

A program that counts dims from the left, multiplies from the right or convolves has to be written
in another way to broadcast over a leading dim; under ``vmap`` and in a loop it stays as it is. Each
row is one step of ``TraceIWAE_ELBO(K)``, value and gradient; the three take turns in one process,
and times are medians (of CPU time on the CPU).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn

from pyro_mcvae import TraceIWAE_ELBO
from pyro_mcvae.particles import runner
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.vmap import Mode

Program = Callable[..., None]


@dataclass
class Specialization:
    """
    :ivar model: takes whether it is written to broadcast; returns the model.
    :ivar guide: likewise.
    """

    name: str
    num_particles: int
    model: Callable[[bool], Program]
    guide: Callable[[bool], Program]


class Encoder(nn.Module):
    def __init__(self, num_pixels: int, num_latents: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_pixels, 128), nn.Tanh(), nn.Linear(128, 2 * num_latents)
        )

    def forward(self, x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            loc, log_scale = self.layers(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


class Decoded(nn.Module):
    """Pixels of a decoder; ``flat`` puts all leading dims into one around it."""

    def __init__(self, decoder: nn.Module, num_latents: int, flat: bool) -> None:
        super().__init__()
        self.decoder, self.num_latents, self.flat = decoder, num_latents, flat

    def forward(self, x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(self.num_latents), 1.0).to_event(1))
            if self.flat:
                logits = self.decoder(z.reshape(-1, z.shape[-1])).reshape(*z.shape[:-1], -1)
            else:
                logits = self.decoder(z)
            pyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=x)


class Recurrent(nn.Module):
    """A decoder of 16 positions that reads its code at each; cells take one batch dim."""

    def __init__(self, num_latents: int) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(num_latents, 32), nn.Linear(32, 4)

    def forward(self, z: Tensor) -> Tensor:
        hidden, result = z.new_zeros(len(z), 32), []
        for _ in range(16):
            hidden = self.cell(z, hidden)
            result.append(self.out(hidden))
        return torch.cat(result, -1)


def convolutions(num_latents: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(num_latents, 32 * 7 * 7),
        nn.Unflatten(1, (32, 7, 7)),
        nn.Upsample(14),
        nn.Conv2d(32, 16, 3, padding=1),
        nn.GELU(),
        nn.Upsample(28),
        nn.Conv2d(16, 1, 3, padding=1),
        nn.Flatten(),
    )


def autoencoder(
    name: str, decoder: nn.Module, pixels: int, device: str
) -> tuple[Specialization, Tensor]:
    encoder = Encoder(pixels, 16).to(device)
    decoder = decoder.to(device)
    # A multilayer perceptron broadcasts as it is.
    plain = isinstance(decoder, nn.Sequential) and isinstance(decoder[-1], nn.Linear)
    model = {flat: Decoded(decoder, 16, flat and not plain) for flat in (False, True)}
    x = torch.rand(100, pixels, device=device).bernoulli()
    return Specialization(name, 10, model.__getitem__, lambda broadcasts: encoder), x


def regression(device: str) -> tuple[Specialization, Tensor]:
    """Logistic, on the breast cancer data of scikit-learn: 569 rows, 30 columns."""
    from sklearn import datasets

    result = datasets.load_breast_cancer()
    features = torch.tensor(result.data, dtype=torch.float, device=device)
    features = (features - features.mean(0)) / features.std(0)
    y = torch.tensor(result.target, dtype=torch.float, device=device)

    def made(broadcasts: bool) -> Program:
        def model(x: Tensor) -> None:
            w = pyro.sample("w", dist.Normal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
            logits = (w * x).sum(-1) if broadcasts else x @ w
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

        return model

    guide = AutoNormal(made(True))
    guide(features)
    return Specialization("regression, X @ w", 100, made, lambda broadcasts: guide), features


def topics(device: str) -> tuple[Specialization, Tensor]:
    """As scvi-tools' AmortizedLDA writes it: ``softmax(1)``, and a product from the right."""
    words, count = 200, 10
    encoder = Encoder(words, count).to(device)
    table = torch.randn(count, words, device=device, requires_grad=True)

    def made(broadcasts: bool) -> Program:
        def model(x: Tensor) -> None:
            pyro.param("topics", table)
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(x.new_zeros(count), 1.0).to_event(1))
                fraction = z.softmax(-1 if broadcasts else 1)
                mean = fraction @ pyro.param("topics").softmax(-1)
                pyro.sample("x", dist.Poisson(50 * mean).to_event(1), obs=x)

        return model

    x = torch.randint(0, 3, (100, words), device=device).float()
    return Specialization("topics, softmax(1)", 10, made, lambda broadcasts: encoder), x


def hidden_markov(device: str, length: int = 10) -> tuple[Specialization, Tensor]:
    """States that the model sums, some in a row, and an offset of each sequence."""
    logits = torch.eye(3, device=device)

    def made(broadcasts: bool) -> Program:
        def model(x: Tensor) -> None:
            levels = pyro.param("levels", lambda: torch.tensor([-1.0, 0.0, 1.0], device=device))
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(x.new_zeros(1), 1.0).to_event(1))
                offset, y = z[..., 0] if broadcasts else z[:, 0], 0
                for t in pyro.markov(range(length)):
                    y = pyro.sample(
                        f"y_{t}",
                        dist.Categorical(logits=logits[y]),
                        infer={"enumerate": "parallel"},
                    )
                    pyro.sample(f"x_{t}", dist.Normal(levels[y] + offset, 1.0), obs=x[:, t])

        return model

    encoder = Encoder(length, 1).to(device)
    x = torch.randn(100, length, device=device)
    return Specialization("hidden Markov, z[:, 0]", 10, made, lambda broadcasts: encoder), x


def cases(device: str) -> Iterator[tuple[Specialization, Tensor]]:
    mlp = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 64))
    yield autoencoder("autoencoder, 64-128-16", mlp, 64, device)
    yield autoencoder("convolutional decoder, 28x28", convolutions(16), 784, device)
    yield regression(device)
    yield topics(device)
    yield autoencoder("recurrent decoder, GRUCell", Recurrent(16), 64, device)
    yield hidden_markov(device)


# How a way is brought about: whether the program is the one that broadcasts, and what is tried.
WAYS: dict[str, tuple[bool, tuple[Mode, ...]]] = {
    "leading dim": (True, (Mode.BATCHED,)),
    "vmap": (False, (Mode.MAPPED, Mode.BOTH_MAPPED)),
    "loop": (False, ()),
}


def step_of(case: Specialization, x: Tensor, mode: str) -> Callable[[], float]:
    """A step by one way, after those that find it out; returns the loss."""
    broadcasts, tried = WAYS[mode]
    loss = TraceIWAE_ELBO(case.num_particles, vectorize_particles=None if tried else False)
    programs = Programs(case.model(broadcasts), case.guide(broadcasts), (x,), {})

    def step() -> float:
        return loss.loss_and_grads(programs.model, programs.guide, x)

    with mock.patch.object(runner, "_AT_ONCE", tried):
        for _ in range(2):  # the programs are analysed anew at the second
            step()
    result = loss.sampler.runner.mode(programs)
    assert result in (tried or (Mode.LOOPED,)), f"{case.name}: {result}"
    return step


def seconds(steps: dict[str, Callable[[], float]], rounds: int, device: str) -> dict[str, float]:
    """The median time of each, taking turns."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 2):
        for name, step in steps.items():
            start = clock()
            step()
            if device != "cpu":
                torch.cuda.synchronize()
            if i >= 2:
                times[name].append(clock() - start)
    return {name: statistics.median(result) for name, result in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    pyro.enable_validation(False)
    print("| program | K | leading dim | vmap | loop |\n| --- | ---: | ---: | ---: | ---: |")
    for case, x in cases(args.device):
        pyro.clear_param_store()
        result = seconds({mode: step_of(case, x, mode) for mode in WAYS}, args.steps, args.device)
        base = result["leading dim"]
        ratios = " | ".join(f"{result[mode] / base:.2f}" for mode in ("vmap", "loop"))
        print(
            f"| {case.name} | {case.num_particles} | {1e3 * base:.1f} ms | {ratios} |", flush=True
        )


if __name__ == "__main__":
    main()
