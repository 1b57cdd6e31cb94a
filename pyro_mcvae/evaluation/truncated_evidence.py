"""The evidence of a truncated posterior: its states exactly, all others by importance sampling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_mcvae.evaluation.evaluation_mode import evaluation_mode
from pyro_mcvae.evaluation.options import Options
from pyro_mcvae.evaluation.progress import Progress
from pyro_mcvae.evaluation.weight_summary import WeightSummary
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.truncated.guide import TruncatedPosterior
from pyro_mcvae.truncated.posterior import StatePosterior
from pyro_mcvae.truncated.search import Population

__all__ = ["TruncatedWeights"]

# How many entries of a state a proposal changes on average: near the states, and farther off.
_CHANGES = 1.0, 4.0


class TruncatedWeights:
    r"""
    Weights of mean :math:`p(x_n)` around the states :math:`\Phi_n` of a truncated posterior:

    .. math::
        w = \sum_{z \in \Phi_n} p(x_n, z) + 1[z' \notin \Phi_n] \frac{p(x_n, z')}{r(z')}, \qquad
        z' \sim r ,

    where r draws a state by its weight and changes each entry with a small probability, so that
    every state may be drawn.

    :ivar summary: of the weights.
    :ivar bound: the logarithm of the exact part, ``[*plates]``.
    :ivar sample: a run of the model, for the plates.
    :raises ValueError: for what a truncated posterior does not say, naming it.
    """

    def __init__(self, programs: Programs, options: Options) -> None:
        guide = programs.guide
        assert isinstance(guide, TruncatedPosterior)
        _check(programs, guide, options)
        with (
            evaluation_mode(programs.model, guide, seed=options.seed),
            torch.no_grad(),
            Progress("judging", options.progress, "particle") as progress,
        ):
            posterior = guide.posterior(*programs.args, **programs.kwargs)
            self.sample, self.bound = posterior.weighted, posterior.free_energy
            _check_terms(self.sample)
            self.summary = WeightSummary(options.num_particles)
            progress.expect(options.num_particles)
            for count in _chunks(posterior, options):
                self.summary.add(_draw(posterior, count, self.bound))
                progress.step(count)


def _chunks(posterior: StatePosterior, options: Options) -> list[int]:
    numbers = max(
        p.keys.numel() + p.packed.shape[0] * len(p.space)
        for p in posterior.populations
        if p is not None
    )
    size = options.chunk(numbers)
    full, rest = divmod(options.num_particles, size)
    return [size] * full + [rest] * (rest > 0)


def _draw(posterior: StatePosterior, count: int, bound: Tensor) -> Tensor:
    """Log weights, ``[count, *plates]``."""
    runs, outside = posterior.runs, []
    states: list[Tensor | None] = [None] * len(posterior.populations)
    for b, population in enumerate(posterior.populations):
        if population is not None:
            states[b], log_proposal, known = _propose(population, count)
            outside.append((-log_proposal).masked_fill(known, -math.inf).t())
    sample = runs.run(states, count)
    joint = runs.mask_impossible(sample, sample.log_weight)
    shape = [count, *joint.shape[1:]]
    rest = outside[0].reshape(shape) if len(outside) == 1 else torch.cat(outside, 1)
    return torch.logaddexp(bound.expand(shape), joint + rest)


def _propose(population: Population, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    States near those of a population.

    :returns: states ``[E, count, D]``, the logarithm of their probability, and which of them the
        population has, both ``[E, count]``.
    """
    space, kept = population.space, population.states
    log_weight = population.log_joint.log_softmax(-1)
    sizes = torch.tensor(space.sizes, device=kept.device)
    rates = [min(0.5, change / len(sizes)) for change in _CHANGES]
    chosen = torch.distributions.Categorical(logits=log_weight).sample((count,)).t()
    begun = kept.gather(1, chosen.unsqueeze(-1).expand(-1, -1, kept.shape[-1])).long()
    rate = torch.tensor(rates, device=kept.device)[
        torch.randint(len(rates), begun.shape[:2], device=kept.device)
    ]
    changed = torch.rand(begun.shape, device=kept.device) < rate.unsqueeze(-1)
    step = 1 + (torch.rand(begun.shape, device=kept.device) * (sizes - 1)).long()
    step = torch.minimum(step, (sizes - 1).clamp_min(1))
    states = torch.where(changed & (sizes > 1), (begun + step) % sizes, begun).to(kept.dtype)
    keys = space.keys(space.pack(states))
    known = (keys.unsqueeze(-1) == population.keys.unsqueeze(1)).any(-1)
    distances = _log_distances(states, kept, sizes, rates)
    log_proposal = (log_weight.unsqueeze(1) + distances).logsumexp(-1)
    return states, log_proposal, known


def _log_distances(states: Tensor, kept: Tensor, sizes: Tensor, rates: list[float]) -> Tensor:
    """The log probability of each state from each that is kept, ``[E, count, S]``."""
    apart = torch.zeros(*states.shape[:2], kept.shape[1], device=kept.device)
    ways = torch.zeros_like(apart)
    for d, size in enumerate(sizes.tolist()):
        if size > 1:
            other = (states[:, :, d].unsqueeze(-1) != kept[:, :, d].unsqueeze(1)).to(apart.dtype)
            apart += other
            ways += math.log(size - 1) * other
    entries = int((sizes > 1).sum())
    parts = [
        apart * math.log(rate) + (entries - apart) * math.log1p(-rate) - ways for rate in rates
    ]
    return torch.stack(parts).logsumexp(0) - math.log(len(parts))


def _check(programs: Programs, guide: TruncatedPosterior, options: Options) -> None:
    if options.schedule is not None or options.kernel is not None:
        raise ValueError(
            "the states of a TruncatedPosterior are discrete, and no chain moves them: leave out "
            "schedule and kernel"
        )
    if guide.guide is not None:
        raise ValueError(
            "the TruncatedPosterior has a guide of other latents, of which one draw would be held: "
            "its evidence is estimated for models all of whose latents are searched; "
            "TraceTruncated_ELBO().bounds gives the bound"
        )
    if programs.model != guide.model:
        raise ValueError(
            "the TruncatedPosterior is of another model than the one that is judged: pass the "
            "model that it was made with"
        )


def _check_terms(sample: WeightedParticles) -> None:
    for term in sample.global_terms():
        raise ValueError(
            f"site '{term.key.name}' lies outside of the data's plates, and belongs to no datum: "
            f"put it into the plate, or use TraceTruncated_ELBO().bounds"
        )
