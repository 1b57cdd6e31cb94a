"""Importance weights with mean p(x) per datum, drawn in chunks and summarized."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_mcvae.chains.annealing import Chain, anneal
from pyro_mcvae.checks.faults import angle_errors, check_not_collapsed, check_trained
from pyro_mcvae.checks.masks import (
    check_masks,
    check_unweighed,
    masked_latents,
    with_priors,
)
from pyro_mcvae.coordinates.chain_density import (
    ChainDensity,
    WhitenedDensity,
    named,
    outside_inference_mode,
)
from pyro_mcvae.coordinates.coordinate import Coordinates, LatentValues
from pyro_mcvae.coordinates.log_weight import GradientMode, LogWeight
from pyro_mcvae.evaluation.clock import Clock, Stage
from pyro_mcvae.evaluation.options import (
    MOVES,
    Annealing,
    Counted,
    Options,
    evaluation_mode,
    whiten,
)
from pyro_mcvae.ops.checks import each_once
from pyro_mcvae.ops.tensors import follow
from pyro_mcvae.ops.weights import pareto_k, tail_length
from pyro_mcvae.particles.sampler import MakeSampleFn, ParticleSampler, WeightedParticles
from pyro_mcvae.programs.contract import nonfinite_sites
from pyro_mcvae.programs.run import Programs, Run
from pyro_mcvae.programs.sites import is_delta, is_latent, is_random, is_scored, known_support
from pyro_mcvae.programs.types import FactorKey, Site, is_subsampled
from pyro_mcvae.structure.marked import dependencies_of
from pyro_mcvae.truncated.posterior import drawn_from_states

# Summaries of weights that are drawn in chunks.


class WeightSummary:
    r"""
    Statistics of :math:`K` weights per datum. The memory grows only with :math:`\sqrt K`: the
    :math:`3 \sqrt K` largest weights of each datum are stored, to fit the tail.

    :param int num_particles: K, the total over all chunks.

    Example::

        >>> summary = WeightSummary(4)
        >>> for chunk in torch.tensor([0.0, 0.0, 0.0, 0.0]).split(2):
        ...     summary.add(chunk)
        >>> summary.log_mean.item(), summary.effective_sample_size.item()
        (0.0, 4.0)
    """

    _largest: Tensor
    _top: Tensor
    # Sums of w and w^2, relative to the largest w so far, and of log w.
    _sum: Tensor
    _squares: Tensor
    _logs: Tensor

    def __init__(self, num_particles: int) -> None:
        self.num_particles = num_particles
        self.count = 0
        self._tail = tail_length(num_particles) + 1

    def add(self, log_weight: Tensor) -> None:
        """
        Add a chunk of log weights.

        :param log_weight: a chunk, shape ``[k, *plates]``.
        """
        chunk = log_weight.detach().double()
        if not self.count:
            self._largest = torch.full_like(chunk[0], torch.finfo(chunk.dtype).min)
            self._sum = self._squares = self._logs = torch.zeros_like(chunk[0])
            self._top = chunk[:0]
        largest = torch.maximum(self._largest, chunk.amax(0))
        shrink = (self._largest - largest).exp()
        relative = (chunk - largest).exp()
        self._sum = self._sum * shrink + relative.sum(0)
        self._squares = self._squares * shrink.square() + relative.square().sum(0)
        self._logs = self._logs + chunk.sum(0)
        self._largest = largest
        top = torch.cat([self._top, chunk])
        self._top = top.topk(min(self._tail, len(top)), dim=0).values
        self.count += len(chunk)

    @property
    def log_mean(self) -> Tensor:
        """Return the logarithm of the mean weight, shape ``[*plates]``, in float64."""
        return self._largest + self._sum.log() - math.log(self.count)

    @property
    def mean_log(self) -> Tensor:
        """Return the mean of the log weights."""
        return self._logs / self.count

    @property
    def effective_sample_size(self) -> Tensor:
        """Return Kish's effective sample size; 0 if all weights are zero."""
        return torch.where(self._sum > 0, self._sum.square() / self._squares, 0.0)

    @property
    def standard_error(self) -> Tensor:
        r"""
        Return the standard error of the logarithm of the mean,
        :math:`\text{sd}(w) / (\sqrt K\, \bar w)`. It is infinite if every weight is zero, and NaN
        for one weight.
        """
        if self.count < 2:
            return torch.full_like(self.log_mean, math.nan)
        spread = 1 / self.effective_sample_size - 1 / self.count
        return (spread.clamp_min(0.0) * self.count / (self.count - 1)).sqrt()

    @property
    def pareto_k(self) -> Tensor:
        """Return the tail index of the weights; see :func:`~pyro_mcvae.ops.weights.pareto_k`."""
        return pareto_k(self._top, self.count)


