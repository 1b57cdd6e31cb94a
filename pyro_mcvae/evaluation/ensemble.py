"""Chains in white coordinates that start at modes or at draws, and a verdict on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from pyro.ops.stats import effective_sample_size
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from pyro_mcvae.chains.kernels import HMC, State, Target
from pyro_mcvae.chains.parameters import AdaptiveStepSize
from pyro_mcvae.evaluation.clock import OutOfTimeError
from pyro_mcvae.evaluation.laplace import LogDensity, Mode
from pyro_mcvae.ops.tensors import follow
from pyro_mcvae.ops.weights import pareto_k

# Number of chains. Transitions of a window of the warm-up, the fewest windows and the most. Numbers
# of transitions at which the draws are checked, and from which on the chains stop if errors are not
# small enough after the largest number. The length of a trajectory, and the most leapfrog
# steps.
_CHAINS, _MOVES, _FEWEST_WINDOWS, _MOST_WINDOWS = 100, 4, 6, 40
_CHECKED, _HOPELESS = (20, 40, 80, 160, 320), 80
# The fewest transitions whose draws are returned when the time budget ends.
_FEWEST_KEPT = 10
_LENGTH, _MOST_STEPS = 2.0, 32
# First positions are moved towards their mode, at most so often, until their density is at most so
# many nats below that of the mode, besides twice what a normal density has less there. The largest
# change of the logarithm of the step size over three windows at which it counts as adapted.
_SHRINKS, _LOW, _STEADY = 20, 10.0, 0.2
# The largest split R-hat. The largest error of a mean, in standard deviations, and of the logarithm
# of a standard deviation. The largest distance of a chain from the others, in standard deviations
# of the means of chains. The smallest acceptance of a chain.
_R_HAT, _ERROR, _AWAY, _SLOW = 1.02, 0.055, 8.0, 0.1
# The share of draws at either end of a value, and the largest share of proposals from there that
# are rejected. Chains that hardly leave a region hardly enter it either, such as the neck of a
# funnel, and most of it can be missing.
_END, _REJECTED = 0.05, 0.75
# Fewer draws are checked as so many: they are from the same chains, but have larger errors. The
# errors of chains are limited, and those of draws that are selected from them by 1.4 times as much.
_FEWEST = 1000


@dataclass(frozen=True)
class Verdict:
    r"""
    Whether posterior draws can be used.

    :ivar method: how they were drawn.
    :ivar reasons: why they cannot be trusted; empty if they can.
    :ivar pareto_k: the largest tail index of the weights. Without a guide the weights are those of
        independent draws from normal densities that are fitted to the chains.
    :ivar r_hat: the largest split :math:`\hat R` of a value, over groups of chains with different
        starts and over the halves of each; NaN without chains that are kept.
    :ivar effective_sample_size: the smallest of a value or of its squared deviation from the mean.
    :ivar acceptance: the mean acceptance of chains; NaN without.
    :ivar modes: for each mode that starts found, its log density over unconstrained coordinates,
        and the share of the draws that are nearest to it.
    :ivar num_evaluations: how often the model and its gradient were evaluated, for all chains
        together.
    """

    method: str
    reasons: tuple[str, ...]
    pareto_k: float
    effective_sample_size: float
    r_hat: float = math.nan
    acceptance: float = math.nan
    modes: tuple[tuple[float, float], ...] = ()
    num_evaluations: int = 0

    @property
    def trusted(self) -> bool:
        """Return whether the draws can be used."""
        return not self.reasons

    def __str__(self) -> str:
        # Of chains without weights, it says only how often proposals change modes.
        name = "Pareto k" if math.isnan(self.r_hat) else "Pareto k of proposals"
        numbers = {name: self.pareto_k, "R-hat": self.r_hat, "acceptance": self.acceptance}
        known = [f"{n} {x:.2f}" for n, x in numbers.items() if not math.isnan(x)]
        lines = [", ".join([self.method, f"ESS {self.effective_sample_size:.0f}", *known])]
        if len(self.modes) > 1:
            modes = (f"log density {at:.1f} ({share:.0%} of draws)" for at, share in self.modes)
            lines.append(f"{len(self.modes)} modes: {', '.join(modes)}")
        if self.trusted:
            lines.append("These draws can be trusted, if no mode is missed.")
        else:
            lines.append(f"These draws cannot be trusted: {'; '.join(self.reasons)}.")
        return "\n".join(lines)


class Ensemble:
    """
    Chains that move in parallel, in coordinates that are fitted to all of them.

    :param LogDensity density: the log density of the posterior.
    :param ~torch.Tensor position: the first positions, ordered by start, shape ``[chains, D]``.
    :param ~torch.Tensor start: the index of the start of each chain.
    """

    def __init__(self, density: LogDensity, position: Tensor, start: Tensor, factor: Tensor):
        self.density, self.position, self._start = density, position, start
        self._mean, self._factor = position.mean(0), factor
        self.kernel = HMC(AdaptiveStepSize(0.5, rate=0.3), num_leapfrog=4, jitter=0.6)
        follow(self.kernel, position)
        self._target = Target(self.evaluate, position.new_ones(()))
        self._positions: list[Tensor] = []
        self._densities: list[Tensor] = []
        self._acceptances: list[Tensor] = []
        self._log_weights: list[Tensor] = []

    @classmethod
    def at_modes(
        cls, density: LogDensity, modes: list[Mode], draws: Tensor | None = None
    ) -> Ensemble:
        """
        Start as many chains from the normal density of each mode.

        :param draws: start half of the chains from these.
        """
        count = _CHAINS if draws is None else _CHAINS // 2
        start = torch.arange(count, device=density.like.device) * len(modes) // count
        means = torch.stack([m.mean for m in modes])[start]
        factors = torch.stack([m.factor for m in modes])[start]
        heights = means.new_tensor([m.log_density for m in modes])[start]
        noise = torch.randn_like(means)
        for _ in range(_SHRINKS):  # far below the normal density, gradients can be steep
            position = means + torch.einsum("kij,kj->ki", factors, noise)
            low = density(position)[0] < heights - noise.square().sum(-1) - _LOW
            if not low.any():
                break
            noise = torch.where(low[:, None], 0.5 * noise, noise)
        if draws is not None:
            draws = draws[~density(draws)[0].isinf()][:count]
            position = torch.cat([position, draws])
            start = torch.cat([start, torch.full_like(start[: len(draws)], len(modes))])
        return cls(density, position, start, modes[0].factor)

    def log_weight(self, position: Tensor, log_density: Tensor) -> Tensor:
        """Return the log weights of positions relative to the fitted normal densities."""
        log_normal = self._fitted.log_prob(self._white(position))
        return log_density - log_normal + self._factor.diagonal().log().sum()

    def evaluate(self, white: Tensor) -> State:
        """Return the state of the kernel at white coordinates."""
        value, gradient = self.density(self._mean + white @ self._factor.mT)
        zero = torch.zeros_like(white)
        return State(white, zero[:, 0], value, zero, gradient @ self._factor)

    def _white(self, position: Tensor) -> Tensor:
        moved = (position - self._mean).mT
        return torch.linalg.solve_triangular(self._factor, moved, upper=False).mT

    def warm_up(self) -> None:
        """Adapt the step size and the coordinates, until the density no longer rises or falls."""
        step_size, means, sizes = self.kernel.step_size, list[Tensor](), list[float]()
        assert isinstance(step_size, AdaptiveStepSize)
        for window in range(_MOST_WINDOWS):
            state, acceptances = self.evaluate(self._white(self.position)), list[Tensor]()
            for _ in range(_MOVES):
                state, info = self.kernel.step(state, self._target)
                acceptances.append(info.acceptance)
                step_size.update(info.acceptance.mean())
                steps = math.ceil(_LENGTH / float(step_size()))
                self.kernel.num_leapfrog = max(1, min(_MOST_STEPS, steps))
            white = state.position[self._moving(torch.stack(acceptances).mean(0))]
            self.position = self._mean + white @ self._factor.mT
            self._fit(white)
            step_size.rate = max(0.1, 0.8 * step_size.rate)
            means.append(state.log_weight.mean())
            sizes.append(math.log(float(step_size())))
            error = state.log_weight.std() / len(self.position) ** 0.5
            if window < _FEWEST_WINDOWS or abs(sizes[-1] - sizes[-4]) > _STEADY:
                continue
            if (means[-1] - means[-4]).abs() < 2 * error:
                break
        self.kernel.eval()

    def _moving(self, acceptance: Tensor) -> Tensor:
        """
        Return the index of each chain, or of another one of its start if it hardly moves.

        Near some modes all scales are much smaller than in most of the posterior.
        """
        index = torch.arange(len(acceptance), device=acceptance.device)
        for i in self._start.unique():
            group, moves = self._start == i, acceptance > _SLOW
            if (group & moves).sum() > 0.8 * group.sum():
                others = index[group & moves]
                chosen = torch.randint(len(others), (int((group & ~moves).sum()),))
                index[group & ~moves] = others[chosen.to(others.device)]
        return index

    def _fit(self, white: Tensor) -> None:
        """Fit white coordinates to all chains, and a normal density to those of each start."""
        count, dim = white.shape
        groups = [white[self._start == i] for i in self._start.unique()]
        shrinkage, eye = dim / (count + dim), torch.eye(dim).to(white)
        within = torch.cat([group - group.mean(0) for group in groups])
        covariance = within.mT @ within / max(1, count - len(groups))
        step = torch.linalg.cholesky((1 - shrinkage) * covariance + shrinkage * eye)
        self._mean = self._mean + self._factor @ white.mean(0)
        away = torch.stack([group.mean(0) - white.mean(0) for group in groups])
        locs = torch.linalg.solve_triangular(step, away.mT, upper=False).mT
        self._factor = self._factor @ step
        normals = MultivariateNormal(locs, scale_tril=eye)
        self._fitted = MixtureSameFamily(Categorical(torch.ones(len(locs)).to(white)), normals)

    def sample(self, num_samples: int) -> list[str]:
        """
        Move the chains until draws can be trusted, or for the largest number of transitions.

        :returns: the reasons why they cannot be trusted.
        """
        state = self.evaluate(self._white(self.position))
        jumps = 1.0
        for checked in _CHECKED:
            try:
                while len(self._positions) < checked:
                    state, info = self.kernel.step(state, self._target)
                    if jumps > 0.02:
                        state, jumps = self._jump(state)
                    self._positions.append(self._mean + state.position @ self._factor.mT)
                    self._densities.append(state.log_weight)
                    self._acceptances.append(info.acceptance)
            except OutOfTimeError:
                if len(self._positions) < _FEWEST_KEPT:
                    raise
                ended = f"the time budget ended after {len(self._positions)} transitions"
                return [*self._check(num_samples), ended]
            reasons = self._check(num_samples)
            needed = checked * self.excess**2
            if not reasons or (checked >= _HOPELESS and needed > 2 * _CHECKED[-1]):
                break
        return reasons

    def _jump(self, state: State) -> tuple[State, float]:
        """Propose independent draws of the fitted normal densities, which can change modes."""
        new = self.evaluate(self._fitted.sample(state.log_weight.shape))
        log_weight, old = (s.log_weight - self._fitted.log_prob(s.position) for s in (new, state))
        self._log_weights.append(log_weight)
        accepted = torch.rand_like(old).log() < log_weight - old
        state = State(
            torch.where(accepted[:, None], new.position, state.position),
            state.log_base,
            torch.where(accepted, new.log_weight, state.log_weight),
            state.grad_base,
            torch.where(accepted[:, None], new.grad_weight, state.grad_weight),  # type: ignore[arg-type]
        )
        return state, float((log_weight - old).clamp(max=0.0).exp().mean())

    def kept(self) -> Tensor:
        """Return the positions without the first quarter, shape ``[chains, transitions, D]``."""
        return torch.stack(self._positions[len(self._positions) // 4 :], 1)

    def _check(self, num_samples: int) -> list[str]:
        positions = self.kept()
        names, values = self.density.values(positions.flatten(0, 1))
        values = values.reshape(*positions.shape[:2], -1)
        begin = len(self._positions) - positions.shape[1]
        log_density = torch.stack(self._densities[begin:], 1).unsqueeze(-1)
        values = torch.cat([values, log_density], -1)
        mean, sd = values.mean((0, 1)), values.std((0, 1))
        varies = sd > 4 * torch.finfo(sd.dtype).eps * mean.abs()  # unlike zeros of a factor
        varies[-1] = True
        names = [n for n, v in zip([*names, "log density"], varies.tolist(), strict=True) if v]
        deviations = ((values - mean) / sd.clamp_min(1e-30))[..., varies]
        squares = deviations.square()
        sizes = [effective_sample_size(x, 0, 1).nan_to_num(0.0) for x in (deviations, squares)]
        least = [size[:-1].clamp(1.0, 2 * max(num_samples, _FEWEST)) for size in sizes]
        errors = least[0].rsqrt(), 0.5 * squares.std((0, 1))[:-1] * least[1].rsqrt()
        z = normal_scores(deviations)
        r_hats = split_r_hat(z, squares)
        of_chains = z.mean(1)
        away = (of_chains / of_chains.std(0)).abs().amax(0)
        acceptances = torch.stack(self._acceptances[begin:], 1)
        rejected = 1 - at_ends(deviations[:, :-1, :-1], acceptances[:, 1:])
        acceptance = acceptances.mean(1)
        self.r_hat, self.acceptance = float(r_hats.max()), acceptance
        self.size = float(torch.stack(sizes).min())
        self.k = float(pareto_k(torch.cat(self._log_weights)))
        self.excess = max(float(e.max()) for e in errors) / _ERROR
        reasons = []
        checks = (
            (r_hats, _R_HAT, "R-hat of {} is {:.2f}: chains from different starts disagree"),
            (errors[0], _ERROR, "the mean of {} has an error of {:.2f} standard deviations"),
            (errors[1], _ERROR, "the standard deviation of {} has a relative error of {:.2f}"),
            (away, _AWAY, "a chain stays away from the others in {}, by {:.0f} of its errors"),
            (rejected, _REJECTED, "chains hardly move at an end of {}: {:.0%} are rejected there"),
        )
        for numbers, limit, text in checks:
            i = int(numbers.nan_to_num(math.inf).argmax())
            if not float(numbers[i]) <= limit:
                reasons.append(text.format(names[i], float(numbers[i])))
        slow = int((acceptance < _SLOW).sum())
        if slow:
            reasons.append(f"{slow} of {len(acceptance)} chains hardly move")
        return reasons


def at_ends(starts: Tensor, acceptance: Tensor) -> Tensor:
    """
    Return the smaller of the mean acceptances where a value is small and where it is large.

    :param starts: shape ``[chains, transitions, D]``.
    :param acceptance: of the transitions that start there, shape ``[chains, transitions]``.
    """
    order = starts.flatten(0, 1).argsort(0)
    count = math.ceil(_END * len(order))
    ends = torch.stack([order[:count], order[-count:]])
    return acceptance.flatten()[ends].mean(1).amin(0)


def normal_scores(draws: Tensor) -> Tensor:
    """Return the normal scores of ranks, for draws of shape ``[chains, transitions, D]``."""
    columns = draws.flatten(0, 1).mT.contiguous()
    ordered = columns.sort(-1).values
    # Equal draws have the mean of their ranks.
    ranks = torch.searchsorted(ordered, columns) + torch.searchsorted(ordered, columns, right=True)
    scores = torch.special.ndtri((ranks.to(draws) / 2 + 0.125) / (columns.shape[-1] + 0.25))
    return scores.mT.reshape(draws.shape)


def split_r_hat(*draws: Tensor, groups: int = 4) -> Tensor:
    r"""
    Return the largest split :math:`\hat R` of some values, over groups of chains and halves.

    :param draws: shape ``[chains, transitions, D]`` each, the chains ordered by start.
    """
    r_hats = []
    for z in map(normal_scores, draws):
        half = z.shape[1] // 2
        parts = [p.flatten(0, 1) for h in (z[:, :half], z[:, -half:]) for p in h.chunk(groups)]
        between = torch.stack([part.mean(0) for part in parts]).var(0)
        r_hats.append((1 + between / torch.stack([part.var(0) for part in parts]).mean(0)).sqrt())
    return torch.stack(r_hats).amax(0)
