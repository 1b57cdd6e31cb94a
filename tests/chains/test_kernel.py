"""What holds for every kernel: invariance, detailed balance, selection, frozen coordinates."""

import math

import pytest
import torch

from pyro_mcvae import HMC, MALA, ULA, RandomWalk, UnderdampedLangevin
from pyro_mcvae.chains.annealing import evaluator
from pyro_mcvae.chains.kernels import Kernel, Proposal, State, Target
from pyro_mcvae.chains.parameters import AdaptiveStepSize, FixedStepSize, LearnedStepSize
from tests.chains.densities import (
    bent_draws,
    bent_target,
    correlated,
    learned_moves,
    standard_normal,
)
from tests.estimates import assert_mean

ADJUSTED = {
    "MALA": lambda: MALA(0.35),
    "HMC": lambda: HMC(0.75, num_leapfrog=3),
    "RandomWalk": lambda: RandomWalk(1.3),
}
KERNELS = {
    **ADJUSTED,
    "ULA": lambda: ULA(0.2),
    "UnderdampedLangevin": lambda: UnderdampedLangevin(0.6, momentum=0.7),
}
LEARNED = {**KERNELS, "learned moves": lambda: learned_moves(0.6, 0.7)}
adjusted = pytest.mark.parametrize("make", ADJUSTED.values(), ids=list(ADJUSTED))
kernels = pytest.mark.parametrize("make", KERNELS.values(), ids=list(KERNELS))
with_learned_moves = pytest.mark.parametrize("make", LEARNED.values(), ids=list(LEARNED))
MOMENTS = {
    "mean": lambda x: x,
    "square": lambda x: x**2,
    "cube": lambda x: x**3,
    "sine": lambda x: torch.sin(3 * x),
}


def run(kernel, state, target, count):
    infos = []
    for _ in range(count):
        state, info = kernel.step(state, target)
        state = State(*(None if t is None else t.detach() for t in state))
        infos.append(info)
    return state, infos


@pytest.mark.parametrize(
    "make",
    [*ADJUSTED.values(), lambda: HMC(0.75, num_leapfrog=3, laziness=0.2)],
    ids=[*ADJUSTED, "lazy HMC"],
)
@pytest.mark.parametrize("beta", [0.4, 1.0])
def test_one_transition_leaves_the_target_invariant(make, beta):
    target = bent_target(beta)
    state = target.evaluate(bent_draws(200_000, beta))
    moved, info = make().step(state, target)
    assert 0.2 < info.accepted.double().mean() < 0.95  # Both branches count.
    before, after = state.position[:, 0].detach(), moved.position[:, 0].detach()
    for moment in MOMENTS.values():
        assert_mean(moment(after) - moment(before), torch.tensor(0.0))


@with_learned_moves
def test_acceptance_is_the_metropolis_ratio(make):
    kernel, target = make(), bent_target(0.7)
    state = target.evaluate(torch.randn(50, 1))
    torch.manual_seed(3)
    proposal = kernel.propose(state, target)
    ratio = target.log_density(proposal.state) - target.log_density(state) + proposal.log_ratio
    torch.manual_seed(3)
    moved, info = kernel.step(state, target)
    assert torch.allclose(info.acceptance, ratio.exp().clamp(max=1))
    assert not info.acceptance.requires_grad
    if not kernel.adjusted:
        assert torch.equal(moved.position, proposal.state.position)
        assert torch.equal(info.log_ratio, proposal.log_ratio)
        assert info.accepted is None
        assert info.log_prob is None
        return
    assert 0 < info.accepted.sum() < 50
    chosen = torch.where(info.accepted, info.acceptance, 1 - info.acceptance)
    assert torch.allclose(info.log_prob, chosen.log())
    # Everything that was computed at the chosen state goes with it, nothing is computed again.
    for new, old, result in zip(proposal.state, state, moved, strict=True):
        if result is not None:
            bits = info.accepted.reshape(50, *[1] * (result.dim() - 1))
            assert torch.equal(result, torch.where(bits, new, old))


@adjusted
def test_log_prob_of_the_decision_has_the_gradient_of_finite_differences(make):
    def log_prob(shift):
        def density(z):
            log_base = standard_normal(z)
            return log_base, -((z - shift) ** 2).sum(-1) + 0.3 * torch.sin(3 * z).sum(-1)

        target = Target(evaluator(density), torch.tensor(0.8))
        torch.manual_seed(0)
        _, info = make().step(target.evaluate(torch.randn(40, 2)), target)
        return info

    shift = torch.tensor(0.4, requires_grad=True)
    info = log_prob(shift)
    assert 0 < info.accepted.sum() < 40
    (grad,) = torch.autograd.grad(info.log_prob.sum(), shift)
    ends = [log_prob(torch.tensor(0.4 + step)) for step in (1e-6, -1e-6)]
    assert all(torch.equal(e.accepted, info.accepted) for e in ends)
    expected = (ends[0].log_prob - ends[1].log_prob).sum() / 2e-6
    assert torch.allclose(grad, expected, rtol=1e-5)
    assert expected.abs() > 1e-2


@adjusted
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_nobody_goes_where_the_density_is_not(make, bad):
    def density(z):
        inside = (z > 0).all(-1)
        return standard_normal(z), torch.where(inside, 1.5 * z.sum(-1), bad)

    target = Target(evaluator(density), torch.tensor(1.0))
    start = target.evaluate(1 + torch.rand(500, 2))
    state, infos = run(make(), start, target, 10)
    assert (state.position > 0).all()
    assert torch.stack([i.acceptance for i in infos]).isfinite().all()
    assert torch.stack([i.log_prob for i in infos]).isfinite().all()
    assert min(i.acceptance.min() for i in infos) == 0
    assert (state.position != start.position).any(-1).double().mean() > 0.5


