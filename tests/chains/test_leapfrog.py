"""The leapfrog integrator is reversible and preserves volume."""

import pytest
import torch

from pyro_mcvae.chains.annealing import evaluator
from pyro_mcvae.chains.kernels import Target, leapfrog
from tests.chains.densities import bent, correlated

densities = pytest.mark.parametrize(
    ("density", "dim"), [(correlated, 2), (bent, 1)], ids=["correlated", "bent"]
)
steps = pytest.mark.parametrize("num_steps", [1, 2, 7])


def target_of(density, movable=None):
    return Target(evaluator(density), torch.tensor(0.6), movable)


@densities
@steps
def test_it_returns_when_the_momentum_is_turned(density, dim, num_steps):
    target = target_of(density)
    start, momentum = target.evaluate(torch.randn(5, dim)), torch.randn(5, dim)
    end, final = leapfrog(start, momentum, target, torch.tensor(0.4), num_steps)
    assert (end.position - start.position).abs().max() > 0.1
    back, turned = leapfrog(end, -final, target, torch.tensor(0.4), num_steps)
    assert torch.allclose(back.position, start.position, atol=1e-12)
    assert torch.allclose(turned, -momentum, atol=1e-12)


@densities
@steps
@pytest.mark.parametrize("per_coordinate", [False, True])
def test_it_preserves_volume(density, dim, num_steps, per_coordinate):
    target = target_of(density)
    step = torch.linspace(0.3, 0.6, dim) if per_coordinate else torch.tensor(0.4)

    def move(both):
        state = target.evaluate(both[:dim])
        end, momentum = leapfrog(state, both[dim:], target, step, num_steps)
        return torch.cat([end.position, momentum])

    for _ in range(3):
        jacobian = torch.autograd.functional.jacobian(move, torch.randn(2 * dim))
        assert torch.allclose(torch.linalg.det(jacobian), torch.tensor(1.0), atol=1e-10)
        assert (jacobian - torch.eye(2 * dim)).abs().max() > 0.05