# Draws log weights of a model and guide on one minibatch, in bounded memory.

_logger = logging.getLogger(__name__)

# The default limit of numbers in the draws of one chunk, over all sites.
_CHUNK = 1 << 23
# Number of chains per coordinate for white coordinates, and the limits per weight.
_PER_COORDINATE, _FEWEST, _MOST = 2, 50, 1000

# The number of chunks, at least, with a time budget.
_PARTS = 10

Density = ChainDensity | WhitenedDensity


class ImportanceSampler:
    """
    The weights of one minibatch.

    The model and guide run once. This *reference* run determines the weighted sites, and the
    minibatch (without ``joint`` also the global latents) of every chunk.

    :ivar programs: the weighted model and guide; see :func:`masked_latents`.
    :param Clock clock: the time of the call.
    :param annealing: chains instead of plain importance sampling.
    :ivar stage: the current part of the work.
    :ivar fixed_latents: latents with fixed values: point masses, and global latents drawn once.
    :ivar drawn: the global latents that are drawn once.
    :ivar fixed_sites: the corresponding sites of the model.
    :raises ValueError: for programs whose evidence cannot be estimated, naming the site.
    """

    def __init__(
        self,
        programs: Programs,
        options: Options,
        clock: Clock,
        annealing: Annealing | None = None,
    ) -> None:
        self.programs, self.annealing, self.clock = programs, annealing, clock
        self._start, self.stage = "guide", clock.stage("draws", 0, "draws")
        self._options, self._joint = options, bool(options.joint)
        self._samplers: dict[int, ParticleSampler] = {}
        with check_trained(programs.guide) as check:
            self.reference = self._sampler(1).sample(programs)
            check(self.reference.runs[0].guide_trace)
        check_not_collapsed(self.reference.structure)
        run = self.reference.runs[0]
        points = find_points(programs, run)
        check_observed(run)
        check_draws(run, points)
        self._count_alike(points)
        structure = self.reference.structure
        for name in sorted(points):
            block = structure.block_of.get(FactorKey("guide", name))
            if block is not None and structure.blocks[block].plates:
                raise ValueError(
                    f"site '{name}' of the guide is a point mass inside the data's plates, so "
                    f"importance sampling draws no other value of it. Give it a distribution, or "
                    f"observe it in the model"
                )
        drawn = tuple(sorted(self.reference.structure.global_sites.guide - points))
        if options.joint is None and drawn:
            for frame in (f for t in run.terms for f in t.site["cond_indep_stack"]):
                if is_subsampled(frame):
                    raise ValueError(
                        f"the guide's site{named(drawn)} shared by data of several minibatches, so "
                        f"that all data have one evidence together, but plate '{frame.name}' is "
                        f"subsampled ({frame.size} of {frame.full_size}). Pass the full data; or "
                        f"joint=False, for the evidence of each datum given one draw of "
                        f"{', '.join(map(repr, drawn))}"
                    )
            self._joint, self._samplers = True, {}
            self.reference, drawn = self._sampler(1).sample(self.programs), ()
        if not self.reference.blocks:
            frames = (f for t in run.terms for f in t.site["cond_indep_stack"])
            plate = next(filter(is_subsampled, frames))
            raise ValueError(
                f"no latent of the guide has a separate weight, because the subsampled plate "
                f"'{plate.name}' ({plate.size} of {plate.full_size}) does not enclose them: pass "
                f"the full data"
            )
        self.fixed_latents = tuple(sorted(points)) + drawn
        self.drawn = drawn
        self.fixed_sites = points | frozenset(drawn)

    @property
    def chunk_size(self) -> int:
        """Return the number of particles that fit one chunk."""
        traces = (t for r in self.reference.runs for t in (r.guide_trace, r.model_trace))
        values = (s["value"] for t in traces for s in t.nodes.values() if s["type"] == "sample")
        numbers = 2 * sum(v.numel() for v in values if isinstance(v, Tensor))
        return self._options.chunk_size or max(1, _CHUNK // max(1, numbers))

    def draw(self, count: int, make_sample_fn: MakeSampleFn | None = None) -> WeightedParticles:
        """
        Return independent draws of the guide, without gradients.

        :param make_sample_fn: sets other values of its sites; see :class:`ParticleSampler`.
        """
        sampler = self._sampler(count)
        return sampler.resample(self.programs, self.reference, count, make_sample_fn)

    def on(self, programs: Programs, joint: bool = False) -> ImportanceSampler:
        """
        Return a sampler for other data, with the same minibatch and fixed latents.

        :param joint: use one weight for everything, even if this sampler does not.
        """
        sampler = copy.copy(self)
        sampler.programs, sampler._samplers = programs, {}
        sampler._joint = self._joint or joint
        reference = self.reference
        sampler.reference = sampler._sampler(1).single(
            programs, reference.subsamples, reference.global_values()
        )
        return sampler

    def annealed(self, annealing: Annealing) -> ImportanceSampler:
        """Return a sampler that uses chains."""
        sampler = self.on(self.programs)
        sampler.annealing = annealing
        return sampler

    def of_prior(self) -> ImportanceSampler:
        """Return a sampler from the model's prior, which sums sites that are not in the guide."""
        run = self.reference.runs[0]
        nodes = run.model_trace.nodes
        drawn = frozenset(n for n, s in nodes.items() if is_latent(s) and n in run.guide_trace)

        def is_hidden(site: Site) -> bool:
            kept = site["type"] != "sample" or site_is_subsample(site) or site["name"] in drawn
            return not kept

        prior = poutine.block(self.programs.model, hide_fn=is_hidden)
        sampler = self.on(replace(self.programs, guide=prior), joint=self.elements == 1)
        sampler._start = "prior"
        return sampler

    def renew(self) -> None:
        """Draw the fixed global latents again, on the same minibatch."""
        self.reference = self._sampler(1).single(self.programs, self.reference.subsamples)

    def log_weight(
        self,
        count: int,
        *,
        gradient: GradientMode = GradientMode.NONE,
        coordinates: Coordinates = "noise",
        latents: dict[str, Tensor] | None = None,
    ) -> LogWeight:
        """Return the log weight as a function of coordinates, with ``count`` new draws."""
        return LogWeight(
            self._sampler(count),
            self.programs,
            within=self.reference,
            gradient=gradient,
            coordinates=coordinates,
            begin=None if latents is None else LatentValues(latents),
        )

    def density(self, count: int, latents: dict[str, Tensor] | None = None) -> Density:
        """Return the density for chains, at new draws or at given latents."""
        assert self.annealing is not None
        needs_gradient = self.annealing.kernel.needs_gradient
        gradient = GradientMode.COORDINATES if needs_gradient else GradientMode.NONE
        with torch.set_grad_enabled(bool(gradient)):
            log_weight = self.log_weight(
                count,
                gradient=gradient,
                coordinates=self.annealing.coordinates,
                latents=latents,
            )
        follow(self.annealing.kernel, log_weight.coordinates)
        if log_weight.plan.discrete and not log_weight.plan.moving:
            raise ValueError(
                f"chains move latents along gradients, but the guide's site"
                f"{named(log_weight.plan.discrete)} discrete: leave out schedule, kernel and "
                f"num_transitions (both sides of a sandwich are chains: use log_evidence), or "
                f"marginalize them in the model"
            )
        density = ChainDensity(log_weight)
        whitening = self.annealing.whitening
        return density if whitening is None else WhitenedDensity(density, whitening, bool(latents))

    def chain(self, count: int, last_transition: bool = False) -> tuple[Chain, Density]:
        """
        Run chains from draws of the guide along the schedule. Step sizes and white coordinates
        adapt first.
        """
        self.warm_up()
        return self._chain(count, last_transition, self.stage)

    def warm_up(self) -> None:
        """Adapt the step size on separate chains, then fix it."""
        annealing = self.annealing
        if annealing is None:
            return
        if annealing.whitens and annealing.whitening is None:
            dim = self.density(1).log_weight.coordinates.shape[-1]
            # Enough chains to estimate the covariance.
            count = min(max(_FEWEST, _PER_COORDINATE * dim), _MOST, self.chunk_size)
            density = self.density(count)
            assert isinstance(density, ChainDensity)
            stage = self._warm_up_stage(MOVES)
            annealing.whitening = whiten(density, annealing, Counted(annealing.kernel, stage))
        elif annealing.adapts and annealing.num_steps > 0:
            # The acceptance is a mean over chains, so a few hundred are enough.
            count = min(math.ceil(100 / max(1, self.elements)), self.chunk_size)
            if self.loops:  # no more chains than requested
                annealing.warmup = min(annealing.warmup, self._options.num_particles)
                count = min(count, max(1, self._options.num_particles // annealing.warmup))
            stage = self._warm_up_stage(annealing.num_steps)
            for turn in range(annealing.warmup):
                chain, _ = self._chain(count, True, stage)
                if not chain.infos:
                    break  # nothing can move
                annealing.adapt(turn, chain.mean_acceptance, chain.gradient)
        annealing.freeze()

    @property
    def loops(self) -> bool:
        """Return whether each particle is a separate run."""
        return not self._sampler(2).vectorizes(self.programs, 2)

    def start_chains(self, text: str, moves: int) -> None:
        """Begin a part of the work with this number of transitions."""
        self.stage = self.clock.stage(text, moves, "transitions")

    def _warm_up_stage(self, num_steps: int) -> Stage:
        assert self.annealing is not None
        turns = self.annealing.warmup
        text = f"warm-up of chains from the {self._start}"
        return self.clock.stage(text, turns * num_steps, "transitions")

    def _chain(self, count: int, last_transition: bool, stage: Stage) -> tuple[Chain, Density]:
        assert self.annealing is not None
        density = self.density(count)
        start = density.start()
        chain = anneal(
            start,
            self.annealing.betas.to(start.log_weight.device),
            Counted(self.annealing.transition(self.programs), stage),
            density,
            density.log_weight.movable,
            last_transition,
        )
        return chain, density

    def shared(self) -> Tensor:
        """
        Return the terms that belong to no single datum: factors outside the blocks, without draws.
        """
        total = self.reference.log_weight.new_zeros(())
        for term in self.reference.global_terms():
            if term.key.name not in self.drawn:
                sign = -1.0 if term.in_guide else 1.0
                total = total + sign * torch.as_tensor(term.log_prob).sum() * term.plate_scale
        return total

    @property
    def discrete(self) -> tuple[str, ...]:
        """Return the guide's discrete sites."""
        sites = (t.site for t in self.reference.runs[0].terms if t.in_guide and is_random(t.site))
        return tuple(s["name"] for s in sites if known_support(s["fn"]).is_discrete)

    @property
    def elements(self) -> int:
        """Return the number of weights of one particle."""
        return math.prod(self.reference.log_weight.shape[1:])

    def chunks(
        self, count: int, size: int | None = None, moves: int | None = None
    ) -> Iterator[int]:
        """
        Yield the sizes of the chunks in which ``count`` particles are drawn, until the budget ends.

        :param size: the largest size of a chunk, if it is not :attr:`chunk_size`. With a time
            budget, chunks are at most a tenth of the particles.
        :param moves: the number of transitions of a chunk, if not that of :meth:`chain`.
        """
        self.warm_up()
        size = size or self.chunk_size
        if self.clock.limited:
            size = min(size, max(1, math.ceil(count / _PARTS)))
        sizes = [min(size, count - i) for i in range(0, count, size)]
        if self.annealing is None:
            self.stage = self.clock.stage(f"draws of the {self._start}", count, "draws")
        else:
            moves = self.annealing.num_steps - 1 if moves is None else moves
            text = f"chains of {self.annealing.num_steps} steps from the {self._start}"
            self.start_chains(text, len(sizes) * moves)
        for n, size in enumerate(sizes):
            if n and self.clock.expired:
                return
            yield size
            if self.annealing is None:
                self.stage.advance(size)

    def check(self, log_weight: Tensor, runs: list[Run]) -> None:
        """
        Check that no log weight is NaN or plus infinity.

        :raises ValueError: naming the sites, where a log weight is NaN or plus infinity.
        """
        if bool((log_weight.isnan() | log_weight.isposinf()).any()):
            lines = nonfinite_sites(runs) or ["every site is finite: their sum overflows"]
            raise ValueError("a log weight is not a number, because of\n  " + "\n  ".join(lines))

    def _sampler(self, count: int) -> ParticleSampler:
        if count not in self._samplers:
            sampler = ParticleSampler(
                count,
                self._options.vectorize_particles,
                self._options.max_plate_nesting,
                joint=self._joint,
                strict_enumeration=self._options.strict_enumeration_warning,
                find_roots=True,
            )
            for existing in self._samplers.values():
                sampler.structures, sampler.runner = existing.structures, existing.runner
                sampler.analyses = existing.analyses
            self._samplers[count] = sampler
        return self._samplers[count]

    def _count_alike(self, points: frozenset[str]) -> None:
        """Count the same entries of each latent in model and guide, or raise an error."""
        masked = masked_latents(self.programs, self.reference.runs[0])
        if masked.unread:
            model = with_priors(self.programs.model, masked.unread)
            self.programs = replace(self.programs, model=model)
            self.reference = self._sampler(1).single(self.programs, self.reference.subsamples)
        check_masks(self.reference.runs[0], points | masked.transported)
        check_unweighed(self.programs, self.reference.runs[0], is_random)
        for why in angle_errors(self.reference.runs[0]):
            raise ValueError(why)


def find_points(programs: Programs, run: Run) -> frozenset[str]:
    """Return the guide's point masses, except those that follow from a random draw of the guide."""
    sites = [t.site for t in run.terms if t.in_guide and is_latent(t.site)]
    points = {s["name"] for s in sites if is_delta(s["fn"])}
    names = frozenset(s["name"] for s in sites if is_random(s))
    if points and names:
        traced = dependencies_of(programs, names, run)
        points = {n for n in points if not traced.factors.get(FactorKey("guide", n), names)}
    return frozenset(points)


def check_observed(run: Run) -> None:
    """
    Log that a model observes nothing.

    :raises ValueError: if the guide observes a site, as when model and guide are exchanged.
    """
    factors = (t for term in run.terms if not term.in_guide for t in term.sites)
    if any(t.site["is_observed"] for t in factors):
        return
    nodes = run.guide_trace.nodes
    observed = [n for n, s in nodes.items() if is_scored(s) and s["is_observed"]]
    if observed:
        raise ValueError(
            f"the model observes nothing, and the guide observes site '{observed[0]}': pass "
            f"the model first and the guide second"
        )
    _logger.warning(
        "the model observes nothing, so its log evidence is 0: pass obs= to pyro.sample, or use "
        "poutine.condition"
    )


def check_draws(run: Run, points: frozenset[str]) -> None:
    """
    Check that the guide draws all latents, or none. Equal weights from point masses, or from a part
    of the posterior, would contain no information about the other latents.

    :raises ValueError: for a guide with only point masses, and for a guide that draws from a part
        of the posterior. A guide that draws nothing is valid if all latents of the model are
        summed.
    """
    sites = [t.site for t in run.terms if t.in_guide]
    if points and not any(map(is_random, sites)):
        what = f" (its site{named(tuple(sorted(points)))} a point mass)"
        raise ValueError(
            f"the guide draws no random latent{what}, and importance sampling from a single point "
            f"gives no information about the evidence: log p(x, z) at the point, which "
            f"AutoDelta maximizes, is not a bound on log p(x). Use a guide that draws, such as "
            f"AutoNormal, or "
            f"AutoLaplaceApproximation(model).laplace_approximation(...) around that point"
        )
    for name in (n for site in sites for n in drawn_from_states(site)):
        raise ValueError(
            f"site '{name}' is drawn from a TruncatedPosterior, and weights of its draws contain "
            f"no information about other states. Its own bound on log p(x) of each datum, exact "
            f"if it has all states, is guide.posterior(...).free_energy, which also has draws, "
            f"marginals and modes"
        )


@contextmanager
def weights_of(
    programs: Programs,
    options: Options,
    annealing: Annealing | None = None,
    call: str | Clock = "evaluating",
) -> Iterator[ImportanceSampler]:
    """
    Yield the weights of a model and guide, or of their chains.

    :param call: the name of the evaluator, or the clock of a call that has begun.
    """
    begins = isinstance(call, str)
    clock = Clock(call, options.progress, options.time_budget) if isinstance(call, str) else call
    with (
        each_once(),
        evaluation_mode(programs.model, programs.guide, seed=options.seed),
        outside_inference_mode(programs) as programs,
        clock if begins else nullcontext(),
        torch.no_grad(),
    ):
        yield ImportanceSampler(programs, options, clock, annealing)
