"""Densities by the logarithms of draws: right where values are rounded, with two derivatives."""

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import ExpTransform, SigmoidTransform, StickBreakingTransform

from pyro_mcvae.coordinates.coordinate import bijection_of, coordinate_of
from pyro_mcvae.programs.log_values import (
    Logs,
    at_logs,
    leaf_of,
    log_det,
    logs_of,
    pulled,
    pushed,
    value_of,
    with_logs,
)

WIDE = torch.tensor([-300.0, -60.0, -18.0, -2.0, 0.5, 2.0, 18.0, 60.0])
BELOW, LOW = WIDE[WIDE < 3], WIDE[:-3]
PAIRS = torch.cartesian_prod(
    torch.tensor([-80.0, -2.0, 0.5, 70.0]), torch.tensor([-60.0, 1.0, 60.0])
)
# By name: a distribution, made of numbers, and the coordinates of its density.
FAMILIES = {
    "Gamma": (lambda t: dist.Gamma(t(0.05), t(2.0)), BELOW),
    "Chi2": (lambda t: dist.Chi2(t(0.3)), BELOW),
    "Exponential": (lambda t: dist.Exponential(t(0.7)), BELOW),
    "InverseGamma": (lambda t: dist.InverseGamma(t(0.05), t(2.0)), -BELOW),
    "LogNormal": (lambda t: dist.LogNormal(t(0.5), t(9.0)), LOW),
    "Beta": (lambda t: dist.Beta(t(0.05), t(0.2)), WIDE),
    "events": (lambda t: dist.Gamma(t(0.05).expand(1), t(2.0)).to_event(1), BELOW.unsqueeze(-1)),
    "masked": (lambda t: dist.Beta(t(0.05), t(2.0)).mask(torch.tensor(True)), WIDE),
    "RelaxedBernoulli": (lambda t: dist.RelaxedBernoulli(t(0.1), logits=t(0.5)), WIDE),
    "logit normal": (
        lambda t: dist.TransformedDistribution(dist.Normal(t(0.5), t(9.0)), [SigmoidTransform()]),
        WIDE,
    ),
    "Dirichlet": (lambda t: dist.Dirichlet(torch.stack([t(0.5), t(0.05), t(3.0)])), PAIRS),
    "RelaxedOneHotCategorical": (
        lambda t: dist.RelaxedOneHotCategorical(
            t(0.1), logits=torch.stack([t(0.5), t(2.0), t(0.0)])
        ),
        PAIRS,
    ),
    "LogisticNormal": (
        lambda t: dist.LogisticNormal(torch.stack([t(0.5), t(1.0)]), torch.stack([t(5.0), t(9.0)])),
        PAIRS,
    ),
}


def derivatives(make, at, dtype, plain=False):
    """The density of unconstrained coordinates, its slopes and its curvatures."""
    fn = make(lambda v: torch.tensor(v, dtype=dtype))
    at = at.to(dtype).requires_grad_()
    coordinate = coordinate_of(fn, "latent")
    if plain:
        transform = bijection_of(fn)
        value = transform(at)
        jacobian = transform.log_abs_det_jacobian(at, value)
        density = fn.log_prob(value) + jacobian.reshape(len(at), -1).sum(-1)
    else:
        density = coordinate.log_base(at, coordinate.value(at))
    (slope,) = torch.autograd.grad(density.sum(), at, create_graph=True)
    mixed = slope * torch.linspace(1.0, 2.0, at.shape[-1] if at.dim() > 1 else 1, dtype=dtype)
    (curvature,) = torch.autograd.grad(mixed.sum(), at)
    return [t.detach().double() for t in (density, slope, curvature)]


