"""Draws have the density that they are weighed by, and the gradient of its means."""

import functools
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import TraceIWAE_ELBO
from pyro_mcvae.programs.mended_draws import mended
from pyro_mcvae.programs.messengers import Recorder, Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from tests.estimates import assert_mean, gradients

MADE = {
    "plain": lambda a, size: dist.LKJCholesky(size, torch.tensor(a)),
    "masked": lambda a, size: dist.LKJCholesky(size, torch.tensor(a)).mask(True),
    "event": lambda a, size: dist.LKJCholesky(size, torch.tensor([a, a])).to_event(1),
    "expanded": lambda a, size: dist.LKJCholesky(size, torch.tensor(a)).expand([2]).to_event(1),
    "correlations": lambda a, size: dist.LKJ(size, torch.tensor(a)),
}


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", MADE)
def test_mean_weights_are_one(name, size):
    p, q = MADE[name](1.0, size), MADE[name](1.5, size)
    pyro.set_rng_seed(0)
    x = mended(q).sample((20_000,))
    assert_mean((p.log_prob(x) - q.log_prob(x)).exp(), 1.0)


def test_guides_draw_so():
    def model():
        pyro.sample("c", dist.LKJCholesky(3, torch.tensor(1.0)))

    def guide():
        pyro.sample("c", dist.LKJCholesky(3, torch.tensor(1.5)))

    pyro.set_rng_seed(0)
    elbo = TraceIWAE_ELBO(100)
    weights = torch.tensor([-elbo.loss(model, guide) for _ in range(50)]).exp()
    assert_mean(weights, 1.0)


def test_priors_draw_so():
    """All correlations of an LKJ distribution are alike: their variance is 1 / (2 a + size - 1)."""

    def model():
        with pyro.plate("draws", 20_000):
            pyro.sample("c", dist.LKJCholesky(4, torch.tensor(1.5)))

    pyro.set_rng_seed(0)
    with Recorder(Substitutes(Minibatch())) as recorder:
        model()
    factor = recorder.trace.nodes["c"]["value"]
    square = (factor @ factor.mT).square()
    for i, j in [(1, 0), (2, 0), (2, 1), (3, 2)]:
        assert_mean(square[:, i, j], 1 / 6)


def mixture(shared, size, num_components=3):
    """Locations, scales and logits of normal distributions, and their mixture."""
    generator = torch.Generator().manual_seed(size)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    locs = draw(num_components, size) + 0.5
    scales = 0.4 + draw(*([] if shared else [num_components]), size).square()
    kind = dist.MixtureOfDiagNormalsSharedCovariance if shared else dist.MixtureOfDiagNormals
    return [t.requires_grad_() for t in (locs, scales, draw(num_components))], kind


def gradient(outputs, inputs):
    return torch.cat([g.flatten() for g in torch.autograd.grad(outputs, inputs)])


WRAPPED = {
    "plain": lambda fn: fn.expand([20_000]),
    "event": lambda fn: fn.expand([20_000, 1]).to_event(1),
    "masked": lambda fn: fn.expand([20_000]).mask(torch.tensor(True)),
    "moved": lambda fn: dist.TransformedDistribution(
        fn.expand([20_000]), [dist.transforms.AffineTransform(0.0, 1.0)]
    ),
}


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_the_gradient_of_a_mean_over_a_mixture(shared, size, wrap):
    """Of a quadratic form, whose mean is known."""
    parameters, kind = mixture(shared, size)
    locs, scales, logits = parameters
    form = torch.arange(1.0, size * size + 1, dtype=torch.float64).reshape(size, size)
    form = form + form.mT

    def value(z):
        return ((z @ form) * z).sum(-1)

    exact = logits.softmax(-1) @ (value(locs) + (form.diagonal() * scales.square()).sum(-1))
    pyro.set_rng_seed(0)
    found = []
    for _ in range(40):
        z = mended(WRAPPED[wrap](kind(*parameters))).rsample()
        found.append(gradient(value(z).mean(), parameters))
    assert_mean(torch.stack(found), gradient(exact, parameters))


def test_guides_draw_mixtures_so():
    """The ELBO's gradient through the draws is that of their score function."""
    (locs, scales, _), kind = mixture(False, 2)

    def model():
        with pyro.plate("data", 2000):
            pyro.sample("z", dist.Normal(torch.zeros_like(locs[0]), 1.0).to_event(1))

    def guide():
        logits = pyro.param("logits", torch.tensor([0.3, 0.0, -0.5], dtype=torch.float64))
        with pyro.plate("data", 2000):
            pyro.sample("z", kind(locs.detach(), scales.detach(), logits))

    values = {"logits": torch.zeros(3)}
    programs = SimpleNamespace(model=model, guide=guide, values=values)
    pyro.set_rng_seed(0)
    through, score = (
        gradients(TraceIWAE_ELBO(2, gradient_estimator=estimator), programs, 30)["logits"]
        for estimator in ("reparam", "vimco")
    )
    assert_mean((through - score) / 2000, torch.zeros_like(locs[0, 0]))


def test_what_is_right_stays_as_it_is():
    for fn in (dist.Normal(0.0, 1.0), dist.LKJCholesky(2), dist.Beta(1.0, 1.0).expand([3])):
        assert mended(fn) is fn
