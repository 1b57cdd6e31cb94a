"""The learned mass matrix and reversal: densities by hand, first values, how they are created."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch.distributions import Normal

from pyro_mcvae import (
    CompiledELBO,
    LearnedSchedule,
    ScoreNetwork,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from pyro_mcvae.chains.annealing import evaluator
from pyro_mcvae.chains.kernels import MassMatrix, Target, leapfrog
from tests.chains.densities import RandomMass, correlated, create_parts, frozen, learned_moves

K, MU = 3, 0.8


def _log_normal(momentum):
    return -0.5 * momentum.square().sum(-1)


def target(k, movable=None):
    return Target(evaluator(correlated), torch.tensor(0.7), movable, k)


def test_the_weight_has_the_densities_of_refreshments_and_of_their_learned_reversals(monkeypatch):
    kernel, state = learned_moves(0.4, MU, K), target(0).evaluate(torch.randn(6, 2))
    create_parts(kernel, state.position)
    noises, scale = torch.randn(K, 6, 2), (1 - MU**2) ** 0.5
    frozen(monkeypatch, *noises)
    there, end, expected, found = state, noises[0], 0.0, 0.0
    for k in range(K):
        start = MU * end + scale * noises[k] if k else noises[0]
        if k:
            mean = MU * start + scale**2 * kernel.reverse(there.position, start, k)
            moved = Normal(mean, scale).log_prob(end) - Normal(MU * end, scale).log_prob(start)
            expected = expected + moved.sum(-1)
            assert (kernel.reverse(there.position, start, k).abs() > 0.05).any()
        else:
            expected = expected - _log_normal(start)
        there, end = kernel.integrator(there, start, target(k), torch.tensor(0.4))
        state, info = kernel.step(state, target(k))
        found = found + info.log_ratio
        assert torch.allclose(state.position, there.position)
        assert torch.allclose(state.momentum, end)
    assert torch.allclose(found, expected + _log_normal(end))


@pytest.mark.parametrize("step", [0.4, torch.tensor([0.3, 0.6], dtype=torch.float64)])
def test_a_step_with_a_mass_matrix_is_reversible_and_keeps_volume(step):
    mass, step = RandomMass(), torch.as_tensor(step)
    state, momentum = target(0).evaluate(torch.randn(5, 2)), torch.randn(5, 2)
    end, final = mass(state, momentum, target(0), step)
    assert (end.position - state.position).abs().max() > 0.1
    back, turned = mass(end, -final, target(0), step)
    assert torch.allclose(back.position, state.position)
    assert torch.allclose(turned, -momentum)

    def move(both):
        new, momentum = mass(target(0).evaluate(both[:2]), both[2:], target(0), step)
        return torch.cat([new.position, momentum])

    jacobian = torch.autograd.functional.jacobian(move, torch.randn(4))
    assert torch.allclose(torch.linalg.det(jacobian), torch.tensor(1.0))


def test_a_mass_matrix_is_a_change_of_coordinates():
    """The chain with factor F in z is the plain one in F^-1 z."""
    factor = torch.tensor([[1.0, 0.0], [0.7, 0.5]])
    mass = MassMatrix()
    mass.create(torch.zeros(2))
    mass.factor.data.copy_(factor)
    z, momentum = torch.randn(5, 2), torch.randn(5, 2)
    found, end = mass(target(0).evaluate(z), momentum, target(0), torch.tensor(0.4))
    white = Target(evaluator(lambda u: correlated(u @ factor.mT)), torch.tensor(0.7))
    u = z @ torch.linalg.inv(factor).mT
    expected, plain = leapfrog(white.evaluate(u), momentum, white, torch.tensor(0.4))
    assert torch.allclose(found.position, expected.position @ factor.mT)
    assert torch.allclose(end, plain)


def test_parameters_have_the_precision_of_the_chain():
    kernel = UnderdampedLangevin(0.4, full_mass=True, reverse=ScoreNetwork(width=5))
    create_parts(kernel, torch.zeros(2, 3, dtype=torch.float32))
    assert {p.dtype for p in kernel.integrator.parameters()} == {torch.float32}
    create_parts(kernel, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"has parameters for 3 coordinates.* moves 4"):
        create_parts(kernel, torch.zeros(2, 4))


def model():
    with pyro.plate("data", 3):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z.sum(-1).exp(), 0.3), obs=torch.ones(3))


def guide():
    loc = pyro.param("loc", torch.zeros(3, 2))
    with pyro.plate("data", 3):
        pyro.sample("z", dist.Normal(loc, 0.8).to_event(1))


def objective(**options):
    reverse = ScoreNetwork(K, width=5)
    kernel = UnderdampedLangevin.trained(K, warmup=1, full_mass=True, reverse=reverse)
    return TraceSIS_ELBO(kernel=kernel, schedule=LearnedSchedule(K), **options)


def train(loss, steps, wrap=lambda loss: loss):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), wrap(loss))
    return [svi.step() for _ in range(steps)]


def test_the_first_step_trains_them():
    loss = objective()
    train(loss, 1)
    kernel = loss.kernel
    assert (kernel.integrator.factor != torch.eye(2)).all()
    assert (kernel.reverse.drift.bias != 0).all()
    train(loss, 2)
    moved = copy.deepcopy(loss.state_dict())
    train(loss, 1)
    changed = {n: not torch.equal(p, moved[n]) for n, p in loss.named_parameters()}
    assert all(changed.values()), changed


@pytest.mark.slow
def test_a_compiled_loss_trains_them_alike():
    plain, compiled = objective(), objective()
    losses = train(plain, 12)
    assert train(compiled, 12, lambda loss: CompiledELBO(loss, backend="eager")) == losses
    assert all(map(torch.equal, plain.parameters(), compiled.parameters()))


def test_a_trained_objective_is_saved_and_copied():
    loss, other = objective(), objective()
    train(loss, 3)
    other.load_state_dict(loss.state_dict())
    for restored in (other, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        pyro.set_rng_seed(1)
        value = loss.loss(model, guide)
        pyro.set_rng_seed(1)
        assert restored.loss(model, guide) == value
