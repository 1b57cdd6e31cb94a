"""Smoothed kinks: exact values and gradients, drifts that can be differentiated, under vmap too."""

import pyro.distributions as dist
import pytest
import torch
from torch.nn import functional

from pyro_mcvae.coordinates.smoothness import CANCELLING
from pyro_mcvae.ops.smoothing import KinkFinder, smoothed, smoothed_gradients
from tests.cases import every

# Each way in which an operation is called, and each sum of hinges.
OPERATIONS = {
    "relu": torch.relu,
    "relu_": lambda x: (x + 0).relu_(),
    "in place": lambda x: functional.leaky_relu(x + 0, 0.2, True),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.3),
    "prelu": lambda x: functional.prelu(x, torch.full((4,), 0.3)),
    "relu6": lambda x: functional.relu6(4 * x),
    "hardtanh": functional.hardtanh,
    "elu": lambda x: functional.elu(x, 0.4),
    "selu": functional.selu,
    "abs": abs,
    "clamp": lambda x: x.clamp(-0.2, max=0.5),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_max": lambda x: torch.clamp_max(x, 0.1),
    "maximum": lambda x: torch.maximum(x, 0.5 - x),
    "minimum": lambda x: torch.minimum(x, 0.5 - x),
    "amax": lambda x: x.amax(-1, keepdim=True),
    "max": lambda x: x.max(-1)[0],
    "min": lambda x: torch.min(x, -1).values,
    "max of two": lambda x: torch.max(x, x.flip(-1)),
}
operations = pytest.mark.parametrize("name", OPERATIONS)


def function(name):
    """Nonlinear on both sides of the operation."""
    return lambda z: OPERATIONS[name](z + 0.1 * z**2).sin().sum(-1)


def drift(f, z, widths):
    """The smoothed gradient, with its graph."""
    with smoothed(widths):
        value = f(z)
    with smoothed_gradients():
        return torch.autograd.grad(value.sum(), z, create_graph=True)[0]


def kinks(f, z):
    finder = KinkFinder()
    with finder:
        value = f(z)
    finder.collect(value, [z])
    return finder.widths()


@operations
def test_values_and_gradients_stay(name):
    f, z = function(name), torch.randn(500, 4, requires_grad=True)
    widths = kinks(f, z)
    assert widths
    with smoothed(widths):
        result = f(z)
    assert torch.equal(result, f(z))
    pairs = (torch.autograd.grad(v.sum(), z)[0] for v in (result, f(z)))
    assert torch.allclose(*pairs, atol=1e-12)


@pytest.mark.parametrize("name", every(2, OPERATIONS))
def test_the_integral_of_its_derivative_is_the_change_of_a_drift(name):
    """Which for the gradient itself it is not."""
    f, z = function(name), torch.randn(100, 4, requires_grad=True)
    widths, v = kinks(f, z), 0.5 * torch.randn(100, 4)
    missing = {}
    for smooths in (True, False):
        slopes, ends, count = [], [], 50
        for t in torch.linspace(0, 1, count + 1):
            at = (z + t * v).detach().requires_grad_()
            slope = (drift(f, at, widths if smooths else {}) * v).sum(-1)
            ends.append(slope.detach())
            slopes.append((torch.autograd.grad(slope.sum(), at)[0] * v).sum(-1))
        integral = torch.trapezoid(torch.stack(slopes), dx=1 / count, dim=0)
        missing[smooths] = (ends[-1] - ends[0] - integral).abs().max()
    assert missing[True] < 0.2 * missing[False]


@operations
def test_far_from_its_kinks_a_drift_is_the_gradient(name):
    f, z = function(name), torch.randn(500, 4, requires_grad=True)
    widths = {place: tuple(w and w / 1e4 for w in result) for place, result in kinks(f, z).items()}
    exact = torch.autograd.grad(f(z).sum(), z)[0]
    near = (drift(f, z, widths) - exact).abs().amax(-1) > 1e-6
    assert near.double().mean() < 0.05


