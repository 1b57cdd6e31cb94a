"""Coordinates of a draw: densities by change of variables, draws, and gradients of the map."""

import functools
import math

import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.torch_distribution import ExpandedDistribution
from scipy import stats
from torch.distributions import biject_to
from torch.distributions.utils import _standard_normal

from pyro_mcvae.coordinates import noise as module
from pyro_mcvae.coordinates.coordinate import (
    NoiseCoordinate,
    UnconstrainedCoordinate,
    coordinate_of,
)
from pyro_mcvae.coordinates.noise import register_noise
from pyro_mcvae.programs.types import NoCoordinateError


def seeded(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def loc():
    return seeded(3).requires_grad_()


def scale(*shape):
    return (0.5 + seeded(*(shape or (3,)), seed=1) ** 2).requires_grad_()


def scale_tril(size):
    return (seeded(3, size, size, seed=2).tril() * 0.4 + torch.eye(size)).requires_grad_()


@functools.cache
def flow(kind):
    """A learned transformation of two numbers, moved away from its start."""
    transform = getattr(dist.transforms, kind)(2, [4])
    for i, parameter in enumerate(transform.parameters()):
        parameter.data.add_(0.3 * seeded(*parameter.shape, seed=i))
    return transform


def event(fn):
    """The same distribution with its last batch dim as an event."""
    return fn.to_event(1)


def vector(cls=dist.Normal):
    return cls(seeded(3, 2), scale(3, 2))


def mapped(prior):
    """A prior, shifted and scaled on the real line, as AutoRegressiveMessenger makes guides."""
    to_support = biject_to(prior.support)
    parts = [to_support.inv, dist.transforms.AffineTransform(0.3, scale(1)), to_support]
    return dist.TransformedDistribution(prior, [p.with_cache() for p in parts])


# Distributions of batch shape [3] with explicit noise.
NOISE = {
    "normal": lambda: dist.Normal(loc(), scale()),
    "cauchy": lambda: dist.Cauchy(loc(), scale()),
    "student": lambda: dist.StudentT(torch.tensor(4.0), loc(), scale()),
    "uniform": lambda: dist.Uniform(loc(), loc() + scale()),
    "lognormal": lambda: dist.LogNormal(loc(), scale()),
    "gumbel": lambda: dist.Gumbel(loc(), scale()),
    "sigmoid-normal": lambda: dist.TransformedDistribution(
        dist.Normal(loc(), scale()), [dist.transforms.SigmoidTransform()]
    ),
    "multivariate": lambda: dist.MultivariateNormal(seeded(3, 2), scale_tril=scale_tril(2)),
    "low-rank": lambda: dist.LowRankMultivariateNormal(
        seeded(3, 4), seeded(3, 4, 2, seed=3).requires_grad_(), scale(3, 4)
    ),
    "independent": lambda: event(vector()),
    "broadcast": lambda: dist.Normal(seeded(3, 1), scale(2)).to_event(1),
    "expanded": lambda: dist.Normal(torch.tensor(0.3), scale(1)).expand([3]),
    "expanded-wrapper": lambda: ExpandedDistribution(dist.Normal(0.3, scale(1)), [3]),
    "coupling": lambda: dist.TransformedDistribution(event(vector()), [flow("affine_coupling")]),
    "flow-on-a-batch": lambda: dist.TransformedDistribution(
        vector(), [flow("affine_coupling"), dist.transforms.ExpTransform()]
    ),
    "stick-breaking": lambda: dist.TransformedDistribution(
        event(vector()), [dist.transforms.StickBreakingTransform()]
    ),
}
# Of which PyTorch's support is too large: less comes in than the last transform could take.
PUSHED = {
    "gamma-flow": lambda: dist.TransformedDistribution(
        dist.Gamma(scale(), scale()), [dist.transforms.AffineTransform(0.0, 2.0)]
    ),
    "scaled-beta": lambda: dist.TransformedDistribution(
        dist.Beta(1 + scale(), 1 + scale()), [dist.transforms.AffineTransform(loc(), -scale())]
    ),
    "above-one": lambda: dist.TransformedDistribution(
        dist.Gamma(1 + scale(), scale()), [dist.transforms.ExpTransform()]
    ),
    "mapped-simplex": lambda: mapped(dist.Dirichlet(1 + scale(3, 4))),
}
# Those and others have no explicit noise.
UNCONSTRAINED = {
    **PUSHED,
    "gamma": lambda: dist.Gamma(scale(), scale()),
    "dirichlet": lambda: dist.Dirichlet(scale(3, 4)),
    "lkj": lambda: dist.LKJCholesky(3, scale()),
    "relaxed": lambda: dist.RelaxedBernoulli(torch.tensor(0.5), logits=loc()),
    "von-mises": lambda: dist.VonMises(loc(), scale()),
    "student-learned": lambda: dist.StudentT((3 + scale()).detach().requires_grad_(), loc()),
    "independent-dirichlet": lambda: event(dist.Dirichlet(1 + scale(3, 2, 3))),
}
DISCRETE = {
    "bernoulli": lambda: dist.Bernoulli(logits=loc()),
    "categorical": lambda: dist.Categorical(logits=seeded(3, 4)),
    "independent-bernoulli": lambda: event(dist.Bernoulli(logits=seeded(3, 2))),
    "masked": lambda: dist.Bernoulli(logits=loc()).mask(torch.tensor([True, False, True])),
}
CONTINUOUS = {**NOISE, **UNCONSTRAINED}


def cases(table):
    return pytest.mark.parametrize("make", list(table.values()), ids=list(table))


@cases(CONTINUOUS)
@pytest.mark.parametrize("kind", ["noise", "latent"])
def test_wherever_a_coordinate_moves_it_is_a_value_that_could_be_drawn(make, kind):
    fn = make()
    coordinate = coordinate_of(fn, kind)
    at = 2.0 * seeded(50, 3, *coordinate.event_shape)
    value = coordinate.value(at)
    assert torch.isfinite(fn.log_prob(value)).all()
    assert torch.isfinite(coordinate.log_base(at, value)).all()


# Absolute values, and one datum's value of more noise numbers than it has entries itself.
NOT_ONE_TO_ONE = {"HalfNormal", "HalfCauchy", "LowRankMultivariateNormal"}


@cases({**CONTINUOUS, **DISCRETE})
@pytest.mark.parametrize("kind", ["noise", "latent"])
def test_the_coordinate_of_a_value_makes_that_value(make, kind):
    fn = make()
    coordinate = coordinate_of(fn, kind)
    value = fn.sample()
    try:
        at = coordinate.at(value)
    except NoCoordinateError:
        innermost = fn
        while not type(innermost).__name__.startswith(("Half", "LowRank")):
            innermost = innermost.base_dist
        assert kind == "noise"
        assert type(innermost).__name__ in NOT_ONE_TO_ONE
        return
    assert at.shape == fn.batch_shape + coordinate.event_shape
    assert torch.allclose(coordinate.value(at), value, atol=1e-5)


@cases({**CONTINUOUS, **DISCRETE})
@pytest.mark.parametrize("kind", ["noise", "latent"])
def test_one_coordinate_serves_further_leading_dimensions(make, kind):
    fn = make()
    coordinate = coordinate_of(fn, kind)
    drawn = [coordinate.draw() for _ in range(4)]
    single = [coordinate.value(at) for at in drawn]
    together = coordinate.value(torch.stack(drawn))
    assert torch.allclose(together, torch.stack(single))
    log_base = coordinate.log_base(torch.stack(drawn), together)
    expected = [coordinate.log_base(a, v) for a, v in zip(drawn, single, strict=True)]
    assert torch.allclose(log_base, torch.stack(expected), atol=1e-6)


def independent_entries(fn, value):
    """As many entries of a value as it has degrees of freedom."""
    support = fn.support
    while isinstance(support, dist.constraints.independent):
        support = support.base_constraint
    if support is dist.constraints.corr_cholesky:
        rows, columns = torch.tril_indices(*fn.event_shape, -1)
        value = value[..., rows, columns]
    elif support is dist.constraints.simplex:
        value = value[..., :-1]
    return value.reshape(3, -1)


@cases({k: v for k, v in CONTINUOUS.items() if k != "low-rank"})
@pytest.mark.parametrize("kind", ["noise", "latent"])
def test_density_changes_by_the_jacobian(make, kind):
    fn = make()
    coordinate = coordinate_of(fn, kind)
    at = coordinate.draw()

    def entries(c):
        return independent_entries(fn, coordinate.value(c))

    # Batch elements do not mix, so the Jacobian of their sum is the stack of their Jacobians.
    jacobian = torch.autograd.functional.jacobian(lambda c: entries(c).sum(0), at)
    jacobian = jacobian.reshape(-1, 3, coordinate.event_shape.numel()).transpose(0, 1)
    value = coordinate.value(at)
    log_base = coordinate.log_base(at, value)
    expected = log_base - torch.linalg.slogdet(jacobian).logabsdet
    assert torch.allclose(fn.log_prob(value.clone()), expected, rtol=1e-5, atol=1e-7)


@cases({**CONTINUOUS, **DISCRETE})
@pytest.mark.parametrize("kind", ["noise", "latent"])
def test_draws_follow_the_distribution(make, kind):
    count = 2000
    fn = make()
    fn_draws = fn.sample((count,)).reshape(count, -1)
    coordinate = coordinate_of(fn.expand((count, 3)), kind)
    draws = coordinate.value(coordinate.draw()).detach().reshape(count, -1)
    statistics = [(draws[:, i], fn_draws[:, i]) for i in range(draws.shape[1])]
    # Rounded, as the entries of a simplex sum to one.
    sums = [d.double().sum(1).round(decimals=5) for d in (draws, fn_draws)]
    statistics += [(sums[0], sums[1]), (draws.prod(1), fn_draws.prod(1))]
    tests = [stats.ks_2samp(a.numpy(), b.numpy(), method="asymp") for a, b in statistics]
    assert min(t.pvalue for t in tests) * len(tests) > 1e-3


def parameters_of(value):
    """The leaves that a value was computed from."""
    seen, leaves, stack = set(), [], [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        stack.extend(child for child, _ in node.next_functions)
    return leaves


def gradients(value, leaves):
    weights = torch.linspace(-1.0, 2.0, value.numel()).reshape(value.shape)
    return torch.autograd.grad((weights * value).sum(), leaves, allow_unused=True)


def assert_same_gradients(value, other):
    leaves = parameters_of(other)
    assert leaves
    assert set(map(id, leaves)) == set(map(id, parameters_of(value)))
    for a, b in zip(gradients(value, leaves), gradients(other, leaves), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-9)


GAUSSIAN = [
    *("normal", "lognormal", "sigmoid-normal", "multivariate", "independent", "broadcast"),
    *("expanded", "coupling", "flow-on-a-batch", "stick-breaking"),
]


@pytest.mark.parametrize("name", GAUSSIAN)
def test_at_the_same_noise_value_and_gradient_are_those_of_rsample(name):
    fn = NOISE[name]()
    coordinate = coordinate_of(fn)
    torch.manual_seed(3)
    expected = fn.rsample()
    torch.manual_seed(3)
    at = _standard_normal((3, *coordinate.event_shape), expected.dtype, expected.device)
    value = coordinate.value(at)
    assert torch.allclose(value, expected)
    assert_same_gradients(value, expected)


@pytest.mark.parametrize("name", ["normal", "cauchy", "student", "uniform", "gumbel"])
def test_at_the_same_value_the_gradient_is_that_of_rsample(name):
    # In one dimension any rising map from noise has this gradient.
    fn = NOISE[name]()
    coordinate = coordinate_of(fn)
    expected = fn.rsample()
    low, high = torch.full((3,), -1e4), torch.full((3,), 1e4)
    for _ in range(80):
        middle = (low + high) / 2
        above = coordinate.value(middle) > expected
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    value = coordinate.value(middle.detach())
    assert torch.allclose(value, expected, atol=1e-9)
    assert_same_gradients(value, expected)


@cases(UNCONSTRAINED)
def test_values_and_densities_of_implicit_draws_pass_gradients(make):
    fn = make()
    coordinate = coordinate_of(fn)
    at = coordinate.draw().requires_grad_()
    value = coordinate.value(at)
    log_base = coordinate.log_base(at, value)
    (grad,) = torch.autograd.grad(log_base.sum(), at, create_graph=True)
    assert torch.isfinite(grad).all()
    for i in range(min(3, at.numel())):
        step = torch.zeros(at.numel())
        step[i] = 1e-5
        step = step.reshape(at.shape)
        ends = [coordinate.log_base(a, coordinate.value(a)).sum() for a in (at + step, at - step)]
        assert torch.allclose(grad[step != 0], (ends[0] - ends[1]) / 2e-5, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, -0.5), (1000.0, 1001.0)])
