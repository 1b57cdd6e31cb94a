"""Draws have the density that they are weighed by, and the gradient of its means."""

import functools
import math
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import TraceIWAE_ELBO
from pyro_mcvae.programs.distributions import patched
from pyro_mcvae.programs.messengers import Minibatch, Recorder, Substitutes
from tests.estimates import assert_mean, gradients
from tests.params import in_turn

MADE = {
    "masked": lambda a: dist.LKJCholesky(3, torch.tensor(a)).mask(True),
    "event": lambda a: dist.LKJCholesky(3, torch.tensor([a, a])).to_event(1),
    "expanded": lambda a: dist.LKJCholesky(3, torch.tensor(a)).expand([2]).to_event(1),
    "correlations": lambda a: dist.LKJ(5, torch.tensor(a)),
}


@pytest.mark.parametrize("name", MADE)
def test_mean_weights_are_one_inside_of_wrappers(name):
    """See test_every_distribution.py for what is not wrapped."""
    p, q = MADE[name](1.0), MADE[name](1.5)
    pyro.set_rng_seed(0)
    x = patched(q).sample((10_000,))
    assert_mean((p.log_prob(x) - q.log_prob(x)).exp(), 1.0)


def test_guides_draw_so():
    def model():
        pyro.sample("c", dist.LKJCholesky(3, torch.tensor(1.0)))

    def guide():
        pyro.sample("c", dist.LKJCholesky(3, torch.tensor(1.5)))

    pyro.set_rng_seed(0)
    elbo = TraceIWAE_ELBO(100)
    weights = torch.tensor([-elbo.loss(model, guide) for _ in range(20)]).exp()
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


ANGLES = {
    "batch": ([1.2, 5.0], [0.9, 3.0], [0.5, 2.0]),
    "two peaks": ([0.5, 1.0], [1.0, 2.0], [-1.5, 2.5]),
    "narrow": ([400.0, 50.0], [100.0, 30.0], [20.0, 0.0]),
}


@pytest.mark.filterwarnings("ignore:SineBivariateVonMises bimodal")
@pytest.mark.parametrize("name", ANGLES)
def test_the_means_of_two_angles(name):
    """By sums on a grid."""
    numbers = [torch.tensor(x, dtype=torch.float64) for x in ANGLES[name]]
    fn = dist.SineBivariateVonMises(torch.tensor([0.3, 3.0]), torch.tensor(-0.2), *numbers)
    grid = torch.arange(400, dtype=torch.float64) * (2 * math.pi / 400) - math.pi
    grid = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 1, 2)
    pyro.set_rng_seed(0)
    drawn, weight = patched(fn).sample((20_000,)), fn.log_prob(grid).softmax(0)
    assert ((drawn >= -math.pi) & (drawn < math.pi)).all()
    for value in (
        lambda x: x.cos(),
        lambda x: x.sin(),
        lambda x: (x[..., 0] - x[..., 1]).cos(),
        lambda x: (2 * x[..., 0] + x[..., 1]).cos(),
    ):
        result = value(grid)
        exact = (weight.reshape(weight.shape + (1,) * (result.dim() - 2)) * result).sum(0)
        assert_mean(value(drawn), exact)


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
    "plain": lambda fn: fn.expand([5000]),
    "event": lambda fn: fn.expand([5000, 1]).to_event(1),
    "masked": lambda fn: fn.expand([5000]).mask(torch.tensor(True)),
    "moved": lambda fn: dist.TransformedDistribution(
        fn.expand([5000]), [dist.transforms.AffineTransform(0.0, 1.0)]
    ),
}


@in_turn(wrap=WRAPPED, shared=[False, True], size=[2, 3])
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
    result = []
    for _ in range(25):
        z = patched(WRAPPED[wrap](kind(*parameters))).rsample()
        result.append(gradient(value(z).mean(), parameters))
    assert_mean(torch.stack(result), gradient(exact, parameters))


@pytest.mark.slow
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
        gradients(TraceIWAE_ELBO(2, gradient_estimator=estimator), programs, 16)["logits"]
        for estimator in ("reparam", "vimco")
    )
    assert_mean((through - score) / 2000, torch.zeros_like(locs[0, 0]))


def test_what_is_right_stays_as_it_is():
    for fn in (dist.Normal(0.0, 1.0), dist.LKJCholesky(2), dist.Beta(1.0, 1.0).expand([3])):
        assert patched(fn) is fn
