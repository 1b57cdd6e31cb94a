"""The recursions of SIS and AIS: exact evidence, weights by hand, exact gradients."""

import itertools
import math

import pytest
import torch

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    LearnedSchedule,
    LinearSchedule,
    RandomWalk,
    SigmoidSchedule,
    UnderdampedLangevin,
)
from pyro_mcvae.chains.annealing import Chain, accept_score, anneal, evaluator
from pyro_mcvae.chains.kernels import Info, State
from pyro_mcvae.chains.parameters import LearnedStepSize
from pyro_mcvae.ops.weights import log_mean_exp
from tests.chains.densities import (
    LOG_EVIDENCE,
    correlated,
    create_parts,
    learned_moves,
    standard_normal,
)
from tests.estimates import assert_mean

UNADJUSTED = {
    "ULA": lambda: ULA(0.25),
    "ULA, per coordinate": lambda: ULA(torch.tensor([0.15, 0.3])),
    "UnderdampedLangevin": lambda: UnderdampedLangevin(0.6, momentum=0.7),
    "learned moves": lambda: learned_moves(0.5, momentum=0.7),
}
ADJUSTED = {
    "MALA": lambda: MALA(0.4),
    "HMC": lambda: HMC(0.5, num_leapfrog=2),
    "RandomWalk": lambda: RandomWalk(0.9),
}
KERNELS = {**UNADJUSTED, **ADJUSTED}
SCHEDULES = {
    "linear": lambda k: LinearSchedule(k),
    "sigmoid": lambda k: SigmoidSchedule(k, slope=3.0),
    "learned": LearnedSchedule,
}
kernels = pytest.mark.parametrize("make", KERNELS.values(), ids=list(KERNELS))
adjusted = pytest.mark.parametrize("make", ADJUSTED.values(), ids=list(ADJUSTED))
unadjusted = pytest.mark.parametrize("make", UNADJUSTED.values(), ids=list(UNADJUSTED))


def chains(kernel, num_steps=4, count=20_000, schedule=LinearSchedule, density=correlated):
    evaluate = evaluator(density, create_graph=False)
    start = evaluate(torch.randn(count, 2))
    with torch.no_grad():
        return anneal(start, schedule(num_steps)(), kernel, evaluate)


@kernels
@pytest.mark.parametrize(
    ("schedule", "num_steps"), [*zip(SCHEDULES.values(), [1, 5, 2], strict=True)]
)
def test_mean_weight_is_the_evidence(make, schedule, num_steps):
    result = chains(make(), num_steps, schedule=schedule).log_weight
    weight = (result - LOG_EVIDENCE).exp()
    assert weight.std() < 6
    assert_mean(weight, torch.tensor(1.0))
    assert result.mean() < LOG_EVIDENCE  # And the bound is a bound.


@unadjusted
def test_sis_weight_by_hand(make):
    kernel, betas = make(), torch.tensor([0.0, 0.2, 0.7, 1.0])
    evaluate = evaluator(correlated)
    chain = anneal(evaluate(torch.randn(7, 2)), betas, kernel, evaluate)
    (first_base, _), (base, weight) = map(correlated, (chain.start.position, chain.state.position))
    moves = torch.stack([info.log_ratio for info in chain.infos]).sum(0)
    assert torch.allclose(chain.log_weight, base + weight - first_base + moves)
    assert len(chain.infos) == 3
    assert chain.to_go == []


def test_each_move_is_towards_its_own_density():
    """Step k moves with respect to gamma at beta_k: the last one at beta = 1."""
    seen = []

    class Seen(ULA):
        def step(self, state, target):
            seen.append(target.beta)
            return super().step(state, target)

    betas = torch.tensor([0.0, 0.2, 0.7, 1.0])
    evaluate = evaluator(correlated)
    anneal(evaluate(torch.randn(7, 2)), betas, Seen(0.1), evaluate)
    assert torch.equal(torch.stack(seen), betas[1:])


