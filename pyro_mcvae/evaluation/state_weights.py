"""The evidence of a truncated posterior: its states exactly, all others by importance sampling."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from pyro import poutine
from torch import Tensor

from pyro_mcvae.evaluation.annealing import Annealing
from pyro_mcvae.evaluation.arguments import Options
from pyro_mcvae.evaluation.importance_sampler import (
    ImportanceSampler,
    check_no_local_points,
    shared_factors,
)
from pyro_mcvae.evaluation.weights import Weighed, WeightSummary
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.impossible import with_impossible_data
from pyro_mcvae.programs.progress import Progress
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_delta, is_latent
from pyro_mcvae.programs.terms import scored
from pyro_mcvae.truncated.guide import TruncatedPosterior, new_posterior
from pyro_mcvae.truncated.posterior import StatePosterior
from pyro_mcvae.truncated.search import Population, take_rows
from pyro_mcvae.truncated.states import StateSpace

__all__ = ["StateWeights", "draw_steps", "log_step"]


def draw_steps(values: Tensor, sizes: Tensor, ordinal: Tensor) -> Tensor:
    r"""
    Another value of each entry.

    Where values have no order, a uniform one. A count goes up or down, each with probability 1/2
    where both ways lead to a value, by a distance

    .. math:: P(j) = \log \frac{j + 1}{j} / \log(m + 1), \quad j = 1, \dots, m,

    with m the farthest value: all scales of distance have about the same chance, so that counts
    without an upper bound are proposed near those that are likely, and every other may be.

    :param values: int64, shape ``[..., D]``.
    :param sizes: how many values each entry has, ``[D]``.
    :param ordinal: which entries are counts, ``[D]``.
    :returns: of that shape; the same value where an entry has one only.
    """
    uniform = torch.rand(values.shape, device=values.device)
    step = torch.minimum(1 + (uniform * (sizes - 1)).long(), sizes - 1)
    other = (values + step) % sizes
    if not bool(ordinal.any()):
        return other
    above = sizes - 1 - values
    farthest = torch.maximum(above, values)
    distance = (farthest + 1).double().pow(uniform).long()
    distance = torch.minimum(distance.clamp_min(1), farthest)
    up = torch.rand(values.shape, device=values.device) < 0.5
    up = (up & (distance <= above)) | (distance > values)
    return torch.where(ordinal, values + torch.where(up, distance, -distance), other)


def log_step(begun: Tensor, reached: Tensor, size: int, ordinal: bool) -> Tensor | float:
    """
    The log probability of :func:`draw_steps` for one entry, where the two values differ.

    :param begun: int64, and ``reached`` likewise; they broadcast.
    """
    if not ordinal:
        return -math.log(size - 1)
    above = size - 1 - begun
    distance = (reached - begun).abs().clamp_min(1)
    # The other way does not lead to a value.
    alone = distance > torch.where(reached > begun, begun, above)
    chance = (1 / distance).log1p() / torch.maximum(above, begun).log1p()
    return chance.log() - math.log(2) * ~alone


# How many entries of a state a proposal changes on average: near the states, and farther off.
_CHANGES = 1.0, 4.0


class StateWeights(ImportanceSampler):
    r"""
    Weights of mean :math:`p(x_n)` around the states :math:`\Phi_n` of a truncated posterior:

    .. math::
        w = \sum_{z \in \Phi_n} p(x_n, z) + 1[z' \notin \Phi_n] \frac{p(x_n, z')}{r(z')}, \qquad
        z' \sim r ,

    where r draws a state by its weight and changes each entry with a small probability (a count
    rather to values near by), so that every state may be drawn.

    :ivar guide: the truncated posterior.
    :ivar posterior: its states.
    :raises ValueError: for a truncated posterior of another model, and for one whose own ``guide``
        draws further latents.
    """

    remedy = "Search on (guide.fit(..., num_steps=100)), or keep more states (num_states=)"

    def __init__(self, programs: Programs, options: Options, progress: Progress) -> None:
        self.guide = _with_states(programs)
        self.programs = replace(programs, model=with_impossible_data(programs.model))
        self.progress, self._options, self.annealing = progress, options, None
        self.posterior = self.guide.posterior(*programs.args, **programs.kwargs)
        self.reference = self.posterior.states.sample
        self.given = _points(self.posterior)
        self._populations = [p for p in self.posterior.states.populations if p is not None]

    loops = False

    @property
    def chunk_size(self) -> int:
        return self._options.chunk(
            max(p.keys.numel() + p.packed.shape[0] * len(p.space) for p in self._populations)
        )

    def weigh(self, count: int) -> Weighed:
        outside, runs = _outside(self.posterior, count)
        bound = self.posterior.free_energy.expand(outside.shape)
        return Weighed(torch.logaddexp(bound, outside), runs)

    def bound(self, summary: WeightSummary) -> Tensor:
        """The exact part."""
        return self.posterior.free_energy

    def pareto_k(self, summary: WeightSummary) -> Tensor:
        k, spaces = summary.pareto_k, [p.space for p in self._populations]
        if all(space.cardinality == self.guide.num_states for space in spaces):
            return k
        # If not even all single changes could be drawn, finding nothing says little.
        few = summary.num_particles < max(space.num_moves for space in spaces)
        return k.masked_fill(k.isneginf(), math.nan) if few else k

    def shared(self) -> Tensor:
        return shared_factors(self.reference, ())

    def annealed(self, annealing: Annealing) -> ImportanceSampler:
        raise ValueError(
            "the states of a TruncatedPosterior are discrete, and no chain moves them: leave out "
            "schedule and kernel"
        )

    def on(self, programs: Programs, joint: bool = False) -> ImportanceSampler:
        options = replace(self._options, joint=joint or self._options.joint)
        found = ImportanceSampler(programs, options, self.progress)
        mine, theirs = self.reference.subsamples, found.reference.subsamples
        for name in mine.keys() & theirs.keys():
            if not torch.equal(mine[name], theirs[name]):
                raise ValueError(f"plate '{name}' draws a minibatch of its own")
        return found


def _with_states(programs: Programs) -> TruncatedPosterior:
    """The guide, or one like it for any data if it has no states yet."""
    guide = poutine.unwrap(programs.guide)
    assert isinstance(guide, TruncatedPosterior)
    if programs.model != guide.model:
        raise ValueError(
            "the TruncatedPosterior is of another model than the one that is evaluated: pass the "
            "model that it was made with"
        )
    return guide if guide.has_states else new_posterior(guide, guide.model).eval()


def _points(posterior: StatePosterior) -> tuple[str, ...]:
    """
    The point masses of the posterior's own ``guide``.

    :raises ValueError: for latents that it draws, and for point masses in the data's plates.
    """
    sites = [s for s in scored(posterior.states.runs.guide_trace) if is_latent(s)]
    for site in sites:
        if not is_delta(site["fn"]):
            raise ValueError(
                f"the guide= of the TruncatedPosterior draws site '{site['name']}', and the "
                f"evaluators take only its states: average guide.posterior(...).free_energy over "
                f"such draws for a lower bound, or make the site a point mass"
            )
    sample = posterior.states.sample
    local = {t.key.name for t in sample.runs[0].terms if t.in_guide and sample.is_local(t)}
    points = tuple(sorted(s["name"] for s in sites))
    check_no_local_points(local.intersection(points))
    return points


def _outside(posterior: StatePosterior, count: int) -> tuple[Tensor, list[Run]]:
    """
    The rest of the evidence, by states near those that are kept.

    :returns: log p / r, minus infinity at states that are kept, ``[count, *plates]``; and the runs.
    """
    runs = posterior.states.runs
    rest: list[Tensor | None] = [None] * len(posterior.states.populations)
    states = list(rest)
    for b, _ in runs.layouts.searched:
        population = posterior.states.populations[b]
        assert population is not None
        states[b], log_proposal, known = _propose(population, count)
        rest[b] = (-log_proposal).masked_fill(known, -math.inf).t()
    sample = runs.run(states, count)
    joint = runs.mask_impossible(sample, sample.log_weight)
    outside = [
        # Without discrete sites nothing is outside.
        torch.full_like(part, -math.inf) if found is None else found.reshape(part.shape)
        for part, found in zip(sample.split(joint), rest, strict=True)
    ]
    return joint + sample.join(outside), sample.runs


def _propose(population: Population, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    States near those of a population.

    :returns: states ``[E, count, D]``; and, ``[E, count]``, the log probability of proposing them,
        and which of them are kept.
    """
    space, kept = population.space, population.states
    sizes = torch.tensor(space.sizes, device=kept.device)
    rates = torch.tensor(_rates(population), device=kept.device)
    log_weight = population.log_joint.log_softmax(-1)
    chosen = torch.distributions.Categorical(logits=log_weight).sample((count,)).t()
    begun = take_rows(kept, chosen).long()
    rate = rates[torch.randint(len(rates), begun.shape[:2], device=kept.device)]
    changed = torch.rand(begun.shape, device=kept.device) < rate.unsqueeze(-1)
    ordinal = torch.tensor(space.ordinal, device=kept.device)
    states = torch.where(changed, draw_steps(begun, sizes, ordinal), begun).to(kept.dtype)
    keys = space.keys(space.pack(states))
    known = (keys.unsqueeze(-1) == population.keys.unsqueeze(1)).any(-1)
    distances = _log_distances(states, kept, space, _rates(population))
    return states, (log_weight.unsqueeze(1) + distances).logsumexp(-1), known


def _rates(population: Population) -> list[float]:
    return [min(0.5, change / len(population.space)) for change in _CHANGES]


def _log_distances(states: Tensor, kept: Tensor, space: StateSpace, rates: list[float]) -> Tensor:
    """The log probability of each state from each that is kept, ``[E, count, S]``."""
    apart = torch.zeros(*states.shape[:2], kept.shape[1], device=kept.device)
    steps = torch.zeros_like(apart)
    for d, (size, ordinal) in enumerate(zip(space.sizes, space.ordinal, strict=True)):
        if size > 1:
            reached, begun = states[:, :, d].long().unsqueeze(-1), kept[:, :, d].long().unsqueeze(1)
            other = (reached != begun).to(apart.dtype)
            apart += other
            steps += log_step(begun, reached, size, ordinal) * other
    entries = sum(size > 1 for size in space.sizes)
    parts = [
        apart * math.log(rate) + (entries - apart) * math.log1p(-rate) + steps for rate in rates
    ]
    return torch.stack(parts).logsumexp(0) - math.log(len(parts))
