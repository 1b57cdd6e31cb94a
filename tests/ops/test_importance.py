"""Averages, normalised weights, effective sample size and VIMCO's signal against definitions."""

import itertools
import math

import pytest
import torch

from pyro_mcvae.ops.weights import (
    effective_sample_size,
    leave_one_out_signal,
    log_mean_exp,
    normalized_weights,
)

INF = math.inf
# Columns with particles of weight zero: none, one (first, last), several, all but one.
WITH_ZEROS = [
    [0.3, -1.2, 2.0],
    [-INF, -5.0, -6.0],
    [-5.0, -6.0, -INF],
    [3.0, -INF, 700.0],
    [-INF, 1.0, -INF],
    [-INF, -INF, -2000.0],
]


def leave_one_out_by_definition(log_weight):
    """The definition, one column of Python floats at a time."""

    def log_sum(values):
        top = max(values)
        return top if top == -INF else top + math.log(sum(math.exp(v - top) for v in values))

    count = len(log_weight)
    bound = log_sum(log_weight) - math.log(count)
    signal = []
    for k in range(count):
        others = log_weight[:k] + log_weight[k + 1 :]
        baseline = log_sum([*others, sum(others) / (count - 1)]) - math.log(count)
        signal.append(bound - (0.0 if baseline == -INF else baseline))
    return signal


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_log_mean_exp_is_the_log_of_the_mean(dim):
    log_weight = torch.randn(4, 3, 5)
    expected = log_weight.exp().mean(dim).log()
    assert torch.allclose(log_mean_exp(log_weight, dim), expected)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_averages_and_weights_only_shift_with_huge_log_weights_in_single_precision(shift):
    log_weight = torch.tensor([[0.0, 0.5], [1.0, -3.0], [-2.0, 4.0]], dtype=torch.float32)
    moved = log_weight + shift
    # The shift itself rounds the input to 1e-3.
    assert torch.allclose(log_mean_exp(moved) - shift, log_mean_exp(log_weight), atol=4e-3)
    weights = normalized_weights(moved)
    assert weights.dtype == torch.float32
    assert torch.allclose(weights, normalized_weights(log_weight), atol=3e-3)
    assert torch.allclose(weights.sum(0), torch.ones(2, dtype=torch.float32), atol=2e-3)


@pytest.mark.parametrize("dim", [0, 1])
def test_normalized_weights_are_proportional_to_the_weights_and_sum_to_one(dim):
    log_weight = torch.randn(4, 6)
    weights = normalized_weights(log_weight, dim)
    assert torch.allclose(weights.sum(dim), torch.ones(()).expand_as(weights.sum(dim)))
    assert torch.allclose(weights, log_weight.exp() / log_weight.exp().sum(dim, keepdim=True))


def test_normalized_weights_are_zero_where_every_weight_is_zero():
    log_weight = torch.tensor([[-INF, 0.0, -INF], [-INF, -INF, -1e300]])
    expected = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert torch.equal(normalized_weights(log_weight), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
def test_effective_sample_size_has_its_exact_values(shift, dtype):
    # Equal weights: all of them count. One weight alone: it counts. (1, 1, 2): 16 / 6.
    columns = torch.tensor(
        [
            [0.0, 0.0, 0.0],
            [-INF, 0.0, -INF],
            [0.0, 0.0, -INF],
            [0.0, 0.0, math.log(2.0)],
        ],
        dtype=dtype,
    ).T
    result = effective_sample_size(columns + shift)
    # log 2 itself is rounded where 1e4 is added to it.
    assert torch.allclose(result, torch.tensor([3.0, 1.0, 2.0, 16 / 6], dtype=dtype), atol=2e-3)
    exact = result[:3] - torch.tensor([3.0, 1.0, 2.0], dtype=dtype)
    assert (exact.abs() < 1e-5).all()


@pytest.mark.parametrize("dim", [0, 1])
def test_effective_sample_size_is_one_over_the_sum_of_squared_weights(dim):
    log_weight = 2 * torch.randn(5, 4)
    weights = normalized_weights(log_weight, dim)
    assert torch.allclose(effective_sample_size(log_weight, dim), 1 / (weights**2).sum(dim))


@pytest.mark.parametrize("num_particles", [2, 3, 4, 5, 6])
def test_leave_one_out_signal_is_its_definition(num_particles):
    log_weight = 3 * torch.randn(num_particles, 2, 3)
    result = leave_one_out_signal(log_weight)
    assert result.shape == log_weight.shape
    for i, j in itertools.product(range(2), range(3)):
        expected = leave_one_out_by_definition(log_weight[:, i, j].tolist())
        assert torch.allclose(result[:, i, j], torch.tensor(expected))


@pytest.mark.parametrize("column", WITH_ZEROS, ids=str)
def test_leave_one_out_signal_is_its_definition_with_weights_of_zero(column):
    result = leave_one_out_signal(torch.tensor(column))
    assert torch.allclose(result, torch.tensor(leave_one_out_by_definition(column)))


@pytest.mark.parametrize("others", [[-5.0, -6.0], [1.0, -INF], [400.0, -3.0], [-1e4, 1e4]])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_leave_one_out_baseline_does_not_depend_on_the_particle_left_out(others, k):
    # Otherwise the score-function gradient is biased.
    baselines = []
    for own in (-INF, -1e4, -2.0, 50.0, 1e4):
        log_weight = torch.tensor([*others[:k], own, *others[k:]])
        baselines.append((log_mean_exp(log_weight) - leave_one_out_signal(log_weight))[k])
    baselines = torch.stack(baselines)
    assert torch.allclose(baselines, baselines[2].expand(5), rtol=1e-9, atol=1e-9)


def test_leave_one_out_signal_of_huge_weights_in_single_precision():
    for column in ([1e4, 9.999e3, -1e4], [-1e4, -1e4, -1e4], [1e4, 0.0, 1e4 - 3.0]):
        result = leave_one_out_signal(torch.tensor(column, dtype=torch.float32))
        assert result.dtype == torch.float32
        expected = torch.tensor(leave_one_out_by_definition(column), dtype=torch.float32)
        assert torch.allclose(result, expected, rtol=1e-5, atol=4e-3)


def test_one_particle_cannot_be_left_out():
    with pytest.raises(ValueError, match="num_particles >= 2, got 1"):
        leave_one_out_signal(torch.randn(1, 4))