@adjusted
@pytest.mark.parametrize("last_transition", [True, False])
def test_ais_weight_by_hand(make, last_transition):
    betas = torch.tensor([0.0, 0.2, 0.7, 1.0])
    visited = []

    def recorded(state, target):
        visited.append(state.log_weight)
        return step(state, target)

    kernel, evaluate = make(), evaluator(correlated)
    step, kernel.step = kernel.step, recorded
    start = evaluate(torch.randn(50, 2))
    chain = anneal(start, betas, kernel, evaluate, last_transition=last_transition)
    if not last_transition:
        visited.append(chain.state.log_weight)
    increments = [d * w for d, w in zip(betas.diff(), visited, strict=True)]
    assert torch.allclose(chain.log_weight, sum(increments))
    assert len(chain.infos) == len(chain.to_go) == (3 if last_transition else 2)
    assert torch.allclose(chain.to_go[0], increments[1] + increments[2])
    assert torch.allclose(chain.to_go[1], increments[2])
    if last_transition:
        assert (chain.to_go[2] == 0).all()


@adjusted
def test_the_last_transition_changes_the_draw_only(make):
    evaluate = evaluator(correlated)
    start, result = evaluate(torch.randn(50, 2)), []
    for last in (True, False):
        torch.manual_seed(1)
        result.append(anneal(start, LinearSchedule(3)(), make(), evaluate, last_transition=last))
    assert torch.equal(result[0].log_weight, result[1].log_weight)
    assert (result[0].state.position != result[1].state.position).any()


