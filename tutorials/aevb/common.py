"""The experiment of Kingma and Welling (2014): images, a VAE, and three objectives."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor, nn

from pyro_mcvae import MonteCarloEM, TraceSGVB_ELBO, WakeSleep

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
import data

# Number of steps with one minibatch: Monte Carlo EM uses its draws for 5 updates (appendix E).
UPDATES = {"MCEM": 5}

# Learning rates of Adagrad, from the paper's set {0.01, 0.02, 0.1}. On MNIST (500 hidden units, 10
# latents, 60,000 samples) the bound of wake-sleep was -186 nats with 0.01 and -231 with 0.02.
LEARNING_RATES = {"AEVB": 0.02, "Wake-Sleep": 0.01, "MCEM": 0.02}

OBJECTIVES: dict[str, Callable[[], Any]] = {
    "AEVB": lambda: TraceSGVB_ELBO(),
    "Wake-Sleep": lambda: WakeSleep(),
    "MCEM": lambda: MonteCarloEM(updates_per_draw=UPDATES["MCEM"], persistent=True),
}


class VAE(nn.Module):
    """
    A VAE with perceptrons of one hidden layer as encoder and decoder (appendix C).

    model: z ~ Normal(0, I), x | z ~ Bernoulli or Normal; guide: z | x ~ Normal. Binary pixels have
    a Bernoulli decoder, gray ones a Gaussian decoder whose means lie in the unit interval.
    """

    def __init__(self, num_pixels: int, num_hidden: int, num_latents: int, binary: bool) -> None:
        super().__init__()
        self.num_latents, self.binary = num_latents, binary
        self.encoder = nn.Sequential(
            nn.Linear(num_pixels, num_hidden), nn.Tanh(), nn.Linear(num_hidden, 2 * num_latents)
        )
        self.decoder = nn.Sequential(
            nn.Linear(num_latents, num_hidden),
            nn.Tanh(),
            nn.Linear(num_hidden, num_pixels if binary else 2 * num_pixels),
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.01)

    def model(self, x: Tensor, rows: Tensor | None = None, size: int | None = None) -> None:
        """``rows`` are the indices of the images ``x`` in the data set of ``size`` images."""
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", size or len(x), subsample=rows, dim=-1):
            z = pyro.sample("z", dist.Normal(x.new_zeros(self.num_latents), 1.0).to_event(1))
            pyro.sample("x", self.likelihood(z), obs=x)

    def likelihood(self, z: Tensor) -> Any:
        result = self.decoder(z)
        if self.binary:
            return dist.Bernoulli(logits=result).to_event(1)
        mean, log_variance = result.chunk(2, dim=-1)
        return dist.Normal(mean.sigmoid(), (0.5 * log_variance).exp()).to_event(1)

    def guide(self, x: Tensor, rows: Tensor | None = None, size: int | None = None) -> None:
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", size or len(x), subsample=rows, dim=-1):
            # The encoder returns the logarithm of the variance, as in eq. 12.
            loc, log_variance = self.encoder(x).chunk(2, dim=-1)
            pyro.sample("z", dist.Normal(loc, (0.5 * log_variance).exp()).to_event(1))

    def prior(self, x: Tensor, rows: Tensor | None = None, size: int | None = None) -> None:
        """The guide of Monte Carlo EM, which has no encoder. Chains start from its draws."""
        with pyro.plate("data", size or len(x), subsample=rows, dim=-1):
            pyro.sample("z", dist.Normal(x.new_zeros(self.num_latents), 1.0).to_event(1))


# --- The data -------------------------------------------------------------------------------------


@dataclass
class Data:
    """Images, one per row, with pixels 0 or 1 (``binary``), or gray values in [0, 1]."""

    name: str
    train: Tensor
    test: Tensor
    binary: bool

    def to(self, device: torch.device) -> "Data":
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def load(name: str, root: Path, download: bool = False) -> Data:
    """
    Return the images. They are binarized once, because chains need fixed data.

    :param name: ``digits`` (of scikit-learn, 8x8), ``mnist``, or ``frey`` (28x20, gray).
    :param root: the folder of the data sets.
    :param download: whether to download missing files of MNIST.
    """
    generator = torch.Generator().manual_seed(0)
    if name == "mnist":
        train, test = (data.mnist(root, train, download)[0] for train in (True, False))
    else:
        images = data.frey(root) if name == "frey" else data.digits()
        # The split does not depend on the seed, so that runs with different seeds are comparable.
        images = images[torch.randperm(len(images), generator=generator)]
        train, test = images[: -len(images) // 6], images[-len(images) // 6 :]
    binary = name != "frey"
    if binary:
        train, test = (x.bernoulli(generator=generator) for x in (train, test))
    return Data(name, train, test, binary)


# --- Training -------------------------------------------------------------------------------------


@dataclass
class Training:
    """Train with one objective. Yield at each of the sample counts in ``marks``."""

    name: str
    vae: VAE
    images: Tensor
    batch_size: int
    learning_rate: float
    cpu_seconds: float = 0.0
    seen: int = 0

    def run(self, marks: list[int]) -> Iterator[int]:
        """Count training samples as in the paper: B per update."""
        pyro.clear_param_store()
        n, times = len(self.images), UPDATES.get(self.name, 1)
        # The prior N(0, I) of the weights is added to the loss of the whole data set.
        options = {"lr": self.learning_rate, "weight_decay": 1.0}
        guide = self.vae.prior if self.name == "MCEM" else self.vae.guide
        svi = SVI(self.vae.model, guide, pyro.optim.Adagrad(options), loss=OBJECTIVES[self.name]())
        waiting = list(marks)
        while waiting:
            for rows in torch.randperm(n, device=self.images.device).split(self.batch_size):
                start = time.process_time()
                x = self.images.index_select(0, rows)
                for _ in range(times):
                    svi.step(x, rows, n)
                self.cpu_seconds += time.process_time() - start
                self.seen += times * len(rows)
                if self.seen >= waiting[0]:
                    waiting.pop(0)
                    yield self.seen
                if not waiting:
                    return


def bound(vae: VAE, x: Tensor) -> tuple[float, float]:
    """Return the mean lower bound per image, and its standard error over the images."""
    elbo = TraceSGVB_ELBO()
    result = torch.cat([elbo.bounds(vae.model, vae.guide, part).per_datum for part in x.split(500)])
    return result.mean().item(), result.std().item() / len(result) ** 0.5
