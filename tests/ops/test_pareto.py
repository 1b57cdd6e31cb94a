"""Pareto's k-hat, against ArviZ, Pyro and distributions whose tail is known."""

import math

import pytest
import torch
from pyro.ops.stats import fit_generalized_pareto as pyro_fit

from pyro_mcvae.ops.weights import pareto_k, tail_length


def log_weights(count, kind="student"):
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(count, 6, generator=generator)
    scale = torch.tensor([0.2, 0.5, 1.0, 2.0, 4.0, 8.0])
    if kind == "pareto":
        return -torch.rand(count, 6, generator=generator).log() * scale / 4
    return normal * scale


def test_tail_lengths_are_those_of_the_paper():
    assert [tail_length(n) for n in (20, 25, 100, 1000, 10_000)] == [4, 5, 20, 95, 300]


@pytest.mark.parametrize("kind", ["student", "pareto"])
@pytest.mark.parametrize("count", [25, 101, 1000, 5000])
def test_k_is_that_of_arviz(kind, count):
    psislw = pytest.importorskip("arviz").psislw
    log_weight = log_weights(count, kind)
    expected = psislw(log_weight.T.numpy())[1]
    assert torch.allclose(pareto_k(log_weight), torch.as_tensor(expected).double(), atol=1e-6)


@pytest.mark.parametrize("count", [41, 400, 4000])
def test_the_fit_is_that_of_pyro(count):
    log_weight = log_weights(count, "pareto")
    top = log_weight.topk(tail_length(count) + 1, dim=0).values.exp()
    result = pareto_k(log_weight)
    for i in range(6):
        assert abs(float(result[i]) - pyro_fit(top[:-1, i] - top[-1, i])[0]) < 1e-6


def test_k_of_pareto_weights_is_their_shape():
    shape = torch.tensor([0.2, 0.5, 0.7, 1.0, 1.5])
    exponential = torch.distributions.Exponential(1 / shape).sample((40_000,))
    assert torch.allclose(pareto_k(exponential).to(shape), shape, atol=0.12)


def test_the_largest_weights_are_enough():
    log_weight = log_weights(1000).reshape(1000, 2, 3)
    largest = log_weight.topk(tail_length(1000) + 1, dim=0).values
    assert torch.equal(pareto_k(largest, 1000), pareto_k(log_weight))


def test_k_does_not_depend_on_the_scale_of_the_weights():
    log_weight = log_weights(500).double()
    assert torch.allclose(pareto_k(log_weight - 1e4), pareto_k(log_weight), atol=1e-6)


def test_where_there_is_no_tail():
    few, equal = torch.randn(20, 2), torch.randn(2) + 1e-5 * torch.randn(100, 2)
    assert pareto_k(few).isnan().all()
    assert (pareto_k(equal) == -math.inf).all()
    zeros = torch.full((100, 1), -math.inf)
    assert not pareto_k(zeros).isfinite().any()
    zeros[0] = 0.0
    assert (pareto_k(zeros) == math.inf).all()
    ties = torch.zeros(100, 1)
    ties[:50] = -3.0
    assert (pareto_k(ties) == -math.inf).all()


def test_some_weights_may_be_zero():
    log_weight = log_weights(1000).double()
    half = torch.where(torch.arange(1000).unsqueeze(-1) % 2 == 0, log_weight, -math.inf)
    assert pareto_k(half).isfinite().all()
