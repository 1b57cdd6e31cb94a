"""State that the first call of a guide sets up is kept as a whole."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuideList,
    AutoLowRankMultivariateNormal,
    AutoNormal,
    AutoStructured,
)

from pyro_mcvae import TraceIWAE_ELBO, TraceSGVB_ELBO
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
