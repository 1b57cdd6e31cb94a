"""Learn bars with binary latents: 500 images of 4x4 pixels, each the sum of some of eight bars.

A truncated posterior with 64 states per image finds the bars, their frequency and the noise. A
single start may end in a local optimum, where two fields share a bar. With the exact posterior (all
256 states) this happens as often. Therefore each seed starts four times and uses the start with the
highest free energy, which differs by several nats per image. Guiraud et al. (2021) use the best of
ten starts.

    python tutorials/truncated/bars.py --seeds 10
"""

import argparse
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_mcvae import EvolutionaryUpdate, TraceTruncated_ELBO, TruncatedPosterior

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from results import Results

SIDE, NUM_BARS, PI, SIGMA, HEIGHT = 4, 8, 2 / 8, 0.1, 1.0


def bars() -> Tensor:
    """Return all bars as images, shape [8, 16]."""
    images = torch.zeros(NUM_BARS, SIDE, SIDE)
    for i in range(SIDE):
        images[i, i, :] = images[SIDE + i, :, i] = HEIGHT
    return images.flatten(1)


def make_data(count: int) -> tuple[Tensor, Tensor]:
    """Return images and the bars in them."""
    active = torch.bernoulli(torch.full((count, NUM_BARS), PI))
    return active @ bars() + SIGMA * torch.randn(count, SIDE**2), active


class Model(nn.Module):
    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.images = images
        self.decoder = nn.Linear(NUM_BARS, SIDE**2, bias=False)
        # Every field starts as the mean image divided by the number of bars, plus a little noise.
        # With unequal starts, one field may learn two bars before another has learned any.
        fraction = images.mean(0) / (NUM_BARS * PI)
        noise = 0.1 * torch.randn(SIDE**2, NUM_BARS)
        self.decoder.weight.data = fraction.unsqueeze(-1) + noise
        self.logits = nn.Parameter(torch.full((NUM_BARS,), 1.0 / NUM_BARS).logit())
        self.log_sigma = nn.Parameter(0.5 * images.var().log())

    def forward(self, index: Tensor) -> None:
        with pyro.plate("images", len(self.images), subsample=index):
            z = pyro.sample("z", dist.Bernoulli(logits=self.logits).to_event(1))
            pixels = dist.Normal(self.decoder(z), self.log_sigma.exp())
            pyro.sample("x", pixels.to_event(1), obs=self.images[index])


def train(model: Model, epochs: int, states: int = 64, rate: float = 1e-2) -> list[float]:
    """Train in place. Return the free energy per image after each epoch."""
    guide = TruncatedPosterior(model, states, evolution=EvolutionaryUpdate(3, 2, 1))
    elbo = TraceTruncated_ELBO(max_plate_nesting=1)(model, guide)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    steps = epochs * -(-len(model.images) // 32)
    # One cycle: fields separate while the rate is high, and converge while it decreases.
    schedule = torch.optim.lr_scheduler.CyclicLR(
        optimizer, 0.1 * rate, rate, step_size_up=max(1, steps // 2), cycle_momentum=False
    )
    curve = []
    for _ in range(epochs):
        total = 0.0
        for index in torch.randperm(len(model.images)).split(32):
            optimizer.zero_grad()
            loss = elbo(index)
            loss.backward()
            optimizer.step()
            schedule.step()
            total -= loss.item() * len(index) / len(model.images)
        curve.append(total / len(model.images))
    return curve


def best_of(images: Tensor, starts: int, epochs: int) -> tuple[Model, list[list[float]]]:
    """Return the model of the start with the highest final free energy, and all curves."""
    models = [Model(images) for _ in range(starts)]
    curves = [train(model, epochs) for model in models]
    return max(zip(models, curves, strict=True), key=lambda run: run[1][-1])[0], curves


def score(model: Model) -> tuple[int, float, float]:
    """Return the number of bars that have a generative field, and the learned pi and sigma."""
    fields, true = model.decoder.weight.detach().t(), bars()
    distance = (fields.unsqueeze(1) - true).square().mean(-1).sqrt()
    best = {int(d.argmin()) for d in distance if float(d.min()) < 0.1 * HEIGHT}
    pi, sigma = model.logits.sigmoid().mean(), model.log_sigma.exp()
    return len(best), pi.item(), sigma.item()


def recovered(model: Model) -> bool:
    """Return whether all bars are found, with pi within 0.03 and sigma within 0.02 of the truth."""
    count, pi, sigma = score(model)
    return count == NUM_BARS and abs(pi - PI) < 0.03 and abs(sigma - SIGMA) < 0.02


def draw(models: list[Model], curves: list[list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for curve in curves:
        left.plot(range(1, len(curve) + 1), curve, lw=0.8)
    left.set(title="Free energy per image, every start", xlabel="epoch", ylabel="nats")
    rows = [m.decoder.weight.detach().t().reshape(NUM_BARS, SIDE, SIDE) for m in models[:8]]
    gap = torch.full((1, SIDE, 1), float("nan"))
    strips = [torch.cat([torch.cat([f[None], gap], -1)[0] for f in r], -1) for r in rows]
    across = torch.full((1, strips[0].shape[-1]), float("nan"))
    right.imshow(torch.cat([torch.cat([s, across]) for s in strips]).numpy(), cmap="gray")
    right.set(title="Generative fields, one row per seed", xticks=[], yticks=[], facecolor="C0")
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("bars.png"))
    args = parser.parse_args(argv)
    pyro.enable_validation(False)
    results = Results(args.output.with_suffix(".csv"), argv=argv)
    result, models, curves = 0, [], []
    print(f"true: {NUM_BARS} bars, pi {PI:.3f}, sigma {SIGMA:.3f}")
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        pyro.set_rng_seed(seed)
        model, own = best_of(make_data(500)[0], args.starts, args.epochs)
        count, pi, sigma = score(model)
        result += (good := recovered(model))
        models.append(model)
        curves += own
        energies = {f"energy_{i}": curve[-1] for i, curve in enumerate(own)}
        results.add(seed=seed, bars=count, pi=pi, sigma=sigma, **energies)
        ends = ", ".join(f"{curve[-1]:.2f}" for curve in own)
        print(
            f"seed {seed}: {count} bars, pi {pi:.3f}, sigma {sigma:.3f}, F/N of the starts {ends}"
            f"{'' if good else '  (not recovered)'}",
            flush=True,
        )
    print(f"recovered with {result} of {args.seeds} seeds")
    draw(models, curves, args.output)
    return result


if __name__ == "__main__":
    main()
