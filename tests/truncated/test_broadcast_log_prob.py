"""Lean log densities are the distributions' own: values, gradients, refusals."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_mcvae.ops.compat import PUBLIC_ONLY
from pyro_mcvae.programs.terms import model_term, scored
from pyro_mcvae.truncated.broadcast_log_prob import broadcast_log_prob, broadcast_term

_MASK = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 1]]).bool()


def _parameter(*shape):
    torch.manual_seed(len(shape))
    return torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))


def _normals():
    loc, rows, one = _parameter(5, 4, 3), _parameter(3), _parameter()
    yield "one scale", [loc, one], lambda: dist.Normal(loc, one.exp()).to_event(1)
    yield "two event dims", [loc, one], lambda: dist.Normal(loc, one.exp()).to_event(2)
    yield "twice declared", [loc], lambda: dist.Normal(loc, 2.0).to_event(1).to_event(1)
    yield "expanded", [rows], lambda: dist.Normal(rows, 1.0).to_event(1).expand([5, 4])
    both = lambda: dist.Normal(one, one.exp()).expand([5, 4, 3]).to_event(1)  # noqa: E731
    yield "scalar and expanded", [one], both
    yield "one event", [rows, one], lambda: dist.Normal(rows, one.exp()).to_event(1)
    yield "masked", [loc, one], lambda: dist.Normal(loc, one.exp()).mask(_MASK).to_event(1)
    yield "masked matrices", [loc, one], lambda: dist.Normal(loc, one.exp()).mask(_MASK).to_event(2)
    yield "a masked row", [loc], lambda: dist.Normal(loc, 2.0).mask(_MASK[0]).to_event(1)
    column = _MASK[:, :1]
    yield "a masked column", [loc], lambda: dist.Normal(loc, 2.0).mask(column).to_event(1)
    data = dist.Normal(rows, 2.0).expand([4, 3]).mask(_MASK).to_event(1)
    yield "masked, expanded", [rows], lambda: data.expand([5, 4])


def _bernoullis():
    rows, two = _parameter(3), _parameter(2, 3)
    yield "logits", [rows], lambda: dist.Bernoulli(logits=rows).to_event(1).expand([5, 4])
    yield "probs", [rows], lambda: dist.Bernoulli(rows.sigmoid()).to_event(1).expand([5, 4])
    yield "a matrix", [two], lambda: dist.Bernoulli(logits=two.flatten()).expand([5, 6]).to_event(1)
    yield "sparse", [rows], lambda: dist.Bernoulli(logits=-rows.exp()).to_event(1).expand([5, 4])


CASES = [
    pytest.param(*case[1:], id=f"{name}: {case[0]}")
    for name, cases in (("normal", _normals()), ("bernoulli", _bernoullis()))
    for case in cases
]


@pytest.mark.parametrize(("parameters", "make"), CASES)
def test_values_and_gradients_are_the_distribution_s(parameters, make):
    torch.manual_seed(0)
    value = make().sample().requires_grad_()
    weight = torch.randn(make().batch_shape, dtype=torch.float64)
    broadcast, own = broadcast_log_prob(make(), value), make().log_prob(value)
    torch.testing.assert_close(broadcast, own)
    inputs = [*parameters, value]
    result, wanted = (torch.autograd.grad((weight * x).sum(), inputs) for x in (broadcast, own))
    torch.testing.assert_close(result, wanted)


def test_what_was_detached_gets_no_gradient():
    logits = _parameter(3)
    for parameter in (logits.detach(), logits.detach().expand(2, 3)):
        fn = dist.Bernoulli(logits=parameter).expand([2, 3]).to_event(1)
        assert not broadcast_log_prob(fn, torch.ones(2, 3, dtype=torch.float64)).requires_grad


def test_values_have_batch_dims_that_the_distribution_lacks():
    value, mask = torch.randn(6, 5, 3), torch.rand(5, 3) < 0.5
    for fn in (dist.Normal(torch.randn(5, 3), 2.0), dist.Normal(torch.randn(6, 5, 3), 2.0)):
        for whole in (fn.to_event(1), fn.mask(mask).to_event(1)):
            for x in (value, value[0]):
                torch.testing.assert_close(broadcast_log_prob(whole, x), whole.log_prob(x))


def test_infinite_logits_are_certainties():
    fn = dist.Bernoulli(logits=torch.tensor([torch.inf, -torch.inf, 0.0])).to_event(1)
    certain, impossible = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0])
    torch.testing.assert_close(broadcast_log_prob(fn, certain), torch.tensor(0.5).log())
    assert broadcast_log_prob(fn, impossible) == -torch.inf


def test_large_logits_do_not_cancel():
    logits = torch.tensor([1e8, -1e8, 0.0], requires_grad=True)
    result = broadcast_log_prob(
        dist.Bernoulli(logits=logits).to_event(1), torch.tensor([1.0, 0.0, 1.0])
    )
    torch.testing.assert_close(result, torch.tensor(0.5).log())
    # At zero, a kink of |l|, the gradient is z - sigmoid(l) too.
    assert torch.autograd.grad(result, logits)[0].tolist() == [0.0, 0.0, 0.5]


def test_what_is_missing_may_be_nan():
    loc = torch.zeros(2, 3, requires_grad=True)
    value = torch.tensor([[1.0, torch.nan, 2.0], [torch.nan] * 3])

    def density(mask):
        fn = dist.Normal(loc, 1.0, validate_args=False).mask(mask).to_event(1)
        return broadcast_log_prob(fn, value)

    result = density(~value.isnan())
    wanted = (
        torch.tensor([-2.5, 0.0]) - (2 * torch.pi * torch.tensor([1.0, 0.0])).clamp_min(1).log()
    )
    torch.testing.assert_close(result, wanted)
    (gradient,) = torch.autograd.grad(result.sum(), loc)
    assert gradient.tolist() == [[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
    # What is there and NaN stays NaN.
    assert density(value != 2).isnan().all()


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_rounded_products_do_not_round_densities(precision):
    """Where a user lets float32 products be rounded, and under autocast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        logits = torch.linspace(-3, 3, 64, dtype=torch.float32)
        value = (torch.rand(7, 5, 64) < 0.5).float()
        fn = dist.Bernoulli(logits=logits).to_event(1).expand([7, 5])
        with torch.autocast("cpu", torch.bfloat16):
            result = broadcast_log_prob(fn, value)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, fn.log_prob(value))
    finally:
        torch.set_float32_matmul_precision(before)


