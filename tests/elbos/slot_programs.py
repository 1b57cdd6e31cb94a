"""Programs whose guide draws discrete and continuous latents, and their exact evidence."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.ops.indexing import Vindex
from torch.distributions import constraints


def param(name, *shape):
    size = math.prod(shape)
    return pyro.param(name, lambda: torch.linspace(-0.9, 1.1, size).reshape(shape).clone())


def positive(name):
    return pyro.param(name, lambda: torch.tensor(0.7), constraint=constraints.positive)


def data(*shape):
    return torch.linspace(-1.3, 1.7, math.prod(shape)).reshape(shape)


def categorical(name, logits, **options):
    return pyro.sample(name, dist.Categorical(logits=logits), **options)


def normal(name, loc, scale=0.6, **options):
    return pyro.sample(name, dist.Normal(loc, scale), **options)


def labels_model(x=None, y=None):
    """A mixture whose components have a level of each datum."""
    x = data(3) if x is None else x
    with pyro.plate("data", len(x)):
        y = categorical("y", param("prior", 3), obs=y)
        z = normal("z", Vindex(param("mu", 3))[y], 0.8)
        normal("x", z, obs=x)


def labels_guide(x=None, y=None):
    x = data(3) if x is None else x
    with pyro.plate("data", len(x)):
        if y is None:
            y = categorical("y", param("q_prior", 3) + x.unsqueeze(-1) * param("q_slope", 3))
        normal("z", Vindex(param("q_loc", 3))[y] + 0.3 * x, positive("q_scale"))


def labels_joint(x):
    """log p(x, y), of each datum and value: ``[data, 3]``."""
    fn = dist.Normal(param("mu", 3), (0.8**2 + 0.6**2) ** 0.5)
    return param("prior", 3).log_softmax(-1) + fn.log_prob(x.unsqueeze(-1))


def labels_evidence():
    return labels_joint(data(3)).logsumexp(-1)


def labels_posterior():
    x, variance = data(3), 1 / (1 / 0.8**2 + 1 / 0.6**2)
    with pyro.plate("data", 3):
        y = categorical("y", labels_joint(x).detach())
        loc = variance * (param("mu", 3).detach()[y] / 0.8**2 + x / 0.6**2)
        normal("z", loc, variance**0.5)


def around_model():
    """A continuous site before the discrete one, and one behind it."""
    x = data(2, 2)
    with pyro.plate("data", 2):
        a = normal("a", 0.2, 1.0)
        y = pyro.sample("y", dist.Bernoulli(logits=param("w") * a + 0.3))
        z = normal("z", a + 1.2 * y, 0.8)
        normal("u", a, 0.9, obs=x[0])
        normal("x", z, obs=x[1])


def around_guide():
    x = data(2, 2)
    with pyro.plate("data", 2):
        a = normal("a", param("q_a", 2), positive("q_scale"))
        y = pyro.sample("y", dist.Bernoulli(logits=param("q_w") * a + x[1]))
        normal("z", 0.5 * a + param("q_y") * y + 0.4 * x[1], positive("q_scale_z"))


GRID = torch.linspace(-7.0, 7.0, 1001, dtype=torch.float64)


def on_grid(log_density):
    """The logarithm of an integral over the grid, in the first dim."""
    return log_density.logsumexp(0) + math.log(float(GRID[1] - GRID[0]))


def around_evidence():
    x, a = data(2, 2), GRID.unsqueeze(-1)
    y = torch.tensor([0.0, 1.0]).reshape(2, 1, 1)
    fn = dist.Bernoulli(logits=param("w") * a + 0.3)
    z = dist.Normal(a + 1.2 * y, 1.0).log_prob(x[1])  # 0.8 ** 2 + 0.6 ** 2 = 1
    inner = (fn.log_prob(y) + z).logsumexp(0)
    return on_grid(dist.Normal(0.2, 1.0).log_prob(a) + dist.Normal(a, 0.9).log_prob(x[0]) + inner)


def nested_model():
    """A state and a level of each group, and a state of each of its members."""
    with pyro.plate("groups", 2, dim=-1):
        y = categorical("y", param("prior", 2))
        z = normal("z", Vindex(param("mu", 2))[y], 1.0)
        with pyro.plate("members", 2, dim=-2):
            s = categorical("s", Vindex(param("given", 2, 2))[y, :])
            normal("x", z + 1.1 * s, obs=data(2, 2))


def nested_guide():
    with pyro.plate("groups", 2, dim=-1):
        y = categorical("y", param("q_y", 2, 2))
        with pyro.plate("members", 2, dim=-2):
            categorical("s", Vindex(param("q_s", 2, 2))[y, :] + param("q_m", 2, 2, 2))
        normal("z", Vindex(param("q_z", 2))[y], positive("q_scale"))


def nested_evidence():
    x, z = data(2, 2), GRID.reshape(-1, 1, 1, 1)  # grid, y, members, groups
    mu, given = param("mu", 2), param("given", 2, 2).log_softmax(-1)
    members = [
        given[:, s].reshape(2, 1, 1) + dist.Normal(z + 1.1 * s, 0.6).log_prob(x) for s in (0, 1)
    ]
    each = torch.stack(members).logsumexp(0).sum(-2)  # grid, y, groups
    prior = param("prior", 2).log_softmax(-1).unsqueeze(-1)
    level = dist.Normal(mu.unsqueeze(-1), 1.0).log_prob(z.squeeze(-1))
    return on_grid((each + prior + level).logsumexp(1))


def apart_model():
    """Two discrete sites that depend on no continuous one."""
    with pyro.plate("data", 2):
        z = normal("z", 0.3, 1.1)
        b = pyro.sample("b", dist.Bernoulli(logits=param("p_b")))
        c = categorical("c", Vindex(param("p_c", 2, 2))[b.long(), :])
        normal("x", z + 0.9 * b - 0.7 * c, obs=data(2))


def apart_guide():
    with pyro.plate("data", 2):
        normal("z", param("q_z", 2), positive("q_scale"))
        c = categorical("c", param("q_c", 2, 2))
        pyro.sample("b", dist.Bernoulli(logits=Vindex(param("q_b", 2))[c]))


def apart_evidence():
    total = []
    for b in (0, 1):
        for c in (0, 1):
            log_p = dist.Bernoulli(logits=param("p_b")).log_prob(torch.tensor(float(b)))
            log_p = log_p + param("p_c", 2, 2).log_softmax(-1)[b, c]
            loc, scale = 0.3 + 0.9 * b - 0.7 * c, (1.1**2 + 0.6**2) ** 0.5
            total.append(log_p + dist.Normal(loc, scale).log_prob(data(2)))
    return torch.stack(total).logsumexp(0)


def gamma_model():
    """A continuous site without explicit noise on either side of a discrete one."""
    with pyro.plate("data", 2):
        a = pyro.sample("a", dist.Gamma(2.0, 1.5))
        y = pyro.sample("y", dist.Bernoulli(logits=a - 1.0))
        b = pyro.sample("b", dist.Gamma(1.5 + y, 2.0))
        normal("x", a + b - y, obs=data(2))


def gamma_guide():
    with pyro.plate("data", 2):
        a = pyro.sample("a", dist.Gamma(3.0 + param("q_a", 2), 2.0))
        y = pyro.sample("y", dist.Bernoulli(logits=param("q_w") * a))
        pyro.sample("b", dist.Gamma(2.0 + 0.5 * y, 2.0 + positive("q_b")))


def subsampled(program):
    """A minibatch that is always the same, with a continuous level of all data."""

    def run():
        index = torch.tensor([1, 2])
        if program == "model":
            level = normal("level", 0.0, 1.0)
        else:
            level = normal("level", param("q_level"), positive("q_spread"))
        with pyro.plate("data", 3, subsample=index):
            if program == "model":
                y = categorical("y", param("prior", 3))
                z = normal("z", Vindex(param("mu", 3))[y] + level, 0.8)
                normal("x", z, obs=data(3)[index])
            else:
                y = categorical("y", param("q_prior", 3) + level)
                normal("z", Vindex(param("q_loc", 3))[y], positive("q_scale"))

    return run


def apart_in_plates(program):
    """Two plates of data, of which one has no discrete latent, and one turn after the other."""

    def run():
        with pyro.plate("left", 2):
            z = normal("z", 0.2 if program == "model" else param("q_z", 2), 0.8)
            if program == "model":
                normal("x", z, obs=data(2))
        for i in pyro.plate("right", 2):
            logits = param("prior", 3) if program == "model" else param("q", 2, 3)[i]
            y = categorical(f"y{i}", logits)
            loc = param("mu", 3) if program == "model" else param("q_mu", 3)
            v = normal(f"v{i}", Vindex(loc)[y])
            if program == "model":
                normal(f"u{i}", v, obs=data(2)[i])

    return run


def masked(program):
    def run():
        with pyro.plate("data", 3), poutine.mask(mask=torch.tensor([True, False, True])):
            program()

    return run


def masked_model():
    y = categorical("y", param("prior", 3))
    normal("x", normal("z", Vindex(param("mu", 3))[y], 0.8), obs=data(3))


def masked_guide():
    y = categorical("y", param("q_prior", 3))
    normal("z", Vindex(param("q_loc", 3))[y], positive("q_scale"))


def present_model():
    """An object that is there or not, and a second only where there is a first."""
    x, mean, there = data(2), 0.0, torch.ones(2)
    with pyro.plate("data", 2):
        for t in range(2):
            present = pyro.sample(f"present{t}", dist.Bernoulli(0.6 * there))
            with poutine.mask(mask=present.bool()):
                z = normal(f"z{t}", param("mu"), 0.9)
            mean, there = mean + present * z, there * present
        normal("x", mean, obs=x)


def present_guide():
    x, there = data(2), torch.ones(2)
    with pyro.plate("data", 2):
        for t in range(2):
            logit = param("q_level") + param("q_slope") * x
            present = pyro.sample(f"present{t}", dist.Bernoulli(logit.sigmoid() * there))
            with poutine.mask(mask=present.bool()):
                normal(f"z{t}", param("q_loc") + 0.4 * x, positive("q_scale"))
            there = there * present


def present_evidence():
    x, prior = data(2), (0.4, 0.6 * 0.4, 0.36)
    parts = [
        math.log(p) + dist.Normal(i * param("mu"), (0.36 + i * 0.81) ** 0.5).log_prob(x)
        for i, p in enumerate(prior)
    ]
    return torch.stack(parts).logsumexp(0)


@dataclass
class Slotted:
    """
    A model and a guide.

    :ivar evidence: log p(x) of each datum, if it is known.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    evidence: Callable[[], Any] | None = None
    args = ()

    @staticmethod
    def parameters():
        return [p for _, p in pyro.get_param_store().named_parameters()]


PROGRAMS = {
    "labels": Slotted(labels_model, labels_guide, labels_evidence),
    "around": Slotted(around_model, around_guide, around_evidence),
    "nested": Slotted(nested_model, nested_guide, nested_evidence),
    "apart": Slotted(apart_model, apart_guide, apart_evidence),
    "gamma": Slotted(gamma_model, gamma_guide),
    "subsampled": Slotted(subsampled("model"), subsampled("guide")),
    "plates": Slotted(apart_in_plates("model"), apart_in_plates("guide")),
    "present": Slotted(present_model, present_guide, present_evidence),
    "masked": Slotted(masked(masked_model), masked(masked_guide)),
}
