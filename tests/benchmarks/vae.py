"""The VAE of the benchmark, as a pair of Pyro programs."""

import itertools
from typing import Any

import pyro
import pyro.distributions as dist
from torch import Tensor, nn

PIXELS = 784
_counter = itertools.count()


class ConvDecoder(nn.Module):
    """Upsampling stages of Thin et al. (2021), for any leading dims."""

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.first = nn.Linear(latent, 64 * 7 * 7)
        self.stages = nn.Sequential(
            nn.Upsample(scale_factor=2),
            nn.Conv2d(64, 32, 3, padding=1),
            nn.GELU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(32, 16, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 1, 1),
        )

    def forward(self, z: Tensor) -> Tensor:
        result = self.stages(self.first(z).reshape(-1, 64, 7, 7))
        return result.reshape(*z.shape[:-1], PIXELS)


class VAE(nn.Module):
    """
    :param bool stored: whether the programs register the networks in Pyro's parameter store, which
        SVI trains and a module does without.
    """

    def __init__(self, case: Any, stored: bool = True) -> None:
        super().__init__()
        self.name, self.latent, self.stored = f"suite{next(_counter)}", case.latent, stored
        self.discrete = case.objective == "RB"
        self.encoder = nn.Sequential(
            nn.Linear(case.pixels, case.hidden),
            nn.Tanh(),
            nn.Linear(case.hidden, case.latent * (2 - self.discrete)),
        )
        self.decoder = (
            ConvDecoder(case.latent)
            if case.decoder == "conv"
            else nn.Sequential(
                nn.Linear(case.latent, case.hidden),
                nn.Tanh(),
                nn.Linear(case.hidden, case.pixels),
            )
        )
        self.to(case.device)

    def model(self, x: Tensor) -> None:
        if self.stored:
            pyro.module(self.name + ".decoder", self.decoder)
        with pyro.plate("data", len(x)):
            zeros = x.new_zeros(self.latent)
            normal = dist.Normal(zeros, x.new_ones(self.latent)).to_event(1)
            z = pyro.sample("z", dist.OneHotCategorical(logits=zeros) if self.discrete else normal)
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        if self.stored:
            pyro.module(self.name + ".encoder", self.encoder)
        with pyro.plate("data", len(x)):
            if self.discrete:
                pyro.sample("z", dist.OneHotCategorical(logits=self.encoder(x)))
                return
            loc, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))
