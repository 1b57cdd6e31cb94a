"""Kernel density estimates: normalised, with the draws' moments, for each batch element alone."""

import math

import pytest
import torch

from pyro_mcvae.ops.kernel_density import KernelDensity


def skewed(n, *batch, d):
    return torch.randn(n, *batch, d).exp() @ (torch.eye(d) + 0.5)


def grid(d, size=240, low=-6.0, high=14.0):
    axis = torch.linspace(low, high, size)
    points = torch.cartesian_prod(*[axis] * d).reshape(-1, d)
    return points, (axis[1] - axis[0]) ** d


@pytest.mark.parametrize("d", [1, 2])
def test_integrates_to_one_with_the_moments_of_the_draws(d):
    draws = 0.5 * skewed(50, 1, d=d)
    points, cell = grid(d)
    weight = KernelDensity(draws).log_prob(points[:, None])[:, 0].exp() * cell
    assert abs(weight.sum() - 1) < 1e-3
    mean = weight @ points
    assert torch.allclose(mean, draws[:, 0].mean(0), atol=1e-2)
    covariance = (points - mean).T @ (weight[:, None] * (points - mean))
    # The estimate has n - 1 in the kernels' part, n in that of their centres.
    assert torch.allclose(covariance, draws[:, 0].T.cov().reshape(d, d), rtol=0.03, atol=0.03)


def test_one_kernel_by_hand():
    draws = torch.tensor([[0.0], [2.0]])
    h = 2 ** (-1 / 5)
    variance = 2.0
    centres = torch.tensor([1 - math.sqrt(1 - h**2), 1 + math.sqrt(1 - h**2)])
    at = torch.tensor(0.3)
    kernels = torch.distributions.Normal(centres, h * math.sqrt(variance)).log_prob(at).exp()
    found = KernelDensity(draws).log_prob(at.reshape(1, 1))
    assert torch.allclose(found, kernels.mean().log().reshape(1), rtol=1e-5)


def test_each_batch_element_has_its_own_density():
    draws, at = skewed(40, 3, 2, d=3), skewed(7, 3, 2, d=3)
    together = KernelDensity(draws).log_prob(at)
    assert together.shape == (7, 3, 2)
    for i in range(3):
        for j in range(2):
            alone = KernelDensity(draws[:, i, j]).log_prob(at[:, i, j])
            assert torch.allclose(together[:, i, j], alone)


def test_coordinates_that_do_not_count():
    draws, at = skewed(40, 2, d=3), skewed(7, 2, d=3)
    active = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    found = KernelDensity(draws, active).log_prob(at)
    fewer = KernelDensity(draws[:, 0, ::2]).log_prob(at[:, 0, ::2])
    assert torch.allclose(found[:, 0], fewer, rtol=1e-5)
    assert torch.allclose(found[:, 1], KernelDensity(draws[:, 1]).log_prob(at[:, 1]))


def test_large_sets_are_summed_in_parts(monkeypatch):
    draws, at = skewed(40, 3, d=2), skewed(30, 3, d=2)
    whole = KernelDensity(draws).log_prob(at)
    monkeypatch.setattr("pyro_mcvae.ops.kernel_density._CHUNK", 500)
    assert torch.allclose(KernelDensity(draws).log_prob(at), whole)


def test_draws_that_are_all_the_same():
    assert KernelDensity(torch.ones(5, 2)).log_prob(torch.ones(1, 2)).isfinite().all()


def test_one_draw_is_too_few():
    with pytest.raises(ValueError, match="at least 2 draws, got 1"):
        KernelDensity(torch.zeros(1, 3))