def test_other_distributions_are_left_alone():
    class Shifted(dist.Normal):
        def log_prob(self, value):
            return super().log_prob(value - 1)

    columns = torch.empty_strided((2, 3), (1, 2)).normal_()
    for fn in (
        Shifted(0.0, 1.0),
        dist.Normal(torch.zeros(3), 1.0).mask(False).to_event(1),
        dist.Normal(torch.zeros(3, 2), 1.0).to_event(1).mask(torch.tensor([True, False, True])),
        dist.Laplace(0.0, 1.0),
        dist.Normal(torch.zeros(3), 1.0),
        # Other numbers, whose order or gradient would be lost.
        dist.Normal(torch.zeros(3), torch.ones(3)).to_event(1),
        dist.Normal(torch.zeros(3), torch.ones((), dtype=torch.float32)).to_event(1),
        dist.Bernoulli(logits=torch.randn(2, 3)[1]).to_event(1),
        dist.Bernoulli(logits=torch.randn(2, 2).t().reshape(4)[:3]).to_event(1),
        dist.Bernoulli(logits=columns.as_strided((6,), (1,))).to_event(1),
        dist.Delta(torch.zeros(())),
        dist.Bernoulli(torch.full((4, 3), 0.5)).to_event(1),
        dist.Bernoulli(torch.full((3,), 0.5)),
    ):
        value = torch.zeros(fn.shape())
        result = broadcast_log_prob(fn, value)
        # Public interfaces do not tell a part of a tensor from a whole one: the same density.
        whole = PUBLIC_ONLY and "Bernoulli" in repr(fn)
        assert result is None or (whole and torch.allclose(result, fn.log_prob(value)))
    assert broadcast_log_prob(dist.Bernoulli(0.5), torch.tensor(1)) is None


def _program():
    mask = torch.rand(4) < 0.5
    with pyro.plate("data", 10, subsample_size=4), poutine.scale(scale=0.3):
        z = pyro.sample("z", dist.Bernoulli(logits=torch.randn(3)).to_event(1))
        with poutine.mask(mask=mask):
            pyro.sample("masked", dist.Normal(z, 2.0).to_event(1), obs=torch.randn(4, 3))
        pyro.sample("inner", dist.Normal(0.0, 1.0).mask(mask), obs=torch.randn(4))
        pyro.sample("count", dist.Poisson(1 + z.sum(-1)), obs=torch.ones(4))
        pyro.sample("noted", dist.Normal(z[..., 0], 1.0), obs=torch.randn(4), infer={"note": 1})
        with pyro.plate("pixels", 5, dim=-2), poutine.scale(scale=torch.rand(5, 1)):
            pyro.sample("nested", dist.Normal(z.sum(-1), 0.5), obs=torch.randn(5, 4))


def test_terms_have_scales_and_masks():
    torch.manual_seed(0)
    sites = list(scored(poutine.trace(_program).get_trace()))
    assert len(sites) == 6
    for site in sites:
        result, ordinary = broadcast_term(site), model_term(site)
        torch.testing.assert_close(result.log_prob, ordinary.log_prob)
        assert result.log_prob.shape == ordinary.log_prob.shape
        assert (result.key, result.plate_scale) == (ordinary.key, ordinary.plate_scale)


def test_a_refused_value_names_its_site():
    fn, value = dist.Bernoulli(torch.full((3,), 0.5)).to_event(1), torch.full((3,), 0.3)
    with pyro.validation_enabled(True):
        trace = poutine.trace(lambda: pyro.sample("x", fn, obs=value)).get_trace()
        with pytest.raises(ValueError, match="'x'"):
            broadcast_term(trace.nodes["x"])
