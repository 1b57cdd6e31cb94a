"""A VAE whose model and guide are modules, and its data."""

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import nn


class Model(PyroModule):
    """Of six binary pixels."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(2), x.new_ones(2)).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)


class Guide(PyroModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        loc, log_scale = self.encoder(x).chunk(2, -1)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def images(count=64):
    labels = torch.arange(count)[:, None] % 2
    return torch.bernoulli(torch.where(labels == torch.arange(6) // 3, 0.9, 0.1))