def test_far_noise_stays_strictly_inside_of_an_interval(low, high, dtype):
    fn = dist.Uniform(torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype))
    coordinate = coordinate_of(fn.expand([6]))
    at = torch.tensor([-60.0, -20.0, -7.0, 7.0, 20.0, 60.0], dtype=dtype, requires_grad=True)
    value = coordinate.value(at)
    assert (value > low).all()
    assert (value < high).all()
    assert torch.isfinite(fn.log_prob(value)).all()
    assert torch.isfinite(torch.autograd.grad(value.sum(), at)[0]).all()


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 11.0), (torch.float64, 37.0)])
@pytest.mark.parametrize("name", ["low end", "high end", "gumbel"])
def test_far_noise_is_as_far_as_its_probability(name, dtype, far):
    """P(draw < T(eps)) = P(noise < eps), also where 1 minus it is rounded to 1."""
    zero, one = torch.zeros(6, dtype=dtype), torch.ones(6, dtype=dtype)
    at = torch.tensor([-far, -far / 2, -5.6, -3.0, 0.0, 2.0], dtype=dtype)
    expected = torch.special.log_ndtr(at)
    if name == "gumbel":
        result = -(-coordinate_of(dist.Gumbel(zero, one)).value(at)).exp()
    elif name == "low end":
        result = coordinate_of(dist.Uniform(zero, one)).value(at).log()
    else:
        result = (-coordinate_of(dist.Uniform(-one, zero)).value(-at)).log()
    assert torch.allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["noise", "latent"])
