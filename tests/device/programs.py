"""Models and guides on any device, and training runs of them."""

from functools import cache

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn

from tests.device.simulated import host_reads
from tests.training import runs

BATCH = 4


def mixture(x, index=None):
    """A category, which some guides draw and others leave to the model, and a normal latent."""
    loc = pyro.param("loc", lambda: x.new_ones(3))
    with pyro.plate("data", len(x)):
        y = pyro.sample("y", dist.Categorical(logits=x.new_zeros(3)))
        z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
        mean = (z + loc[y]).unsqueeze(-1)
        pyro.sample("x", dist.Normal(mean, 1.0).expand([*mean.shape[:-1], 3]).to_event(1), obs=x)


def enumerated(x, index=None):
    marked = pyro.poutine.infer_config(
        mixture, lambda site: {"enumerate": "parallel"} if site["name"] == "y" else {}
    )
    return marked(x, index)


def normal_guide(x, index=None):
    slope = pyro.param("slope", lambda: x.new_ones(3))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(x @ slope, 1.0))


def discrete_guide(x, index=None):
    weight = pyro.param("weight", lambda: x.new_ones(3, 4))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Categorical(logits=x @ weight[:, :3]))
        pyro.sample("z", dist.Normal(x @ weight[:, 3], 1.0))


def auto_normal():
    model = runs.Model()

    def plates(x, index=None, size=runs.N):
        return pyro.plate("data", size, subsample=index)

    return model, AutoNormal(model, create_plates=plates)


PROGRAMS = {
    "vae": lambda: (runs.Model(), runs.Guide()),
    "categories": lambda: (runs.Mixture(), runs.MixtureGuide()),
    "states": lambda: runs.programs("truncated"),
    "auto": auto_normal,
    "enumerated": lambda: (enumerated, normal_guide),
    "slots": lambda: (mixture, discrete_guide),
}


class Training:
    """Steps of one loss by SVI, on the first data."""

    def __init__(self, loss, programs, device):
        self.loss = loss
        self.pair = PROGRAMS[programs]()
        for program in self.pair:
            if isinstance(program, nn.Module):
                program.to(device)
        self.data = runs.data()[:BATCH].to(device), torch.arange(BATCH, device=device)
        self.svi = SVI(*self.pair, pyro.optim.Adam({"lr": 0.01}), loss)

    def step(self):
        return self.svi.step(*self.data)

    def reads(self, at_most=0, steps=8):
        """The least number of reads of a step, over a few, because some are analysed."""
        result = []
        for _ in range(steps):
            with host_reads() as reads:
                self.step()
            result.append(reads)
            if len(reads) <= at_most:
                break
        return min(result, key=len)


@cache
def reads_of_trace_elbo(programs, device):
    """What Pyro's own loss reads in a step of the same model and guide, validation on."""
    reads = len(Training(Trace_ELBO(), programs, device).reads(steps=2))
    pyro.clear_param_store()
    return reads
