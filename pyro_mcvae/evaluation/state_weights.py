"""The evidence of a truncated posterior: its states exactly, all others by importance sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from pyro import poutine
from torch import Tensor

from pyro_mcvae.evaluation import preconditions
from pyro_mcvae.evaluation.annealing import Annealing
from pyro_mcvae.evaluation.importance_sampler import ImportanceSampler
from pyro_mcvae.evaluation.options import Options
from pyro_mcvae.evaluation.weights import Weighed, Weights, WeightSummary, shared_factors
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.impossible import with_impossible_data
from pyro_mcvae.programs.progress import Progress
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_latent
from pyro_mcvae.programs.terms import guide_term, scored
from pyro_mcvae.truncated.guide import TruncatedPosterior, new_posterior
from pyro_mcvae.truncated.posterior import StatePosterior
from pyro_mcvae.truncated.search import Population
from pyro_mcvae.truncated.searched_sites import SearchMessenger
from pyro_mcvae.truncated.states import StateSpace, take_rows

__all__ = ["StateWeights", "draw_steps", "log_step", "look_outside"]


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


class StateWeights(Weights):
    r"""
    Weights of mean :math:`p(x_n)` around the states :math:`\Phi_n` of a truncated posterior:

    .. math::
        w = \sum_{z \in \Phi_n} p(x_n, z) + 1[z' \notin \Phi_n] \frac{p(x_n, z')}{r(z')}, \qquad
        z' \sim r ,

    where r draws a state by its weight and changes each entry with a small probability (a count
    rather to values near by), so that every state may be drawn.

    Latents of the posterior's own ``guide`` are drawn anew for each weight, and their p / q is part
    of it: one weight of all data, where these share one; with ``joint=False`` such a draw is held.

    :ivar guide: the truncated posterior.
    :ivar posterior: the states, given that draw of ``guide`` if it makes any.
    :raises ValueError: for what a truncated posterior does not say, naming it.
    """

    remedy = "Search on (guide.fit(..., num_steps=100)), or keep more states (num_states=)"

    def __init__(self, programs: Programs, options: Options, progress: Progress) -> None:
        self.guide = _asked(programs)
        self.programs = replace(programs, model=with_impossible_data(programs.model))
        self.progress, self._options = progress, options
        self.posterior = self._ask()
        self.reference = self.posterior.particles
        self._latents = latents = _other_latents(self.posterior, programs, self.guide)
        if options.joint is not False and latents.common:
            preconditions.check_no_minibatch(self.reference.runs[0], latents.common)
        held = latents.common if options.joint is False else ()
        self.given = (*latents.points, *held)
        self._held, self._drawn = held, frozenset(latents.common) - {*held}
        # Whether each weight has other latents of its own.
        self._renews = bool(self._drawn or latents.own)
        self._bound = WeightSummary(options.num_particles)

    def _ask(self) -> StatePosterior:
        return self.guide.posterior(*self.programs.args, **self.programs.kwargs)

    @property
    def plates(self) -> tuple[str, ...]:
        return () if self._drawn else self.reference.plate_names

    @property
    def scale(self) -> float | Tensor:
        return 1.0 if self._drawn else self.reference.scale

    @property
    def elements(self) -> int:
        return 1 if self._drawn else super().elements

    @property
    def chunk_size(self) -> int:
        population = self.posterior.population
        return self._options.chunk(
            population.keys.numel() + population.packed.shape[0] * len(population.space)
        )

    def weigh(self, count: int) -> Weighed:
        if not self._renews:
            return Weighed(*_near(self.posterior, count))
        found, runs = [], []
        for _ in range(count):
            posterior = self._ask()
            log_weight, latest = _near(posterior, 1)
            bound, shared = posterior.free_energy, shared_factors(posterior.particles, ())
            if self._drawn:
                # What all data share is weighed with all of them.
                log_weight, bound = (w.flatten().sum() + shared for w in (log_weight[0], bound))
                log_weight = log_weight.unsqueeze(0)
            self._bound.add(bound.unsqueeze(0))
            found.append(log_weight)
            runs += latest
        return Weighed(torch.cat(found), runs)

    def bound(self, summary: WeightSummary) -> Tensor:
        """The exact part; its mean over the draws of other latents."""
        if not self._renews:
            return self.posterior.free_energy
        return self._bound.mean_log.to(self.reference.log_weight.dtype)

    def pareto_k(self, summary: WeightSummary) -> Tensor:
        k, space = summary.pareto_k, self.posterior.population.space
        if space.cardinality == self.guide.num_states:
            return k
        # That nothing was found says little where not even all single changes could be looked at.
        few = summary.num_particles < space.num_moves
        return k.masked_fill(k.isneginf(), math.nan) if few else k

    def shared(self) -> Tensor:
        if self._drawn:
            return self.reference.log_weight.new_zeros(())
        return shared_factors(self.reference, self._held)

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

    @property
    def holds_draws(self) -> bool:
        return bool(self._latents.common or self._latents.own)

    def renew(self) -> None:
        self.posterior = self._ask()


def _near(posterior: StatePosterior, count: int) -> tuple[Tensor, list[Run]]:
    """Log weights, ``[count, *plates]``, and the runs at the states outside."""
    bound, outside, runs = posterior.free_energy, *look_outside(posterior, count)[1:]
    return torch.logaddexp(bound.expand(outside.shape), outside), runs


def look_outside(
    posterior: StatePosterior, count: int, given: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor, list[Run]]:
    """
    States near those that are kept, and the rest of the evidence that they show.

    :param given: values ``[count, *batch, *event]`` by site, in the place of proposals.
    :returns: states ``[E, count, D]``; log p / r, minus infinity at states that are kept,
        ``[count, *plates]``; and the runs at them.
    """
    runs, population = posterior.runs, posterior.population
    if given is None:
        states, log_proposal, known = _propose(population, count)
    else:
        states = runs.layouts.layout.states(given, runs.data)
        log_proposal, known = _proposal_of(population, states)
    sample = runs.run(states, count)
    joint = runs.log_joint(sample)
    rest = (-log_proposal).masked_fill(known, -math.inf).t()
    return states, joint + rest.reshape(joint.shape), sample.runs


def _propose(population: Population, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    States near those of a population.

    :returns: states ``[E, count, D]``, and what :func:`_proposal_of` says of them.
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
    return states, *_proposal_of(population, states)


def _proposal_of(population: Population, states: Tensor) -> tuple[Tensor, Tensor]:
    """The log probability of proposing states, and which of them are kept; ``[E, count]``."""
    space = population.space
    keys = space.keys(space.pack(states))
    known = (keys.unsqueeze(-1) == population.keys.unsqueeze(1)).any(-1)
    distances = _log_distances(states, population.states, space, _rates(population))
    log_weight = population.log_joint.log_softmax(-1)
    return (log_weight.unsqueeze(1) + distances).logsumexp(-1), known


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


def _asked(programs: Programs) -> TruncatedPosterior:
    """The guide; where it has no states yet, one in its place, which may be of any data."""
    guide = poutine.unwrap(programs.guide)
    assert isinstance(guide, TruncatedPosterior)
    if programs.model != guide.model:
        raise ValueError(
            "the TruncatedPosterior is of another model than the one that is judged: pass the "
            "model that it was made with"
        )
    return guide if guide.has_states else new_posterior(guide, guide.model).eval()


class _OtherLatents(NamedTuple):
    """
    What the posterior's own ``guide`` says of the latents that have no states.

    :ivar points: point masses.
    :ivar common: those that all data share.
    :ivar own: those that each datum has.
    """

    points: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


def _other_latents(
    posterior: StatePosterior, programs: Programs, guide: TruncatedPosterior
) -> _OtherLatents:
    sites = [s for s in scored(posterior.runs.guide_trace) if is_latent(s)]
    if not sites:
        return _OtherLatents()
    sample = posterior.particles
    run = replace(sample.runs[0], terms=tuple(map(guide_term, sites)))
    pair = replace(programs, guide=SearchMessenger(guide.model, guide.guide))
    points = preconditions.find_points(pair, run)
    local = {t.key.name for t in sample.runs[0].terms if t.in_guide and sample.is_local(t)}
    preconditions.check_no_local_points(points & local)
    rest = sorted({s["name"] for s in sites} - points)
    own = tuple(n for n in rest if n in local)
    return _OtherLatents(tuple(sorted(points)), tuple(n for n in rest if n not in local), own)