@operations
def test_one_by_one_under_vmap(name):
    if name == "prelu":
        pytest.skip("PyTorch does not map it in this way")
    f, z = function(name), torch.randn(20, 4, requires_grad=True)
    widths = kinks(torch.vmap(f), z)
    assert widths.keys() == kinks(f, z).keys()
    expected = drift(f, z, widths)
    result = drift(torch.vmap(f), z, widths)
    assert torch.allclose(result, expected)
    u = torch.randn(20, 4)
    pairs = (torch.autograd.grad((d * u).sum(), z)[0] for d in (result, expected))
    assert torch.allclose(*pairs)


@pytest.mark.parametrize(
    "f",
    [
        lambda z: functional.elu(z).sum(-1),
        lambda z: torch.relu(z.detach()).sum(-1) + z.sum(-1),
        lambda z: torch.relu(z.square() + 0.1).sum(-1),
        lambda z: z.sum(-1) + 0 * torch.relu(z).sum(-1),
    ],
    ids=["smooth", "of a constant", "one side", "without effect"],
)
def test_what_is_no_kink_is_left_alone(f):
    assert not kinks(f, torch.randn(50, 4, requires_grad=True))


def test_a_bound_that_hardly_binds_hardly_changes_anything():
    """As of a probability that is kept from 0."""
    z = torch.cat([torch.rand(100), torch.tensor([-1e-5])]).requires_grad_()
    ((width, none),) = kinks(lambda z: z.clamp(1e-6, 2.0), z).values()
    assert width < 1e-5
    assert none is None


def test_drifts_end_with_their_block():
    z = torch.randn(5, requires_grad=True)
    with smoothed(kinks(torch.relu, z)):
        value = torch.relu(z)
    with pytest.raises(RuntimeError), smoothed_gradients():
        raise RuntimeError
    (grad,) = torch.autograd.grad(value.sum(), z)
    assert torch.equal(grad, (z > 0).to(grad))


DENSITIES = {
    "Laplace": lambda z: dist.Laplace(z, z.exp()),
    "AsymmetricLaplace": lambda z: dist.AsymmetricLaplace(z, z.exp(), z.exp()),
    "SoftLaplace": lambda z: dist.SoftLaplace(z, z.exp()),
    "Normal": lambda z: dist.Normal(z, z.exp()),
    "StudentT": lambda z: dist.StudentT(3.0, z, z.exp()),
    "HalfCauchy": lambda z: dist.HalfCauchy(z.exp()),
    "VonMises": lambda z: dist.VonMises(z, z.exp()),
    "Gumbel": lambda z: dist.Gumbel(z, z.exp()),
    "Uniform": lambda z: dist.Uniform(z - 5, z + 5),
    "Bernoulli": lambda z: dist.Bernoulli(z.sigmoid()),
    "Binomial": lambda z: dist.Binomial(5, z.sigmoid()),
    "Binomial of logits": lambda z: dist.Binomial(5, logits=z),
    "NegativeBinomial": lambda z: dist.NegativeBinomial(5, logits=z),
    "ZeroInflatedPoisson": lambda z: dist.ZeroInflatedPoisson(z.exp(), gate_logits=z),
    "ContinuousBernoulli": lambda z: dist.ContinuousBernoulli(z.sigmoid()),
    "ContinuousBernoulli of logits": lambda z: dist.ContinuousBernoulli(logits=z),
    "RelaxedBernoulli": lambda z: dist.RelaxedBernoulli(torch.tensor(0.5), logits=z),
    "Geometric": lambda z: dist.Geometric(logits=z),
    "BetaBinomial": lambda z: dist.BetaBinomial(z.exp(), z.exp() + 1, 5),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_densities_have_kinks_where_their_derivative_jumps(name):
    """Those of PyTorch and Pyro; the kinks of some densities cancel."""
    z = torch.linspace(-2.0, 2.0, 41, dtype=torch.float64, requires_grad=True)
    finder = KinkFinder(CANCELLING)
    with finder:
        fn = DENSITIES[name](z)
        value = fn.log_prob(torch.tensor(1.0 if fn.support.is_discrete else 0.3).double())
    finder.collect(value, [z])
    assert bool(finder.widths()) == (name in ("Laplace", "AsymmetricLaplace"))
