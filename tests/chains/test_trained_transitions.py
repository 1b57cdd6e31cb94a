"""Step sizes and momenta of each transition: what they move, their gradients, and their limits."""

import math

import pytest
import torch

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    AdaptiveStepSize,
    LearnedMomentum,
    LearnedSchedule,
    LearnedStepSize,
    LinearSchedule,
    RandomWalk,
    UnderdampedLangevin,
)
from pyro_mcvae.chains.annealing import anneal, evaluator
from tests.chains.densities import LOG_EVIDENCE, correlated, create_parts, learned_moves
from tests.estimates import assert_mean

K = 4
STEPS = torch.tensor([0.3, 0.9, 0.5, 0.7], dtype=torch.float64)
MOMENTA = torch.tensor([0.5, 0.9, 0.1, 0.6], dtype=torch.float64)


def learned(steps):
    step_size = LearnedStepSize(torch.ones(steps.shape[1:]), K)
    step_size.log_value.data.copy_(steps.log())
    return step_size


def underdamped(steps=STEPS):
    momentum = LearnedMomentum(0.5, K)
    momentum.logit.data.copy_((MOMENTA / 0.999).logit())
    return UnderdampedLangevin(learned(steps), momentum=momentum)


KERNELS = {
    "underdamped": underdamped,
    "per coordinate": lambda: underdamped(STEPS.unsqueeze(-1) * torch.tensor([1.0, 0.6])),
    "one momentum": lambda: UnderdampedLangevin(learned(STEPS), momentum=LearnedMomentum(0.7)),
    "learned moves": lambda: learned_moves(learned(STEPS), LearnedMomentum(0.7), K),
    "ULA": lambda: ULA(learned(STEPS.square() / 2)),
    "MALA": lambda: MALA(learned(STEPS.square() / 2)),
    "HMC": lambda: HMC(learned(STEPS), num_leapfrog=2),
    "RandomWalk": lambda: RandomWalk(learned(STEPS)),
}
SIS = ["underdamped", "per coordinate", "one momentum", "learned moves", "ULA"]
every = pytest.mark.parametrize("name", KERNELS)


def chain(kernel, count=20_000, betas=None, noise=None):
    evaluate = evaluator(correlated)
    start = evaluate(torch.randn(count, 2) if noise is None else noise)
    betas = LinearSchedule(K)() if betas is None else betas
    return anneal(start, betas, kernel, evaluate, last_transition=False)


@every
def test_mean_weight_is_the_evidence_for_any_values(name):
    result = chain(KERNELS[name]()).log_weight.detach()
    weight = (result - LOG_EVIDENCE).exp()
    assert weight.std() < 6
    assert_mean(weight, torch.tensor(1.0))
    assert result.mean() < LOG_EVIDENCE


def test_each_transition_goes_by_its_own_values():
    """Draw by draw the chain of kernels with these values, one after the other."""
    kernel, evaluate, betas = underdamped(), evaluator(correlated), LinearSchedule(K)()
    start = evaluate(torch.randn(50, 2))
    torch.manual_seed(1)
    result = anneal(start, betas, kernel, evaluate)
    torch.manual_seed(1)
    state, moves = start, 0.0
    for k in range(K):
        own = UnderdampedLangevin(STEPS[k], momentum=float(MOMENTA[k]))
        part = anneal(state, betas[k : k + 2], own, evaluate)
        state, moves = part.state, moves + part.infos[0].log_ratio
    assert torch.allclose(result.state.position, state.position)
    assert torch.allclose(sum(i.log_ratio for i in result.infos), moves)


