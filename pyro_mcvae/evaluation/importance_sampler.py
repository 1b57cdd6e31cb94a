"""Draws log weights of a pair of programs again and again, on one minibatch, in bounded memory."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.chains.annealing import Chain, anneal
from pyro_mcvae.checks.collapsed import check_not_collapsed
from pyro_mcvae.checks.masks import check_masks, count_masked, masks_latents, transported
from pyro_mcvae.checks.untrained import untrained_guide
from pyro_mcvae.coordinates.chain_checks import named
from pyro_mcvae.coordinates.chain_density import ChainDensity
from pyro_mcvae.coordinates.gradient import GradientMode
from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.evaluation.annealing import Annealing
from pyro_mcvae.ops.checks import check_flag
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.contract import check_plates, nonfinite_sites
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import (
    is_delta,
    is_latent,
    is_random,
    is_scored,
    is_subsampled,
)
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.structure import dependencies
from pyro_mcvae.truncated.guide import TruncatedPosterior

__all__ = ["ImportanceSampler"]

_logger = logging.getLogger(__name__)

# How many numbers the draws of one chunk may have by default, over all sites.
_CHUNK = 1 << 23


class ImportanceSampler:
    """
    The weights of one minibatch.

    Runs the programs once to find out what is weighed: a *pilot*, whose minibatch (and, without
    ``joint``, whose global latents) every chunk shares.

    :param joint: weigh global and local latents together. None: if the guide draws global ones.
    :ivar programs: those that are weighed; see :func:`count_masked`.
    :param annealing: chains instead of plain importance sampling.
    :raises ValueError: for programs whose evidence cannot be estimated, naming the site.
    """

    def __init__(
        self,
        programs: Programs,
        annealing: Annealing | None = None,
        joint: bool | None = None,
        vectorize: bool = True,
        max_plate_nesting: float = math.inf,
        strict_enumeration: bool = True,
    ) -> None:
        if isinstance(programs.guide, TruncatedPosterior):
            raise ValueError(
                "the weights of a TruncatedPosterior are those of its states alone, which are a "
                "bound on the evidence and no estimate of it: use TraceTruncated_ELBO().bounds"
            )
        check_flag("joint", joint, or_none=True)
        check_flag("vectorize_particles", vectorize)
        check_flag("strict_enumeration_warning", strict_enumeration)
        self.programs, self.annealing = programs, annealing
        self._vectorize, self._nesting = vectorize, max_plate_nesting
        self._strict = strict_enumeration
        self._tracers: dict[int, ParticleSampler] = {}
        self._joint = bool(joint)
        with untrained_guide(programs.guide) as before:
            self.reference = self._sampler(1).sample(programs)
            before.check(self.reference.runs[0].guide_trace)
        check_not_collapsed(self.reference.structure)
        check_plates(self.reference.runs[0])
        points = self._points(self.reference.runs[0])
        self._check_observed()
        self._check_draws(points)
        self._count_alike(points)
        self._refuse_local_points(points)
        drawn = self._drawn_globals(points)
        if joint is None and drawn:
            self._refuse_minibatch(drawn)
            self._joint, self._tracers = True, {}
            self.reference, drawn = self._sampler(1).sample(self.programs), ()
        self._check_blocks()
        #: Latents whose values are held: point masses, and globals that were drawn once.
        self.given = tuple(sorted(points)) + drawn
        self._drawn = drawn
        #: The same as the model's sites have them.
        self.held = points | frozenset(drawn)

    @property
    def elements(self) -> int:
        """How many weights one particle has."""
        return math.prod(self.reference.log_weight.shape[1:])

    def chunks(self, count: int, chunk_size: int | None) -> Iterator[int]:
        """The sizes of the chunks that ``count`` particles are drawn in."""
        size = chunk_size or max(1, _CHUNK // max(1, self._numbers()))
        while count > 0:
            yield min(size, count)
            count -= size

    def draw(self, count: int) -> WeightedParticles:
        """Independent draws of the guide, without gradients."""
        sampler = self._sampler(count)
        runs = 1 if sampler.vectorizes(count) else count
        return sampler.resample(self.programs, self.reference, [lambda msg: None] * runs, count)

    def on(self, programs: Programs) -> ImportanceSampler:
        """The same for other data: the plates' minibatch and the latents that are held stay."""
        other = copy.copy(self)
        other.programs, other._tracers = programs, {}
        reference = self.reference
        other.reference = other._sampler(1).single(
            programs, reference.subsamples, reference.global_values()
        )
        return other

    def renew(self) -> None:
        """Draw the global latents that are held anew, on the same minibatch."""
        self.reference = self._sampler(1).single(self.programs, self.reference.subsamples)

    @property
    def holds_draws(self) -> bool:
        """Whether global latents were drawn once."""
        return bool(self._drawn)

    def log_weight(self, count: int, **options: Any) -> LogWeight:
        """The log weight as a function of coordinates, begun at ``count`` new draws."""
        sampler = self._sampler(count)
        return LogWeight(sampler, self.programs, within=self.reference, **options)

    def density(self, count: int, **options: Any) -> ChainDensity:
        """What the chains of this judge move in."""
        assert self.annealing is not None
        gradient = GradientMode.of_kernel(self.annealing.kernel.needs_gradient)
        with torch.set_grad_enabled(bool(gradient)):
            coordinates = options.pop("coordinates", self.annealing.coordinates)
            log_weight = self.log_weight(
                count, coordinates=coordinates, gradient=gradient, **options
            )
        if log_weight.discrete:
            raise ValueError(
                f"chains move latents along gradients, but the guide's site"
                f"{named(log_weight.discrete)} discrete: {self.annealing.without}, or marginalise "
                f"them in the model"
            )
        return ChainDensity(log_weight)

    def chain(self, count: int, last_transition: bool = False) -> tuple[Chain, ChainDensity]:
        """Chains from the guide's draws along the schedule; the step size is found first."""
        self.warm_up()
        return self._chain(count, last_transition)

    def warm_up(self) -> None:
        """Adapt the step size on chains of its own, then freeze it."""
        annealing = self.annealing
        if annealing is None:
            return
        if annealing.adapts and annealing.num_steps > 0:
            # The acceptance is a mean over chains: some hundred are enough.
            count = min(math.ceil(100 / max(1, self.elements)), next(self.chunks(100, None)))
            for turn in range(annealing.warmup):
                chain, _ = self._chain(count, True)
                gradient = None
                if chain.start.grad_base is not None and chain.start.grad_weight is not None:
                    gradient = chain.start.grad_base + chain.start.grad_weight
                annealing.adapt(turn, chain.mean_acceptance, gradient)
        annealing.freeze()

    def _chain(self, count: int, last_transition: bool) -> tuple[Chain, ChainDensity]:
        assert self.annealing is not None
        density = self.density(count)
        start = density.start()
        chain = anneal(
            start,
            self.annealing.betas.to(start.log_weight.device),
            self.annealing.kernel,
            density,
            density.log_weight.movable,
            last_transition,
        )
        return chain, density

    def check(self, log_weight: Tensor, runs: list[Run]) -> None:
        """
        :raises ValueError: naming the sites, where a log weight is NaN or plus infinity.
        """
        if bool((log_weight.isnan() | log_weight.isposinf()).any()):
            lines = nonfinite_sites(runs) or ["every site is finite: their sum overflows"]
            raise ValueError("a log weight is not a number, because of\n  " + "\n  ".join(lines))

    def shared(self) -> Tensor:
        """What belongs to no single datum: the factors outside of the blocks, without the draws."""
        total = self.reference.log_weight.new_zeros(())
        for term in self.reference.global_terms():
            if term.key.name not in self._drawn:
                sign = -1.0 if term.in_guide else 1.0
                total = total + sign * torch.as_tensor(term.log_prob).sum() * term.plate_scale
        return total

    def _sampler(self, count: int) -> ParticleSampler:
        if count not in self._tracers:
            sampler = ParticleSampler(
                count,
                self._vectorize,
                self._nesting,
                joint=self._joint,
                strict_enumeration=self._strict,
                find_roots=True,
            )
            for other in self._tracers.values():
                sampler.structures, sampler.runner = other.structures, other.runner
            self._tracers[count] = sampler
        return self._tracers[count]

    def _numbers(self) -> int:
        traces = (t for r in self.reference.runs for t in (r.guide_trace, r.model_trace))
        values = (s["value"] for t in traces for s in t.nodes.values() if s["type"] == "sample")
        return 2 * sum(v.numel() for v in values if isinstance(v, Tensor))

    def _points(self, run: Run) -> frozenset[str]:
        """The guide's point masses, but for those that follow from a random draw of the guide."""
        sites = [t.site for t in run.terms if t.in_guide and is_latent(t.site)]
        points = {s["name"] for s in sites if is_delta(s["fn"])}
        names = frozenset(s["name"] for s in sites if is_random(s))
        if points and names:
            found = dependencies.find_dependencies(self.programs, names, run.subsamples)
            points = {n for n in points if not found.factors.get(FactorKey("guide", n), names)}
        return frozenset(points)

    def _drawn_globals(self, points: frozenset[str]) -> tuple[str, ...]:
        return tuple(sorted(self.reference.structure.global_sites.guide - points))

    def _refuse_minibatch(self, drawn: tuple[str, ...]) -> None:
        for term in self.reference.runs[0].terms:
            for frame in term.site["cond_indep_stack"]:
                if is_subsampled(frame):
                    raise ValueError(
                        f"the guide's site{named(drawn)} shared by data of several minibatches, so "
                        f"that all data have one evidence together, but plate '{frame.name}' is "
                        f"subsampled ({frame.size} of {frame.full_size}). Pass the full data; or "
                        f"joint=False, for the evidence of each datum given one draw of "
                        f"{', '.join(map(repr, drawn))}"
                    )

    def _check_observed(self) -> None:
        if any(t.site["is_observed"] for t in self._model()):
            return
        guide = self.reference.runs[0].guide_trace.nodes
        observed = [n for n, s in guide.items() if is_scored(s) and s["is_observed"]]
        if observed:
            raise ValueError(
                f"the model observes nothing, and the guide observes site '{observed[0]}': pass "
                f"the model first and the guide second"
            )
        _logger.warning(
            "the model observes nothing, so that its log evidence is 0: pass obs= to pyro.sample, "
            "or use poutine.condition"
        )

    def _check_draws(self, points: frozenset[str]) -> None:
        if not any(t.in_guide and is_random(t.site) for t in self.reference.runs[0].terms):
            what = f" (its site{named(tuple(sorted(points)))} a point mass)" if points else ""
            raise ValueError(
                f"the guide draws no random latent{what}, and importance sampling from a single "
                f"point says nothing about the evidence: use a guide that draws, such as "
                f"AutoNormal"
            )

    def _count_alike(self, points: frozenset[str]) -> None:
        """Let both programs count the same entries of each latent, or refuse them."""
        apart = points
        if masks_latents(self.reference.runs[0]):
            sampler, subsamples = self._sampler(1), self.reference.subsamples
            pair = self.reference.runs[0], sampler.single(self.programs, subsamples).runs[0]
            apart = points | transported(self.programs, *pair)
            self.programs = count_masked(self.programs, *pair)
            self.reference = sampler.single(self.programs, subsamples)
        check_masks(self.reference.runs[0], apart)

    def _model(self) -> list[Term]:
        return [t for t in self.reference.runs[0].terms if not t.in_guide]

    def _check_blocks(self) -> None:
        terms = self.reference.runs[0].terms
        if not self.reference.blocks:
            plate = next(f for t in terms for f in t.site["cond_indep_stack"] if is_subsampled(f))
            raise ValueError(
                f"no latent of the guide can be weighed by itself, because the subsampled plate "
                f"'{plate.name}' ({plate.size} of {plate.full_size}) does not enclose them: pass "
                f"the full data"
            )

    def _refuse_local_points(self, points: frozenset[str]) -> None:
        structure = self.reference.structure
        for name in sorted(points):
            b = structure.block_of.get(FactorKey("guide", name))
            if b is not None and structure.blocks[b].plates:
                raise ValueError(
                    f"site '{name}' of the guide is a point mass inside of the data's plates: "
                    f"importance sampling never sees any other value of it. Give it a "
                    f"distribution, or observe it in the model"
                )
