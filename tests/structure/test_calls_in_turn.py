"""A loss that is called in many ways in turn has the numbers of a new one, and runs once a step."""

import random

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_mcvae import (
    MALA,
    CompiledELBO,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from tests.params import in_turn

LOSSES = {
    "iwae": lambda: TraceIWAE_ELBO(3),
    "rao-blackwell": lambda: TraceRaoBlackwell_ELBO(2),
    "sis": lambda: TraceSIS_ELBO(2, UnderdampedLangevin(0.2), num_particles=2),
    "ais": lambda: TraceAIS_ELBO(2, MALA(0.1)),
    "joint": lambda: TraceIWAE_ELBO(3, joint=True),
    "sgvb": lambda: TraceSGVB_ELBO(2),
}
# The parts that a call may have: an observation of the global latent, one of the local latents, a
# mask, data that depend on each other, a site that the model enumerates, a second global latent, a
# discrete site of the guide; and "size", another number of data.
PARTS = {
    "sites": ("observed", "labelled", "enumerates", "second"),
    "data": ("size", "mask", "couples"),
    "discrete": ("discrete", "couples", "size"),
    "sums": ("discrete", "enumerates", "observed"),
    "all": ("size", "observed", "labelled", "mask", "couples", "enumerates", "second"),
}


class Programs:
    """A model and guide, whose guide counts its training runs in batch normalization."""

    def __init__(self):
        self.norm, self.linear = torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1)

    def model(self, x, parts):
        pyro.module("linear", self.linear)
        mean, scale = pyro.sample("mean", dist.Normal(0.0, 1.0)), 1.0
        if "second" in parts:
            scale = pyro.sample("scale", dist.Gamma(2.0, 2.0))
        with pyro.plate("data", len(x)):
            loc = torch.tensor(0.0)
            if "enumerates" in parts:
                options = {"enumerate": "parallel"}
                loc = loc + pyro.sample("k", dist.Bernoulli(0.6), infer=options)
            if "discrete" in parts:
                loc = loc + pyro.sample("j", dist.Bernoulli(0.3))
            label = torch.full_like(x, 0.3) if "labelled" in parts else None
            z = pyro.sample("z", dist.Normal(mean, 1.0), obs=label)
            loc = loc + z * self.linear.weight.view(())
            if "couples" in parts:
                loc = loc + z.mean(-1, keepdim=True)
            with poutine.mask(mask=torch.arange(len(x)) % 2 == 0 if "mask" in parts else True):
                pyro.sample("x", dist.Normal(loc, scale), obs=x)
        if "observed" in parts:
            pyro.sample("y", dist.Normal(mean, 1.0), obs=torch.tensor(1.0))

    def guide(self, x, parts):
        loc = self.norm(x.unsqueeze(-1)).squeeze(-1).detach()
        pyro.sample("mean", dist.Normal(0.2, 1.0))
        if "second" in parts:
            pyro.sample("scale", dist.Gamma(3.0, 2.5))
        with pyro.plate("data", len(x)):
            if "discrete" in parts:
                pyro.sample("j", dist.Bernoulli(logits=loc))
            if "labelled" not in parts:
                pyro.sample("z", dist.Normal(0.5 * loc, 1.0))


def by_argument(programs):
    return lambda x, parts: (programs.model, programs.guide, x, parts)


def by_attribute(programs):
    programs.parts = set()

    def pair(x, parts):
        programs.parts = parts
        return model, guide, x

    def model(x):
        programs.model(x, programs.parts)

    def guide(x):
        programs.guide(x, programs.parts)

    return pair


def by_tensor(programs):
    """The parts are read from a tensor, at each step from another one."""
    names = sorted(set().union(*PARTS.values()))

    def pair(x, parts):
        return model, guide, x, torch.tensor([name in parts for name in names])

    def chosen(flags):
        return {name for name, flag in zip(names, flags.tolist(), strict=True) if flag}

    def model(x, flags):
        programs.model(x, chosen(flags))

    def guide(x, flags):
        programs.guide(x, chosen(flags))

    return pair


def by_handler(programs):
    """The model is made at each step."""
    return lambda x, parts: (pyro.condition(programs.model, data={}), programs.guide, x, parts)


WAYS = {
    "argument": by_argument,
    "attribute": by_attribute,
    "tensor": by_tensor,
    "handler": by_handler,
}
BY_DEFAULT = ("iwae", "sites"), ("sis", "sums"), ("ais", "data"), ("rao-blackwell", "discrete")


def check(name, kind, way="argument", wrapped=lambda objective: objective):
    """Compare each step of one objective, called in many ways, with that of a new objective."""
    programs, elbo, rng = Programs(), wrapped(LOSSES[name]()), random.Random(1)
    pair, data, counted = WAYS[way](programs), torch.randn(5), 0
    for step in range(16):
        parts = {part for part in PARTS[kind] if rng.random() < 0.5}
        x, trains = data[: 3 if "size" in parts else 5], rng.random() < 0.6
        found = []
        for objective in (elbo, LOSSES[name]()):
            pyro.set_rng_seed(step)
            programs.linear.zero_grad()
            run = objective.loss_and_grads if trains else objective.loss
            loss = run(*pair(x, parts))
            gradient = programs.linear.weight.grad
            slope = 0.0 if gradient is None else gradient.item()
            found.append((loss, slope, torch.rand(()).item()))
            counted += 1
            assert programs.norm.num_batches_tracked == counted
        assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(n, k, marks=() if (n, k) in BY_DEFAULT else pytest.mark.slow)
        for n in LOSSES
        for k in PARTS
    ],
)
def test_calls_in_turn_have_the_losses_of_new_objectives(name, kind):
    """Also their gradients, and the random state; and statistics count each step once."""
    check(name, kind)


@pytest.mark.slow
@in_turn(name=LOSSES, kind=PARTS, way=["attribute", "tensor", "handler"])
def test_parts_may_come_from_attributes_tensors_and_handlers(name, kind, way):
    check(name, kind, way)


@pytest.mark.slow
@in_turn(name=["iwae", "rao-blackwell", "sis", "sgvb"], kind=PARTS)
def test_compiled_losses_called_in_turn_are_those_of_new_plain_ones(name, kind):
    check(name, kind, wrapped=lambda objective: CompiledELBO(objective, backend="eager"))