@cases(
    {
        "normal": lambda: dist.Normal(loc(), scale()),
        "gamma": lambda: dist.Gamma(scale(), scale()),
    }
)
def test_a_mask_does_not_change_what_is_drawn_nor_its_density(make, kind):
    # The mask takes a site's log q out of the weight; a chain still moves what is drawn.
    fn = make()
    masked = fn.mask(torch.tensor([True, False, True]))
    plain, coordinate = coordinate_of(fn, kind), coordinate_of(masked, kind)
    assert type(plain) is type(coordinate)
    at = plain.draw()
    value = plain.value(at)
    assert torch.equal(coordinate.value(at), value)
    assert torch.allclose(coordinate.log_base(at, value), plain.log_base(at, value))


class Skewed(dist.Normal):
    """A Normal by inheritance only."""

    def rsample(self, sample_shape=()):
        shape = self._extended_shape(torch.Size(sample_shape))
        return self.loc + self.scale * torch.empty(shape).exponential_()

    def sample(self, sample_shape=()):
        return self.rsample(sample_shape).detach()


class Shifted(dist.TransformedDistribution):
    def rsample(self, sample_shape=()):
        return super().rsample(sample_shape) + 1.0

    def sample(self, sample_shape=()):
        return super().sample(sample_shape) + 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Skewed(torch.zeros(3), torch.ones(3)),
        lambda: Shifted(dist.Normal(torch.zeros(3), 1.0), [dist.transforms.ExpTransform()]),
        lambda: Skewed(torch.zeros(3, 2), torch.ones(3, 2)).to_event(1),
        lambda: dist.TransformedDistribution(
            Skewed(torch.zeros(3), torch.ones(3)), [dist.transforms.ExpTransform()]
        ),
    ],
    ids=["subclass", "transformed-subclass", "independent", "transformed"],
)
def test_subclasses_that_draw_in_another_way_are_not_taken_for_their_parents(make):
    fn = make()
    coordinate = coordinate_of(fn)
    assert isinstance(coordinate, UnconstrainedCoordinate)
    torch.manual_seed(1)
    expected = fn.sample()
    torch.manual_seed(1)
    assert torch.allclose(coordinate.value(coordinate.draw()), expected)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(module, "_REGISTRY", dict(module._REGISTRY))


