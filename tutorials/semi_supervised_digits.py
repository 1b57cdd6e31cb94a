"""Train a semi-supervised VAE on the digits of scikit-learn: density and classification by loss.

50 of 1,500 images have labels. The guide draws the class y from a classifier, and then z given x
and y. Each loss trains the same model and guide from three seeds. The table has log p(x) of
held-out images, and the accuracy of the classifier. Run it::

    python tutorials/semi_supervised_digits.py
"""

import argparse
from collections.abc import Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from pyro_mcvae import TraceIWAE_ELBO, TraceRaoBlackwell_ELBO, log_evidence


def joined(*parts: Tensor) -> Tensor:
    """Concatenate parts with different leading dims: sums over y add one."""
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, -1) for part in parts], -1)


class VAE(nn.Module):
    def __init__(self, pixels: int = 64, classes: int = 10, latents: int = 8) -> None:
        super().__init__()
        self.classes, self.latents = classes, latents

        def network(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Linear(inputs, 128), nn.Tanh(), nn.Linear(128, outputs))

        self.classifier = network(pixels, classes)
        self.encoder = network(pixels + classes, 2 * latents)
        self.decoder = network(latents + classes, pixels)

    def model(self, x: Tensor, y: Tensor | None = None) -> None:
        pyro.module("decoder", self.decoder)
        with pyro.plate("images", len(x)):
            uniform = dist.OneHotCategorical(logits=x.new_zeros(self.classes))
            y = pyro.sample("y", uniform, obs=y)
            z = pyro.sample("z", dist.Normal(x.new_zeros(self.latents), 1.0).to_event(1))
            pixels = dist.Bernoulli(logits=self.decoder(joined(z, y)))
            pyro.sample("x", pixels.to_event(1), obs=x)

    def guide(self, x: Tensor, y: Tensor | None = None) -> None:
        pyro.module("classifier", self.classifier)
        pyro.module("encoder", self.encoder)
        with pyro.plate("images", len(x)):
            if y is None:
                y = pyro.sample("y", dist.OneHotCategorical(logits=self.classifier(x)))
            loc, log_scale = self.encoder(joined(x, y)).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def train(loss: Any, images: Tensor, labels: Tensor, many: Tensor, epochs: int) -> VAE:
    """Train with labels for ``images``, and without for ``many``."""
    vae = VAE(images.shape[1])
    elbo = loss(vae.model, vae.guide)
    optimizer = torch.optim.Adam(vae.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(many)).split(100):
            optimizer.zero_grad()
            labelled = images.bernoulli()
            total = elbo(many[rows].bernoulli())
            total = total + elbo(labelled, one_hot(labels, vae.classes).float())
            # The classifier has no other gradient from labels.
            total = total + 10 * cross_entropy(vae.classifier(labelled), labels, reduction="sum")
            total.backward()
            optimizer.step()
    return vae


def main(argv: Sequence[str] | None = None) -> None:
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--particles", type=int, default=500, help="of log p(x)")
    args = parser.parse_args(argv)
    pyro.enable_validation(False)
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    test = images[1500:].bernoulli(generator=torch.Generator().manual_seed(0))
    every = float("inf")
    losses = {
        "`TraceRaoBlackwell_ELBO(inf)`": lambda: TraceRaoBlackwell_ELBO(every),
        "`TraceRaoBlackwell_ELBO(1)`": lambda: TraceRaoBlackwell_ELBO(1),
        "`TraceIWAE_ELBO(10)`": lambda: TraceIWAE_ELBO(10),
    }
    print("|  | log p(x), nats per image | accuracy of the classifier | lowest, highest |")
    print("| --- | ---: | ---: | ---: |")
    for name, make in losses.items():
        evidences, accuracies = [], []
        for seed in range(args.seeds):
            pyro.clear_param_store()
            pyro.set_rng_seed(seed)
            vae = train(make(), images[:50], labels[:50], images[50:1500], args.epochs)
            options = {"num_particles": args.particles, "seed": 0, "progress": False}
            evidences.append(float(log_evidence(vae.model, vae.guide, test, **options).mean))
            with torch.no_grad():
                right = vae.classifier(test).argmax(-1) == labels[1500:]
            accuracies.append(float(right.double().mean()))
        mean = sum(evidences) / args.seeds
        cells = f"{mean:.2f} | {sum(accuracies) / args.seeds:.3f}"
        print(f"| {name} | {cells} | {min(accuracies):.3f}, {max(accuracies):.3f} |", flush=True)


if __name__ == "__main__":
    main()
