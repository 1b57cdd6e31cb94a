"""Flows of Pyro: the log determinant is that of the map, or they are refused."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import transforms as flows
from pyro.infer.autoguide import AutoNormal

from pyro_mcvae import TraceIWAE_ELBO, TraceSGVB_ELBO, log_evidence, refine
from tests.estimates import assert_mean

MADE = {
    "affine_autoregressive": lambda: flows.affine_autoregressive(3, [5]),
    "affine_coupling": lambda: flows.affine_coupling(3, [5]),
    "block_autoregressive": lambda: flows.block_autoregressive(3),
    "householder": lambda: flows.householder(3),
    "iterated": lambda: flows.iterated(2, flows.affine_coupling, 3, [5]),
    "leaky_relu": lambda: flows.leaky_relu(),
    "matrix_exponential": lambda: flows.matrix_exponential(3),
    "neural_autoregressive": lambda: flows.neural_autoregressive(3, [5]),
    "permute": lambda: flows.permute(3),
    "planar": lambda: flows.planar(3),
    "polynomial": lambda: flows.polynomial(3, [5]),
    "radial": lambda: flows.radial(3),
    "spline": lambda: flows.spline(3),
    "spline_autoregressive": lambda: flows.spline_autoregressive(3, [5]),
    "spline_coupling": lambda: flows.spline_coupling(3, hidden_dims=[5]),
    "sylvester": lambda: flows.sylvester(3),
}


def moved(flow):
    """Away from where it starts, as training does."""
    if isinstance(flow, torch.nn.Module):
        flow.double()
        for parameter in flow.parameters():
            parameter.data.add_(0.5 * torch.randn_like(parameter))
    return flow


def programs(flow):
    def model():
        pyro.sample("z", dist.Normal(torch.zeros(3).double(), 1.0).to_event(1))

    def guide():
        base = dist.Normal(torch.zeros(3).double(), 1.0).to_event(1)
        pyro.sample("z", dist.TransformedDistribution(base, [flow]))

    return model, guide


@pytest.mark.parametrize("name", MADE)
def test_the_log_determinant_is_that_of_the_map(name):
    pyro.set_rng_seed(0)
    flow = moved(MADE[name]())
    x = torch.randn(20, 3, dtype=torch.float64)
    y = flow(x)
    result = flow.log_abs_det_jacobian(x, y).detach()
    result = result.sum(-1) if result.dim() == 2 else result
    rows = [torch.autograd.functional.jacobian(lambda u: flow(u[None])[0], u) for u in x]
    error = (torch.linalg.slogdet(torch.stack(rows)).logabsdet - result).abs().max()
    # Some are approximate, by the terms of a series.
    assert (error < 1e-3) == (name != "sylvester")


def test_a_flow_with_another_log_determinant_is_refused():
    flow = flows.ComposeTransform([flows.AffineTransform(0.0, 2.0), flows.sylvester(3).double()])
    model, guide = programs(flow)
    for evaluator in (TraceSGVB_ELBO().loss, TraceIWAE_ELBO(3).loss, log_evidence):
        with pytest.raises(ValueError, match=r"site 'z' of the guide.*Sylvester\(3\).*planar"):
            evaluator(model, guide)


def test_batch_normalization_draws_in_evaluation_mode():
    flow = flows.batchnorm(3).double()
    flow.moving_variance.copy_(torch.tensor([0.5, 1.0, 4.0]))
    model, guide = programs(flow)
    with pytest.raises(ValueError, match=r"site 'z' of the guide.*BatchNorm\(3\).*eval\(\)"):
        TraceIWAE_ELBO(3).loss(model, guide)
    flow.eval()
    pyro.set_rng_seed(0)
    loss = TraceIWAE_ELBO(100)
    weights = torch.tensor([-loss.loss(model, guide) for _ in range(12)]).exp()
    assert_mean(weights, 1.0)


def test_one_dim_is_right():
    flow = moved(flows.Sylvester(1))
    x = torch.randn(20, 1, dtype=torch.float64, requires_grad=True)
    y = flow(x)
    slope = torch.autograd.grad(y.sum(), x, retain_graph=True)[0].squeeze(-1)
    assert torch.allclose(slope.log(), flow.log_abs_det_jacobian(x, y), atol=1e-6)


def test_values_outside_the_declared_support_are_refused():
    fn = dist.TransformedDistribution(dist.Normal(0.0, 1.0), flows.ELUTransform())
    assert fn.support.check(fn.sample((1000,))).double().mean() < 0.6

    def model():
        pyro.sample("z", fn)

    guide = AutoNormal(model)
    for evaluate in (lambda: TraceIWAE_ELBO(3).loss(model, guide), lambda: refine(model)):
        with pytest.raises(ValueError, match=r"site 'z' of the model.*ELUTransform.*below 0"):
            evaluate()