@pytest.mark.usefixtures("registry")
def test_registered_noise_is_used_also_inside_of_other_distributions():
    def make():
        return dist.Exponential(scale())

    assert isinstance(coordinate_of(make()), UnconstrainedCoordinate)

    @register_noise(dist.Exponential, torch.distributions.Exponential)
    def exponential(fn):
        standard = dist.Normal(torch.zeros(()), torch.ones(()))
        return standard, fn.event_shape, lambda eps: -torch.special.log_ndtr(-eps) / fn.rate

    for fn in (make(), event(dist.Exponential(scale(3, 2))), dist.Weibull(scale(), scale())):
        test_density_changes_by_the_jacobian(lambda fn=fn: fn, "noise")
        assert isinstance(coordinate_of(fn), NoiseCoordinate)
    fn = make()
    value = coordinate_of(fn).value(torch.tensor([-0.5, 0.1, 2.0]))
    assert torch.allclose(fn.cdf(value), dist.Normal(0.0, 1.0).cdf(torch.tensor([-0.5, 0.1, 2.0])))


@pytest.mark.parametrize("wrap", ["plain", "event", "expanded", "masked"])
def test_angles_go_round(wrap):
    fn = dist.VonMises(torch.tensor([0.5, 1.0, -2.0]), torch.tensor(2.0))
    fn = {
        "plain": lambda: fn,
        "event": lambda: fn.to_event(1),
        "expanded": lambda: fn.expand([2, 3]),
        "masked": lambda: fn.mask(torch.tensor([True, False, True])),
    }[wrap]()
    coordinate = coordinate_of(fn)
    at = coordinate.draw()
    for turns in (0, 1, -3):
        moved = at + 2 * math.pi * turns
        value = coordinate.value(moved)
        assert torch.allclose(value, at)
        assert (value.abs() <= math.pi).all()
        assert torch.allclose(coordinate.log_base(moved, value), coordinate.log_base(at, at))
