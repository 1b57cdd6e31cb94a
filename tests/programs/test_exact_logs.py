"""Densities by known logarithms: right where the values are rounded, with two derivatives."""

import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae.coordinates.coordinate import bijection_of, coordinate_of
from pyro_mcvae.programs.exact_logs import ExactLogs, exact_logs

WIDE = torch.tensor([-300.0, -60.0, -18.0, -2.0, 0.5, 2.0, 18.0, 60.0])
ABOVE, LOW = WIDE[WIDE < 3], WIDE[:-3]
PAIRS = torch.cartesian_prod(
    torch.tensor([-80.0, -2.0, 0.5, 70.0]), torch.tensor([-60.0, 1.0, 60.0])
)
# By name: how it is made of numbers, and the coordinates to ask for its density at.
MADE = {
    "Gamma": (lambda t: dist.Gamma(t(0.05), t(2.0)), ABOVE),
    "Chi2": (lambda t: dist.Chi2(t(0.3)), ABOVE),
    "Exponential": (lambda t: dist.Exponential(t(0.7)), ABOVE),
    "InverseGamma": (lambda t: dist.InverseGamma(t(0.05), t(2.0)), -ABOVE),
    "Weibull": (lambda t: dist.Weibull(t(2.0), t(0.3)), ABOVE),
    "FisherSnedecor": (lambda t: dist.FisherSnedecor(t(0.3), t(3.0)), LOW),
    "LogNormal": (lambda t: dist.LogNormal(t(0.5), t(9.0)), LOW),
    "Beta": (lambda t: dist.Beta(t(0.05), t(0.2)), WIDE),
    "Kumaraswamy": (lambda t: dist.Kumaraswamy(t(0.5), t(0.2)), WIDE[1:]),
    "RelaxedBernoulli": (lambda t: dist.RelaxedBernoulli(t(0.1), logits=t(0.5)), WIDE),
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
    "mapped": (
        lambda t: dist.TransformedDistribution(
            dist.Beta(t(0.05), t(0.2)), [dist.transforms.PowerTransform(t(2.0))]
        ),
        WIDE[2:],
    ),
}


def derivatives(make, at, dtype, known=True):
    """The density of unconstrained coordinates, its slopes and its curvatures."""
    fn = make(lambda v: torch.tensor(v, dtype=dtype))
    at = at.to(dtype).requires_grad_()
    if known:
        coordinate = coordinate_of(fn, "latent")
        density = coordinate.log_base(at, coordinate.value(at))
    else:
        transform = bijection_of(fn)
        value = transform(at)
        density = fn.log_prob(value) + transform.log_abs_det_jacobian(at, value)
    (slope,) = torch.autograd.grad(density.sum(), at, create_graph=True)
    mixed = slope * torch.linspace(1.0, 2.0, at.shape[-1] if at.dim() > 1 else 1, dtype=dtype)
    (curvature,) = torch.autograd.grad(mixed.sum(), at)
    return [t.detach().double() for t in (density, slope, curvature)]


@pytest.mark.parametrize("name", MADE)
def test_densities_near_a_boundary(name):
    """Single precision has the numbers of double precision, near the boundary and far from it."""
    make, at = MADE[name]
    for single, double in zip(
        derivatives(make, at, torch.float32), derivatives(make, at, torch.float64), strict=True
    ):
        assert single.isfinite().all()
        assert torch.allclose(single, double, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MADE)
def test_densities_inside_are_those_of_the_distribution(name):
    make, at = MADE[name]
    at = at[(at.abs() < 5).reshape(len(at), -1).all(-1)]
    assert len(at) > 0
    for known, plain in zip(
        derivatives(make, at, torch.float64),
        derivatives(make, at, torch.float64, known=False),
        strict=True,
    ):
        assert torch.allclose(known, plain, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["Gamma", "Beta", "Dirichlet"])
def test_slopes_are_those_of_the_density(name):
    make, at = MADE[name]
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


def test_what_is_known_ends_with_a_change_in_place():
    value = coordinate_of(dist.Gamma(1.0, 1.0)).value(torch.tensor(-2.0))
    with exact_logs(value):
        assert value.log() == -2
        value.mul_(2.0)
        assert torch.allclose(value.log(), torch.tensor(2.0).log() - 2)


def test_derived_values():
    u = torch.tensor([-90.0, -1.0, 40.0], dtype=torch.float32)
    with ExactLogs():
        p = u.sigmoid()
        q = 1 - p
        assert torch.equal(q.log(), torch.nn.functional.logsigmoid(-u))
        assert torch.equal(
            (q[1:].unsqueeze(0) * 3.0).log()[0], q.log()[1:] + torch.tensor(3.0).log()
        )
        assert torch.allclose((p / q).log(), u)
        assert torch.allclose((p**2).log(), 2 * p.log())
        assert torch.allclose((-p).log1p(), q.log())
        assert torch.allclose(torch.stack([p, q]).log().exp().sum(0), torch.ones_like(u))
        assert torch.equal((p + 0.5).log(), (torch.sigmoid(u.clone()) + 0.5).log())