@pytest.mark.parametrize("name", FAMILIES)
def test_densities_near_a_boundary(name):
    """Single precision has the numbers of double precision, near the boundary and far from it."""
    make, at = FAMILIES[name]
    for single, double in zip(
        derivatives(make, at, torch.float32), derivatives(make, at, torch.float64), strict=True
    ):
        assert single.isfinite().all()
        assert torch.allclose(single, double, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_densities_inside_are_those_of_the_distribution(name):
    make, at = FAMILIES[name]
    at = at[(at.abs() < 5).reshape(len(at), -1).all(-1)]
    assert len(at) > 0
    for by_logs, plain in zip(
        derivatives(make, at, torch.float64),
        derivatives(make, at, torch.float64, plain=True),
        strict=True,
    ):
        assert torch.allclose(by_logs, plain, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["Gamma", "Beta", "Dirichlet"])
def test_slopes_are_those_of_the_density(name):
    make, at = FAMILIES[name]
    moved = at.double()
    for i in range(moved.shape[-1] if at.dim() > 1 else 1):
        step = torch.zeros_like(moved)
        step[..., i] = 1e-5
        if at.dim() == 1:
            step = torch.full_like(moved, 1e-5)
        slope = derivatives(make, at, torch.float64)[1]
        ends = [derivatives(make, moved + s, torch.float64)[0] for s in (step, -step)]
        exact = (ends[0] - ends[1]) / 2e-5
        assert torch.allclose(slope[..., i] if at.dim() > 1 else slope, exact, atol=1e-5)


@pytest.mark.parametrize(
    ("transform", "u"),
    [(ExpTransform(), LOW), (SigmoidTransform(), WIDE), (StickBreakingTransform(), PAIRS)],
)
def test_transforms_and_their_inverses(transform, u):
    u = u.float()
    y = pushed(transform, u)
    assert transform.codomain.check(y).all()
    assert torch.allclose(pulled(transform, y), u, rtol=1e-5)
    inside = u.abs().reshape(len(u), -1).amax(-1) < 5
    assert torch.allclose(y[inside], transform(u[inside]))
    exact = transform.log_abs_det_jacobian(u.double(), transform(u.double()))
    if transform.domain.event_dim:
        exact, inside = exact[inside], inside
        assert torch.allclose(log_det(transform, u, y)[inside].double(), exact, rtol=1e-5)
    else:
        assert torch.allclose(log_det(transform, u, y).double(), exact, rtol=1e-5)


def test_logarithms_end_with_a_change_in_place():
    value = value_of(Logs(torch.tensor([-2.0])))
    assert logs_of(value).log == -2
    assert logs_of(value * 1) is None
    value.mul_(2.0)
    assert logs_of(value) is None
    fn = dist.Gamma(1.5, 1.0)
    assert at_logs(fn, value) is fn


def test_a_leaf_has_the_gradient_of_its_logarithms():
    u = torch.tensor([0.2, 0.7], dtype=torch.float64)
    leaf = leaf_of(with_logs(u.clone(), Logs(u.log(), (1 - u).log())))
    logs = logs_of(leaf)
    for log, slope in ((logs.log, 1 / u), (logs.complement, -1 / (1 - u))):
        (gradient,) = torch.autograd.grad(log.sum(), leaf, retain_graph=True)
        assert torch.allclose(gradient, slope)


def test_densities_that_a_class_defines_itself_stay():
    class Doubled(dist.Gamma):
        def log_prob(self, value):
            return 2 * super().log_prob(value)

    value = value_of(Logs(torch.tensor([-2.0])))
    fn = Doubled(1.5, 1.0)
    for wrapped in (fn, fn.to_event(0), fn.expand([2]), fn.mask(torch.tensor(True))):
        plain = 2 * dist.Gamma(1.5, 1.0).log_prob(value)
        assert torch.allclose(at_logs(wrapped, value).log_prob(value), plain)
    own = dist.Gamma(1.5, 1.0)
    own.log_prob = lambda value: torch.zeros(())
    assert at_logs(own, value).log_prob(value) == 0


@pytest.mark.parametrize("logs", [Logs(torch.tensor(0.7)), Logs(torch.tensor([-1.0, -1.0]))])
def test_values_outside_of_a_support_are_errors(logs):
    """Draws of another kind of support: positive ones are no draws of a Beta or Dirichlet."""
    value = value_of(logs)
    fn = dist.Dirichlet(torch.ones(2)) if value.dim() else dist.Beta(2.0, 2.0)
    with pytest.raises(ValueError, match="support"):
        at_logs(fn, value).log_prob(value)


def test_the_distribution_of_the_program_is_not_changed():
    fn = dist.Gamma(0.5, 1.0).to_event(0).mask(torch.tensor(True))
    before = vars(fn).copy(), vars(fn.base_dist).copy()
    value = value_of(Logs(torch.tensor(-60.0)))
    density = at_logs(fn, value)
    assert density is not fn
    assert density.shape() == fn.shape()
    assert (vars(fn), vars(fn.base_dist)) == before
