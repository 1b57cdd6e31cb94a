"""Learn correlated bars with a decoder of two layers: pairs of bars that never appear together.

The images come from a network with a hidden unit per bar, a ReLU, and the bars as fields. The first
bar of the rows sets the unit of the second bar below zero, and the last bar of the columns the unit
of the bar before it. These two pairs never appear together, although their latents are independent.
A linear decoder cannot represent this, but a network of the same form can. For images with each
pair of bars, the script prints the exact log p(x) under the learned and the true model (256
states). It also prints the log probability of the two excluded pairs relative to other pairs.

    python tutorials/truncated/correlated_bars.py
"""

import argparse
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_mcvae import EvolutionaryUpdate, TraceTruncated_ELBO, TruncatedPosterior
from pyro_mcvae.evaluation.plots import STYLES

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from data import add_device_flag
from results import Results

SIDE, NUM_BARS, PI, SIGMA = 4, 8, 2 / 8, 0.1
# The first bar of each pair switches off the second.
PAIRS = ((0, 1), (7, 6))


def bars() -> Tensor:
    """Return all bars as images, shape [8, 16]: rows, then columns."""
    images = torch.zeros(NUM_BARS, SIDE, SIDE)
    for i in range(SIDE):
        images[i, i, :] = images[SIDE + i, :, i] = 1.0
    return images.flatten(1)


class Model(nn.Module):
    """z ~ Bernoulli(pi), x | z ~ Normal(W1 relu(W0 z), sigma); W0 is the identity if linear."""

    def __init__(self, images: Tensor, linear: bool = False) -> None:
        super().__init__()
        self.images = images
        self.first = nn.Linear(NUM_BARS, NUM_BARS, bias=False)
        self.second = nn.Linear(NUM_BARS, SIDE**2, bias=False)
        # The initial network is linear: each latent has a separate unit and field.
        self.first.weight.data = torch.eye(NUM_BARS)
        self.first.weight.requires_grad_(not linear)
        fraction = images.mean(0).cpu() / (NUM_BARS * PI)
        self.second.weight.data = fraction.unsqueeze(-1) + 0.1 * torch.randn(SIDE**2, NUM_BARS)
        self.logits = nn.Parameter(torch.full((NUM_BARS,), 1.0 / NUM_BARS).logit())
        self.log_sigma = nn.Parameter(0.5 * images.var().log())
        self.to(images.device)

    def forward(self, index: Tensor) -> None:
        with pyro.plate("images", len(self.images), subsample=index):
            z = pyro.sample("z", dist.Bernoulli(logits=self.logits).to_event(1))
            pixels = dist.Normal(self.second(self.first(z).relu()), self.log_sigma.exp())
            pyro.sample("x", pixels.to_event(1), obs=self.images[index])


@torch.no_grad()
def true_model(images: Tensor) -> Model:
    """Return the network that generates the images."""
    model = Model(images)
    for bar, other in PAIRS:
        model.first.weight[other, bar] = -1.0
    model.second.weight.copy_(bars().t())
    model.logits.fill_(PI).logit_()
    model.log_sigma.fill_(SIGMA).log_()
    return model


def make_data(count: int) -> Tensor:
    truth = true_model(torch.randn(1, SIDE**2))
    with torch.no_grad():
        z = torch.bernoulli(torch.full((count, NUM_BARS), PI))
        return truth.second(truth.first(z).relu()) + SIGMA * torch.randn(count, SIDE**2)


def train(model: Model, epochs: int, rate: float = 1e-2) -> list[float]:
    """Train in place. Return the free energy per image after each epoch."""
    guide = TruncatedPosterior(model, 64, evolution=EvolutionaryUpdate(3, 2, 1))
    elbo = TraceTruncated_ELBO(max_plate_nesting=1)(model, guide)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=rate)
    steps = epochs * -(-len(model.images) // 32)
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


def evidence(model: Model, images: Tensor) -> Tensor:
    """Return the exact log p(x) of each image under the parameters of a model."""
    other = Model(images)
    other.load_state_dict(model.state_dict())
    index = torch.arange(len(images))
    return TruncatedPosterior(other, 2**NUM_BARS).posterior(index).free_energy


def pairs() -> tuple[list[tuple[int, int]], Tensor]:
    """Return all pairs of bars, and images of both bars without noise."""
    result = [(a, b) for a in range(NUM_BARS) for b in range(a + 1, NUM_BARS)]
    fields = bars()
    return result, torch.stack([fields[a] + fields[b] for a, b in result])


def ratios(model: Model) -> Tensor:
    """
    Return log p(image of both bars) for the excluded pairs, minus the mean over the other pairs.
    """
    result, images = pairs()
    discouraged = torch.tensor([set(p) in [set(q) for q in PAIRS] for p in result])
    value = evidence(model, images.to(model.images)).cpu()
    return value[discouraged] - value[~discouraged].mean()


def draw(learned: Model, linear: Model, curves: dict[str, list[list[float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    blue, orange = STYLES[1:3]
    for (name, own), (color, marker) in zip(curves.items(), (blue, orange), strict=True):
        for i, curve in enumerate(own):
            epochs, style = range(1, len(curve) + 1), {"color": color, "marker": marker}
            label = name if i == 0 else None
            left.plot(epochs, curve, lw=0.8, markersize=4, markevery=5, label=label, **style)
    left.set(title="Free energy per image, every start", xlabel="epoch", ylabel="nats")
    left.legend()
    images = pairs()[1]
    truth = evidence(true_model(images), images)
    for name, model, (color, marker) in (
        ("two layers", learned, blue),
        ("linear", linear, orange),
    ):
        at = evidence(model, images.to(model.images)).cpu()
        middle.plot(truth, at, linestyle="", marker=marker, ms=4, color=color, label=name)
    ends = [float(truth.min()), float(truth.max())]
    middle.plot(ends, ends, "k-", lw=0.6)
    middle.set(title="Images of two bars", xlabel="true log p(x), nats", ylabel="learned")
    middle.legend()
    weight = learned.first.weight.detach().cpu()
    right.imshow(weight, cmap="RdBu", vmin=-1.5, vmax=1.5)
    right.set(title="First layer, learned", xlabel="latent", ylabel="unit")
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    add_device_flag(parser)
    parser.add_argument("--output", type=Path, default=Path("correlated_bars.png"))
    args = parser.parse_args(argv)
    pyro.enable_validation(False)
    pyro.set_rng_seed(args.seed)
    images = make_data(args.images).to(args.device)
    best, curves = {}, {}
    for name in ("two layers", "linear"):
        models = [Model(images, linear=name == "linear") for _ in range(args.starts)]
        curves[name] = [train(model, args.epochs) for model in models]
        ends = [curve[-1] for curve in curves[name]]
        best[name] = models[max(range(args.starts), key=lambda i: ends[i])]
        print(f"{name}: F/N of the starts {', '.join(f'{end:.2f}' for end in ends)}", flush=True)
    models = {"true": true_model(images), **best}
    results = Results(args.output.with_suffix(".csv"), args.seed, argv)
    for name, model in models.items():
        mean = evidence(model, images).mean()
        said = ", ".join(f"{r:.1f}" for r in ratios(model))
        print(f"{name}: log p(x) {mean:.2f} per image, excluded pairs {said} nats")
        of_pairs = {f"pair_{i}": float(r) for i, r in enumerate(ratios(model))}
        results.add(model=name, evidence=float(mean), **of_pairs)
    draw(best["two layers"], best["linear"], curves, args.output)
    return tuple(ratios(model) for model in models.values())


if __name__ == "__main__":
    main()