@pytest.mark.parametrize("name", SIS)
def test_gradients_of_each_value_are_finite_differences(name):
    kernel, schedule = KERNELS[name](), LearnedSchedule(K)
    noise = torch.randn(6, 2)
    create_parts(kernel, noise)
    parameters = [*kernel.parameters(), *schedule.parameters()]

    def bound():
        torch.manual_seed(2)
        return chain(kernel, betas=schedule(), noise=noise).log_weight.mean()

    grads = torch.autograd.grad(bound(), parameters)
    for parameter, grad in zip(parameters, grads, strict=True):
        flat = parameter.data.view(-1)
        for at, slope in enumerate(grad.flatten()):
            ends = []
            for step in (1e-5, -2e-5):
                flat[at] += step
                ends.append(bound().detach())
            flat[at] += 1e-5
            assert torch.allclose(slope, (ends[0] - ends[1]) / 2e-5, rtol=1e-5, atol=1e-8)
    if kernel.step_size.log_value.dim() == 1:
        assert (grads[0] != 0).all()
    if name == "learned moves":  # the first momentum is drawn, and not refreshed
        moved = dict(zip(dict(kernel.named_parameters()), grads, strict=False))
        assert (moved["reverse.time"][0] == 0).all()
        assert (moved["reverse.time"][1:] != 0).all()
        assert (moved["integrator.factor"] != 0).all()


def test_the_first_momentum_and_the_last_move_of_ais_do_not_matter():
    kernel = underdamped()
    (grad,) = torch.autograd.grad(chain(kernel, 9).log_weight.mean(), kernel.momentum.logit)
    assert grad[0] == 0
    assert (grad[1:] != 0).all()
    kernel = MALA(learned(STEPS.square() / 2))
    (grad,) = torch.autograd.grad(chain(kernel, 9).log_weight.mean(), kernel.step_size.log_value)
    assert grad[-1] == 0
    assert (grad[:-1] != 0).all()


def test_first_it_adapts_and_then_it_learns():
    adaptive, same = (
        AdaptiveStepSize(0.1, target_acceptance=0.8),
        AdaptiveStepSize(0.1, target_acceptance=0.8),
    )
    step_size = LearnedStepSize(adaptive, num_transitions=3, warmup=2)
    for _ in range(2):
        (grad,) = torch.autograd.grad(step_size.values().sum(), step_size.log_value)
        assert (grad == 0).all()
        step_size.log_value.data += 0.5  # what an optimizer might do all the same
        assert (step_size.values() == same()).all()
        step_size.log_value.data -= 0.5
        step_size.update(torch.tensor(0.95))
        same.update(torch.tensor(0.95))
    step_size.log_value.data += torch.tensor([0.3, 1e3, -1e3])
    step_size.update(torch.tensor(0.1))
    expected = same() * torch.tensor([math.exp(0.3), 10.0, 0.1])
    assert torch.allclose(step_size.values(), expected)
    (grad,) = torch.autograd.grad(step_size.values().sum(), step_size.log_value)
    assert torch.allclose(grad, expected)


def test_a_restored_one_goes_on_where_it_was():
    def make():
        return LearnedStepSize(
            AdaptiveStepSize(0.1, target_acceptance=0.8), num_transitions=2, warmup=2
        )

    saved, loaded = make(), make()
    saved.update(torch.tensor(1.0))
    state = saved.state_dict()
    saved.update(torch.tensor(0.9))
    loaded.load_state_dict(state)
    assert loaded.left == 1
    loaded.update(torch.tensor(0.9))
    assert torch.equal(loaded.values(), saved.values())


def test_as_many_values_as_transitions():
    with pytest.raises(ValueError, match="but the chain makes transition 5"):
        chain(underdamped(), 3, LinearSchedule(K + 1)())


@pytest.mark.parametrize("logit", [-1e30, -50.0, 50.0, 1e30])
def test_momenta_stay_inside_with_finite_gradients(logit):
    momentum = LearnedMomentum(0.5)
    momentum.logit.data.fill_(logit)
    kept = momentum()
    assert 0 <= kept <= 0.999
    (grad,) = torch.autograd.grad((1 - kept.square()).sqrt(), momentum.logit)
    assert grad.isfinite()


@pytest.mark.parametrize("log", [-1e3, -20.0, 20.0, 1e3])
def test_step_sizes_stay_inside_and_find_their_way_back(log):
    step_size = LearnedStepSize(0.1)
    step_size.log_value.data.fill_(log)
    assert 1e-6 * 0.999 <= step_size() <= 1e3 * 1.001
    (grad,) = torch.autograd.grad(step_size(), step_size.log_value)
    assert grad > 0
