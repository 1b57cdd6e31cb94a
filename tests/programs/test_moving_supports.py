"""Whose support has ends that the guide's parameters move."""

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import transforms as T

from pyro_mcvae.programs.distributions import moves_support


def p(value=0.7):
    return torch.tensor(value, requires_grad=True)


def transformed(base, *parts):
    return dist.TransformedDistribution(base, list(parts))


LOGIT = T.SigmoidTransform().inv
UNIT = dist.Uniform(torch.tensor(0.0), torch.tensor(1.0))
MOVES = {
    "uniform": lambda: dist.Uniform(torch.tensor(-1.0), p()),
    "wrapped": lambda: dist.Uniform(p(), 2.0).expand([4, 3]).mask(True).to_event(1),
    "pareto": lambda: dist.Pareto(p(), 2.0),
    "affine beta": lambda: dist.AffineBeta(2.0, 2.0, p(), torch.tensor(1.0)),
    "shifted": lambda: transformed(UNIT, T.AffineTransform(p(), 2.0)),
    "shifted after a power": lambda: transformed(
        dist.Exponential(torch.tensor(1.0)), T.PowerTransform(2.0), T.AffineTransform(0.0, p())
    ),
    "composed": lambda: transformed(UNIT, T.ComposeTransform([T.AffineTransform(p(), 2.0)])),
    "inverted": lambda: transformed(UNIT, T.AffineTransform(p(), 2.0).inv),
    "of a normal": lambda: transformed(
        dist.Normal(0.0, 1.0), T.SigmoidTransform(), T.AffineTransform(0.0, p())
    ),
    "truncated logistic": lambda: transformed(
        dist.Uniform(torch.tensor(0.1), torch.tensor(1.0)), LOGIT, T.AffineTransform(p(), p())
    ),
    "truncated normal": lambda: transformed(
        dist.Uniform(torch.tensor(0.1), torch.tensor(1.0)),
        T.CumulativeDistributionTransform(dist.Normal(p(), p())).inv,
    ),
    "flow of a cube": lambda: transformed(
        UNIT.expand([2]).to_event(1), dist.transforms.affine_autoregressive(2)
    ),
    # Its ends are at infinity, where they do not move. Its path gradient is correct in any case.
    "logistic by hand": lambda: transformed(UNIT, LOGIT, T.AffineTransform(p(), p())),
}
STAYS = {
    "normal": lambda: dist.Normal(p(), p()),
    "beta": lambda: dist.Beta(p(), p()),
    "fixed uniform": lambda: UNIT.expand([3]).to_event(1),
    "weibull": lambda: dist.Weibull(p(), p()),
    "lognormal": lambda: dist.LogNormal(p(), p()),
    "gumbel": lambda: dist.Gumbel(p(), p()),
    "half normal": lambda: dist.HalfNormal(p()),
    "kumaraswamy": lambda: dist.Kumaraswamy(p(), p()),
    "affine of a normal": lambda: transformed(
        dist.Normal(0.0, 1.0), T.AffineTransform(p(), p()), T.ExpTransform()
    ),
    "fixed truncation": lambda: transformed(
        dist.Uniform(torch.tensor(0.1), torch.tensor(1.0)), LOGIT, T.AffineTransform(1.0, 2.0)
    ),
    "fixed shift": lambda: transformed(UNIT, T.AffineTransform(1.0, 2.0)),
    "flow": lambda: transformed(
        dist.Normal(torch.zeros(2), 1.0).to_event(1), dist.transforms.affine_autoregressive(2)
    ),
    "mixture": lambda: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(2)), dist.Normal(torch.zeros(2), p())
    ),
    "sphere": lambda: dist.ProjectedNormal(torch.ones(3, requires_grad=True)),
}


@pytest.mark.parametrize("name", MOVES)
def test_learned_ends_are_found(name):
    assert moves_support(MOVES[name]())


@pytest.mark.parametrize("name", STAYS)
def test_other_parameters_move_no_ends(name):
    assert not moves_support(STAYS[name]())