@with_learned_moves
def test_one_bad_datum_leaves_the_others_alone(make):
    def density(z, bad=None):
        factor = torch.ones(6, 1)
        if bad is not None:
            factor[bad] = math.nan
        return standard_normal(z), torch.cos(z * factor).sum(-1)

    position = torch.randn(4, 6, 2)
    result = []
    for bad in (None, 2):
        target = Target(evaluator(lambda z, bad=bad: density(z, bad)), torch.tensor(0.5))
        torch.manual_seed(7)
        state, infos = run(make(), target.evaluate(position), target, 5)
        result.append((state.position, torch.stack([i.acceptance for i in infos])))
    others = [0, 1, 3, 4, 5]
    assert torch.equal(result[0][0][:, others], result[1][0][:, others])
    assert torch.equal(result[0][1][:, :, others], result[1][1][:, :, others])
    assert result[1][0].isfinite().all()
    assert (result[1][1][:, :, 2] == 0).all()


@kernels
def test_frozen_coordinates_do_not_move_and_count_for_nothing(make, monkeypatch):
    movable = torch.tensor([1.0, 0.0, 1.0])
    draws = torch.randn(30, 4, 3)

    def wide(z):
        # The frozen coordinate has a steep density of its own, which must not matter.
        log_base, log_weight = correlated(z[..., [0, 2]])
        return log_base, log_weight + 50 * z[..., 1].detach() ** 0 - 50 + 0 * z[..., 1]

    def moves(density, start, noises, movable):
        noises = iter(noises)
        monkeypatch.setattr(torch, "randn_like", lambda like: next(noises))
        monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, 0.5))
        target = Target(evaluator(density), torch.tensor(0.6), movable)
        return run(make(), target.evaluate(start), target, 5)

    start = torch.randn(4, 3)
    state, infos = moves(wide, start, draws, movable)
    narrow, alone = moves(correlated, start[:, [0, 2]], draws[..., [0, 2]], None)
    assert torch.equal(state.position[:, 1], start[:, 1])
    assert torch.allclose(state.position[:, [0, 2]], narrow.position)
    for a, b in zip(infos, alone, strict=True):
        assert torch.allclose(a.log_ratio, b.log_ratio)
        assert torch.allclose(a.acceptance, b.acceptance)
    assert (state.position[:, [0, 2]] != start[:, [0, 2]]).any()


@kernels
def test_a_step_size_per_coordinate_is_a_change_of_scale(make, monkeypatch):
    """Steps s e_i in z are steps s in z / e."""
    scale = torch.tensor([0.5, 2.0])
    draws = torch.randn(30, 6, 2)
    results = []
    for per_coordinate in (True, False):
        noises = iter(draws)
        monkeypatch.setattr(torch, "randn_like", lambda like, noises=noises: next(noises))
        monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, 0.4))
        kernel = make()
        power = 2 if isinstance(kernel, MALA | ULA) else 1  # eta is a squared length
        unit = torch.ones(2) if per_coordinate else scale
        if per_coordinate:
            kernel.step_size = FixedStepSize(kernel.step_size() * scale**power)
        target = Target(evaluator(lambda z, unit=unit: correlated(z * unit)), torch.tensor(0.6))
        state, infos = run(kernel, target.evaluate(torch.ones(6, 2) / unit), target, 4)
        results.append((state.position * unit, torch.stack([i.acceptance for i in infos])))
    assert torch.allclose(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1])


DEFAULTS = {ULA: 0.9, MALA: 0.8, HMC: 0.8, RandomWalk: 0.3, UnderdampedLangevin: 0.9}


@pytest.mark.parametrize("cls", DEFAULTS, ids=lambda c: c.__name__)
def test_the_default_step_size_starts_small_and_adapts(cls):
    step_size = cls().step_size
    assert isinstance(step_size, AdaptiveStepSize)
    assert 0 < step_size() <= 0.1
    assert step_size.target_acceptance == DEFAULTS[cls]
    # What the user says about an adaptive one goes before the kernel's own.
    chosen = cls(AdaptiveStepSize(0.4, target_acceptance=0.55)).step_size
    assert chosen() == 0.4
    assert chosen.target_acceptance == 0.55
    learned = LearnedStepSize(0.3)
    assert cls(learned).step_size is learned
    assert list(cls(0.3).state_dict()) == ["step_size.value"]


def test_a_kernel_of_ones_own():
    class CrankNicolson(Kernel):
        """Leaves the base invariant by itself, so that only log w decides."""

        adjusted = True
        needs_gradient = False

        def propose(self, state, target):
            s = self.step_size()
            new = target.evaluate((1 - s**2).sqrt() * state.position + s * target.noise(state))
            return Proposal(new, state.log_base - new.log_base)

    target = bent_target(1.0)
    state = target.evaluate(bent_draws(100_000, 1.0))
    moved, info = CrankNicolson(0.7).step(state, target)
    assert 0.2 < info.accepted.double().mean() < 0.95
    for moment in MOMENTS.values():
        change = moment(moved.position[:, 0]) - moment(state.position[:, 0])
        assert_mean(change.detach(), torch.tensor(0.0))
    with pytest.raises(TypeError, match="abstract"):
        Kernel(0.1)
