"""Learn bars with binary latents: 500 images of 4x4 pixels, each the sum of some of eight bars.

A truncated posterior with 64 states per image finds the bars, their frequency and the noise, as in
Guiraud et al. (2021, appendix B.1): a decoder with 8-8-16 units, closed-form updates of pi and
sigma after each epoch, and the best of ten starts. A single start may end in a local optimum, where
two fields share a bar; its free energy is lower by several nats per image.

    python tutorials/truncated/bars.py --paper
    python tutorials/truncated/bars.py --seeds 10 --linear

``--linear`` is binary sparse coding. Its fields start at the mean image divided by the number of
bars, plus noise. ``--paper`` is the scale of the paper: ten starts.
"""

import argparse
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_mcvae import (
    BernoulliPrior,
    EvolutionaryUpdate,
    GaussianNoise,
    TraceTruncated_ELBO,
    TruncatedPosterior,
)

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from data import add_device_flag
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
    """z ~ Bernoulli(pi), x | z ~ Normal(decoder(z), sigma)."""

    def __init__(self, images: Tensor, linear: bool = False) -> None:
        super().__init__()
        self.images = images
        if linear:
            self.decoder: nn.Module = nn.Linear(NUM_BARS, SIDE**2, bias=False)
            # With unequal starts, one field may learn two bars before another has learned any.
            fraction = images.mean(0).cpu() / (NUM_BARS * PI)
            noise = 0.1 * torch.randn(SIDE**2, NUM_BARS)
            self.decoder.weight.data = fraction.unsqueeze(-1) + noise
        else:
            layers = [nn.Linear(NUM_BARS, NUM_BARS), nn.Linear(NUM_BARS, SIDE**2)]
            for layer in layers:
                nn.init.xavier_normal_(layer.weight)
                nn.init.zeros_(layer.bias)
            self.decoder = nn.Sequential(layers[0], nn.LeakyReLU(0.01), layers[1])
        # Buffers, because they have closed-form updates.
        self.register_buffer("pi", torch.full((NUM_BARS,), 1.0 / NUM_BARS))
        self.register_buffer("sigma", images.std())
        self.to(images.device)

    def forward(self, index: Tensor) -> None:
        with pyro.plate("images", len(self.images), subsample=index):
            z = pyro.sample("z", dist.Bernoulli(self.pi).to_event(1))
            pixels = dist.Normal(self.decoder(z), self.sigma)
            pyro.sample("x", pixels.to_event(1), obs=self.images[index])

    @torch.no_grad()
    def fields(self) -> Tensor:
        """Return the images that each latent adds to the empty image, shape [8, 16]."""
        units = torch.eye(NUM_BARS).to(self.images)
        return (self.decoder(units) - self.decoder(0 * units)).cpu()


def train(
    model: Model, epochs: int, states: int = 64, rate: float = 0.05, cycle: int = 20
) -> list[float]:
    """
    Train in place. Return the free energy per image after each epoch.

    :param cycle: the number of epochs in which the learning rate increases and decreases once.
    """
    guide = TruncatedPosterior(model, states, evolution=EvolutionaryUpdate(3, 2, 1))
    elbo = TraceTruncated_ELBO(max_plate_nesting=1)(model, guide)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    updates = BernoulliPrior("z", model.pi), GaussianNoise("x", model.sigma, floor=0.02)
    steps = cycle * -(-len(model.images) // 32)
    # Fields separate while the rate is high, and converge while it decreases.
    schedule = torch.optim.lr_scheduler.CyclicLR(
        optimizer, 0.01 * rate, rate, step_size_up=max(1, steps // 2), cycle_momentum=False
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
        posterior = guide.posterior(torch.arange(len(model.images)))
        for update in updates:
            update.add(posterior)
        for update in updates:
            update.update()
        curve.append(total / len(model.images))
    return curve


def evidence(model: Model) -> float:
    """Return the exact mean log p(x) of the images, by all 256 states."""
    guide = TruncatedPosterior(model, 2**NUM_BARS)
    return guide.posterior(torch.arange(len(model.images))).free_energy.mean().item()


def true_model(images: Tensor) -> Model:
    """Return the model that generated the images."""
    model = Model(images, linear=True)
    model.decoder.weight.data.copy_(bars().t())
    model.pi.fill_(PI)
    model.sigma.fill_(SIGMA)
    return model


def best_of(
    images: Tensor, starts: int, epochs: int, linear: bool = False
) -> tuple[Model, list[list[float]]]:
    """Return the model of the start with the highest final free energy, and all curves."""
    models = [Model(images, linear) for _ in range(starts)]
    curves = [train(model, epochs) for model in models]
    return max(zip(models, curves, strict=True), key=lambda run: run[1][-1])[0], curves


def score(model: Model) -> tuple[int, float, float]:
    """Return the number of bars that have a generative field, and the learned pi and sigma."""
    distance = (model.fields().unsqueeze(1) - bars()).square().mean(-1).sqrt()
    best = {int(d.argmin()) for d in distance if float(d.min()) < 0.1 * HEIGHT}
    return len(best), model.pi.mean().item(), model.sigma.item()


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
    rows = [m.fields().reshape(NUM_BARS, SIDE, SIDE) for m in models[:8]]
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
    parser.add_argument("--epochs", type=int, default=160)
    parser.add_argument("--linear", action="store_true", help="a linear decoder")
    parser.add_argument("--paper", action="store_true", help="ten starts")
    add_device_flag(parser)
    parser.add_argument("--output", type=Path, default=Path("bars.png"))
    args = parser.parse_args(argv)
    if args.paper:
        args.starts, args.linear = 10, False
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    results = Results(args.output.with_suffix(".csv"), argv=argv)
    result, models, curves = 0, [], []
    print(f"true: {NUM_BARS} bars, pi {PI:.3f}, sigma {SIGMA:.3f}")
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        pyro.set_rng_seed(seed)
        images = make_data(500)[0].to(args.device)
        model, own = best_of(images, args.starts, args.epochs, args.linear)
        exact, truth = evidence(model), evidence(true_model(images))
        count, pi, sigma = score(model)
        result += (good := recovered(model))
        models.append(model)
        curves += own
        energies = {f"energy_{i}": curve[-1] for i, curve in enumerate(own)}
        row = {"bars": count, "pi": pi, "sigma": sigma, "log_evidence": exact, "truth": truth}
        results.add(seed=seed, **row, **energies)
        ends = ", ".join(f"{curve[-1]:.2f}" for curve in own)
        print(
            f"seed {seed}: {count} bars, pi {pi:.3f}, sigma {sigma:.3f}, log p(x) {exact:.2f} "
            f"(true model {truth:.2f}), F/N of the starts {ends}"
            f"{'' if good else '  (not recovered)'}",
            flush=True,
        )
    print(f"recovered with {result} of {args.seeds} seeds")
    draw(models, curves, args.output)
    return result


if __name__ == "__main__":
    main()
