"""State that the first call of a guide sets up is kept as a whole; modules are found anywhere."""

import functools
from collections import deque, namedtuple
from types import ModuleType, SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuideList,
    AutoLowRankMultivariateNormal,
    AutoNormal,
    AutoStructured,
)
from torch import nn

from pyro_mcvae import TraceIWAE_ELBO, TraceSGVB_ELBO, log_evidence
from tests.cases import every
from tests.params import in_turn


def model():
    pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("plate", 3):
        pyro.sample("b", dist.Normal(torch.zeros(3), 1.0))


def both(parent):
    """A guide of a parent class, and of a user's subclass, which has state of its own."""

    class Mine(parent):
        def __init__(self, model):
            super().__init__(model)
            self.calls = []

        def forward(self, *args, **kwargs):
            self.calls.append(len(self.calls))
            return super().forward(*args, **kwargs)

    return parent, Mine


@in_turn(
    parent=[
        *(AutoNormal, AutoDiagonalNormal, AutoStructured, AutoLowRankMultivariateNormal),
        AutoGuideList,
    ],
    make=[TraceSGVB_ELBO, TraceIWAE_ELBO],
)
def test_a_subclass_of_an_autoguide_has_the_loss_of_its_parent(parent, make):
    losses = []
    for kind in both(parent):
        pyro.clear_param_store()
        guide = kind(model)
        if parent is AutoGuideList:
            guide.append(AutoNormal(pyro.poutine.block(model, hide=["b"])))
            guide.append(AutoNormal(pyro.poutine.block(model, hide=["a"])))
        pyro.set_rng_seed(0)
        elbo = make(5)
        losses.append([elbo.loss(model, guide) for _ in range(3)])
    assert losses[0] == losses[1]


def places(net):
    """Functions that call a network, by where they hold it."""

    class OfTheClass:
        net = None

        def run(self, z):
            return self.net(z)

    class Computed:
        @property
        def net(self):
            return net

    class Slotted:
        __slots__ = ("net",)

    class Outer(nn.Module):
        def forward(self, z):
            return net(z)

    module, inner = ModuleType("networks"), ModuleType("networks.inner")
    module.net, module.inner, inner.net, OfTheClass.net = net, inner, net, net
    module.scale, module.table, module.name = 1.0, torch.ones(()), "module"
    of_class, slotted, outer = OfTheClass(), Slotted(), Outer()
    slotted.net = net
    held, queue, nested = {net}, deque([net]), {"a": [{"b": [{"c": {"d": net}}]}]}
    user, pair = SimpleNamespace(module=module), namedtuple("Pair", "net")(net)

    def default(z, net=net):
        return net(z)

    def keyword(z, *, net=net):
        return net(z)

    def calls(function):
        return lambda z: function(z)

    deep = default
    for _ in range(8):
        deep = calls(deep)

    @functools.lru_cache
    def cached():
        return net

    return {
        "class": lambda z: OfTheClass.net(z),
        "object of the class": lambda z: of_class.net(z),
        "method": of_class.run,
        "property": lambda z: Computed().net(z),
        "slot": lambda z: slotted.net(z),
        "forward": outer,
        "Python module": lambda z: module.net(z),
        "Python module beside numbers": lambda z: module.net(z) * module.scale * module.table,
        "Python module inside": lambda z: module.inner.net(z),
        "Python module of an object": lambda z: user.module.net(z),
        "set": lambda z: next(iter(held))(z),
        "deque": lambda z: queue[0](z),
        "nested": lambda z: nested["a"][0]["b"][0]["c"]["d"](z),
        "named tuple": lambda z: pair.net(z),
        "default": default,
        "keyword": keyword,
        "partial": functools.partial(default, net=net),
        "other function": deep,
        "cache": lambda z: cached()(z),
        "bound forward": lambda z: bound(z) if (bound := net.forward) else None,
    }


@pytest.mark.parametrize("place", every(3, places(nn.Identity())))
def test_evaluators_put_networks_into_evaluation_mode_wherever_they_are(place):
    """Dropout would change the density in each run."""
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    decoder, x = places(net)[place], torch.randn(2, 3)
    modes = []
    net.register_forward_hook(lambda *_: modes.append(net.training))
    net[1].register_forward_hook(lambda *_: modes.append(net[1].training))

    def decoded(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 1.0).to_event(1), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    log_evidence(decoded, guide, x, num_particles=10)
    assert modes
    assert not any(modes)
    assert net.training
    assert net[1].training