class Problem(torch.nn.Module):
    """A base and a log weight with parameters, and everything else that a chain may learn."""

    def __init__(self, kernel, num_steps, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.loc = torch.nn.Parameter(torch.randn(2, generator=generator) / 2)
        self.log_scale = torch.nn.Parameter(0.3 * torch.randn(2, generator=generator))
        self.theta = torch.nn.Parameter(torch.randn(2, generator=generator))
        self.kernel = kernel
        self.kernel.step_size = LearnedStepSize(kernel.step_size())
        self.schedule = LearnedSchedule(num_steps)
        self.schedule.logits.data += 0.3 * torch.randn(num_steps, generator=generator)

    def density(self, z):
        """As in latent coordinates: the base has parameters too."""
        standard = (z - self.loc) / self.log_scale.exp()
        log_base = standard_normal(standard) - self.log_scale.sum()
        log_gamma = standard_normal(z) - 0.5 * (torch.sin(2 * z) * self.theta - 0.4).sum(-1) ** 2
        return log_base, log_gamma - log_base

    def chain(self, noise):
        evaluate = evaluator(self.density)
        start = evaluate(self.loc + self.log_scale.exp() * noise)
        return anneal(start, self.schedule(), self.kernel, evaluate, last_transition=False)


def bound_of(chain, multi_sample):
    return log_mean_exp(chain.log_weight) if multi_sample else chain.log_weight.mean(0)


@adjusted
@pytest.mark.parametrize("multi_sample", [False, True], ids=["mean", "multi-sample"])
@pytest.mark.parametrize(
    ("num_steps", "particles"), [(2, 2), pytest.param(3, 2, marks=pytest.mark.slow), (2, 4), (3, 1)]
)
def test_ais_gradient_is_that_of_the_sum_over_all_accept_paths(
    make, multi_sample, num_steps, particles, monkeypatch
):
    """The surrogate's mean over the bits has the gradient of the mean bound, at frozen noise."""
    kernel = make()
    kernel.step_size.value.mul_(2)
    problem = Problem(kernel, num_steps, seed=num_steps)
    noise = torch.randn(num_steps, particles, 2)
    exact, estimate, total, telling = 0.0, 0.0, 0.0, 0.0
    for path in itertools.product([0.0, 1.0], repeat=particles * (num_steps - 1)):
        bits = iter(torch.tensor(path).reshape(num_steps - 1, particles))
        draws = iter(noise[1:])
        monkeypatch.setattr(torch, "randn_like", lambda like, draws=draws: next(draws))
        monkeypatch.setattr(torch, "rand_like", lambda like, bits=bits: next(bits))
        chain = problem.chain(noise[0])
        log_prob = torch.stack([info.log_prob for info in chain.infos]).sum()
        if log_prob == -math.inf:
            continue  # No bit can be zero where alpha is 1, at this noise or close to it.
        bound = bound_of(chain, multi_sample)
        probability = log_prob.exp()
        exact = exact + probability * bound
        estimate = estimate + probability.detach() * (bound + accept_score(chain, multi_sample))
        telling = telling + probability.detach() * bound
        total = total + probability.item()
    assert total == pytest.approx(1.0)
    parameters = list(problem.parameters())
    expected = torch.autograd.grad(exact, parameters, retain_graph=True)
    result = torch.autograd.grad(estimate, parameters, retain_graph=True)
    without = torch.autograd.grad(telling, parameters)
    for a, b in zip(expected, result, strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-10)
    # The score-function terms matter.
    pairs = zip(expected, without, strict=True)
    assert max((a - b).abs().max() for a, b in pairs) > 1e-3


@unadjusted
@pytest.mark.parametrize("multi_sample", [False, True], ids=["mean", "multi-sample"])
def test_sis_gradient_is_that_of_finite_differences(make, multi_sample):
    problem = Problem(make(), 4)
    create_parts(problem.kernel, torch.zeros(2))

    def bound(step=0.0, directions=None):
        if directions is not None:
            for p, d in zip(problem.parameters(), directions, strict=True):
                p.data.add_(d, alpha=step)
        torch.manual_seed(3)
        return bound_of(problem.chain(torch.randn(3, 2)), multi_sample)

    parameters = dict(problem.named_parameters())
    grads = torch.autograd.grad(bound(), list(parameters.values()))
    for at, (name, p) in enumerate(parameters.items()):
        directions = [torch.zeros_like(q) for q in parameters.values()]
        directions[at] = torch.randn_like(p)
        up, down, _ = bound(1e-5, directions), bound(-2e-5, directions), bound(1e-5, directions)
        expected = ((up - down) / 2e-5).detach()
        slope = (grads[at] * directions[at]).sum()
        assert torch.allclose(slope, expected, rtol=1e-5, atol=1e-8), name
        assert slope.abs() > 1e-6, name


@kernels
def test_the_weight_of_frozen_coordinates(make, monkeypatch):
    """Padding that is masked out of both densities changes nothing."""
    if make in (KERNELS["ULA, per coordinate"], KERNELS["learned moves"]):
        pytest.skip("made for two coordinates")
    noise = torch.randn(20, 6, 3)

    def run(density, keep, movable):
        draws = iter(noise[..., :keep])
        monkeypatch.setattr(torch, "randn_like", lambda like: next(draws))
        monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, 0.7))
        evaluate = evaluator(density)
        start = evaluate(torch.ones(6, keep))
        return anneal(start, LinearSchedule(4)(), make(), evaluate, movable).log_weight

    padded = run(lambda z: correlated(z[..., :2]), 3, torch.tensor([1.0, 1.0, 0.0]))
    assert torch.allclose(padded, run(correlated, 2, None))


def test_the_score_needs_an_adjusted_kernel():
    evaluate = evaluator(correlated)
    start = evaluate(torch.randn(1, 2))
    with pytest.raises(ValueError, match="not adjusted: its chain has no accept bits"):
        accept_score(anneal(start, LinearSchedule(3)(), ULA(0.1), evaluate))


@pytest.mark.parametrize("multi_sample", [False, True], ids=["mean", "multi-sample"])
def test_what_all_chains_gain_scores_no_decision(multi_sample):
    """The baseline is the mean of the other chains, with this sign."""
    log_prob, zeros = torch.randn(3, 2, requires_grad=True), torch.zeros(3, 2)
    state = State(torch.zeros(3, 2, 1), zeros, zeros)
    info = Info(zeros, zeros.exp(), zeros == 0, log_prob)
    gain = torch.randn(2).expand(3, 2)
    chain = Chain(gain, state, state, [info], [gain], past=[zeros])
    assert torch.allclose(accept_score(chain, multi_sample), torch.zeros(2), atol=1e-12)
