"""Runs a pair of programs for all particles of a step, and knows what belongs together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from pyro_mcvae.checks.collapsed import check_not_collapsed
from pyro_mcvae.checks.vectorization import VectorizationCheck
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.contract import check_nesting, check_sites
from pyro_mcvae.programs.errors import NoCoordinateError
from pyro_mcvae.programs.execution import (
    Programs,
    Run,
    check_separate,
    collect,
    nesting_of,
    run_pair,
    with_changes,
)
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.messengers import Minibatch, ParticlePlate, SubstituteMessenger
from pyro_mcvae.programs.replay import replay_model
from pyro_mcvae.programs.sites import is_latent, plate_frames
from pyro_mcvae.structure import dependencies
from pyro_mcvae.structure.auxiliary import AuxiliaryDraws
from pyro_mcvae.structure.blocks import GlobalSites, Structure
from pyro_mcvae.structure.finder import StructureFinder

__all__ = ["ParticleSampler"]

# How often a step is begun again when its structure turns out to be another than assumed.
_MAX_ATTEMPTS = 3
# Programs of stochastic structure can show ever new shapes: then all are forgotten.
_MAX_COUNTED = 256

# Called for every random guide site of a run; returns its value, or None to let Pyro draw.
Draw = Callable[[Any], Tensor | None]
_NONE = GlobalSites()


class ParticleSampler:
    """
    Draws the particles of one objective, vectorised or one after the other.

    A tracer keeps what it learned about the programs' structure from step to step, and looks
    again when a program shows another structure.

    :param int num_particles: the number of draws of the local latents.
    :param bool vectorize: run the programs once, with the particles in the outermost dimension.
    :param max_plate_nesting: how many batch dims belong to plates; infinite to find out.
    :param bool joint: one weight over everything.
    :param bool strict_enumeration: refuse guide sites that are marked for enumeration.
    :param bool find_roots: find out which guide sites depend on no other draw.
    """

    def __init__(
        self,
        num_particles: int,
        vectorize: bool,
        max_plate_nesting: float,
        *,
        joint: bool = False,
        strict_enumeration: bool = True,
        find_roots: bool = False,
    ) -> None:
        check_nesting(max_plate_nesting)
        self.num_particles = num_particles
        self.vectorize = vectorize
        self.declared_nesting = max_plate_nesting
        self.strict_enumeration = strict_enumeration
        self.structures = StructureFinder(joint, find_roots)
        self._found_nesting: int | None = None
        self._latest: Structure | None = None
        self._counted: set[Hashable] = set()
        self.alike = VectorizationCheck()
        self.auxiliary = AuxiliaryDraws()

    def independent(self, programs: Programs, cut: bool = False) -> list[Run]:
        """
        Draw every latent, global ones too, once per particle; no weights are formed.

        :param cut: latents reach the model without their gradient to the guide.
        """
        if cut:
            check_separate(programs)
        supply = SubstituteMessenger(cut=frozenset() if cut else None)
        if self.vectorizes(self.num_particles):
            run = self._vectorized(programs, supply, _NONE, self.num_particles)
            self.structures.check_particles(programs, run)
            self._check_count(programs, run, _NONE)
            self.alike.check(programs, run)
            return [run]
        return [self._single(programs, supply) for _ in range(self.num_particles)]

    def sample(
        self,
        programs: Programs,
        inside: Callable[[frozenset[str]], Messenger] | None = None,
        draw: Callable[[], Draw] | None = None,
        cut: bool = False,
    ) -> WeightedParticles:
        """
        Draw global latents once and local ones once per particle.

        :param inside: makes a handler for the guide from the names of its global sites.
        :param draw: called at the beginning of each run, returns what draws its random sites.
        :param cut: local latents reach the model without their gradient to the guide.
        """
        if cut:
            check_separate(programs)
        if self.vectorizes(self.num_particles):
            sample = self._sample_vectorized(programs, inside, draw, cut)
        else:
            sample = self._sample_looped(programs, inside, draw, cut)
        if self.num_particles > 1 or draw is not None:
            check_not_collapsed(sample.structure)
        return sample

    def single(
        self, programs: Programs, subsamples: Minibatch, values: Mapping[str, Tensor] | None = None
    ) -> WeightedParticles:
        """
        One draw of every latent, global ones too, on a given minibatch.

        :param values: of guide sites that are fixed.
        """
        return self.arrange(
            programs, [self._single(programs, SubstituteMessenger(subsamples, values))]
        )

    def resample(
        self,
        programs: Programs,
        sample: WeightedParticles,
        draws: list[Draw],
        count: int,
        cut: bool = False,
    ) -> WeightedParticles:
        """
        Run the programs again on the minibatch and the global latents of ``sample``.

        :param draws: supplies the local sites' values: one for all, or one for each run.
        :param count: the leading size, which need not be the sample's.
        :param cut: local latents reach the model without their gradient to the guide.
        """
        fixed = sample.global_values()
        none: frozenset[str] = frozenset()
        supplies = [
            SubstituteMessenger(sample.subsamples, fixed, d, none if cut else None) for d in draws
        ]
        if self.vectorizes(count):
            run = self._vectorized(programs, supplies[0], sample.structure.global_sites, count)
            return self.arrange(programs, [run])
        runs = [self._single(programs, supply) for supply in supplies]
        return self.arrange(programs, runs)

    def replay(
        self,
        programs: Programs,
        sample: WeightedParticles,
        latents: Iterable[dict[str, dict[str, Any]]],
    ) -> WeightedParticles:
        """
        Run the model alone at other latents, with the guide's distributions of ``sample``.

        For guides whose structure is mean-field only.

        :param latents: for each run of ``sample``, by guide site, what changes there: its value,
            and annotations.
        """
        runs, same = self._run_again(programs, sample, latents)
        return sample.again(runs) if same else self.arrange(programs, runs)

    def model_again(
        self, programs: Programs, sample: WeightedParticles
    ) -> WeightedParticles | None:
        """
        Run the model alone at the very draws of ``sample``, of which no gradient is left.

        :returns: a sample with the terms of the model only, or None if the model shows other sites.
        """
        bare = []
        for run in sample.runs:
            nodes = run.guide_trace.nodes
            draws = {n: {"value": nodes[n]["value"].detach()} for n in nodes if is_latent(nodes[n])}
            terms = [t for t in run.terms if not t.in_guide]
            trace = with_changes(run.guide_trace, draws)
            bare.append(replace(run, guide_trace=trace, terms=terms))
        alone = sample.again(bare)
        runs, same = self._run_again(programs, alone, [{} for _ in bare])
        return sample.again(runs) if same else None

    def _run_again(
        self,
        programs: Programs,
        sample: WeightedParticles,
        changes: Iterable[dict[str, dict[str, Any]]],
    ) -> tuple[list[Run], bool]:
        runs, same = [], True
        for run, values in zip(sample.runs, changes, strict=True):
            leading = None
            if run.leading is not None:
                skip = sample.structure.global_sites.model
                leading = ParticlePlate(run.leading, -run.nesting - 1, skip)
            again, alike = replay_model(programs, run, values, leading)
            if not alike:
                # Another branch of the model may have latents that the guide's draws are not for.
                check_sites(again.guide_trace, again.model_trace, self.strict_enumeration)
            runs.append(again)
            same = same and alike
        return runs, same

    def vectorizes(self, count: int) -> bool:
        """Whether that many particles share one run."""
        return self.vectorize and count > 1

    def arrange(self, programs: Programs, runs: list[Run]) -> WeightedParticles:
        """Sort runs whose global latents may differ into a sample, to sum them per datum."""
        structures = [self.structures.of(programs, run, again=False) for run in runs]
        if any(s.blocks != structures[0].blocks for s in structures):
            raise ValueError(
                f"two particles of one step have different plates: {structures}; plates must not "
                f"depend on the latents (joint=True weighs such programs as a whole)"
            )
        return WeightedParticles(runs, [s.block_of for s in structures], structures[0])

    def _sample_looped(
        self,
        programs: Programs,
        inside: Callable[[frozenset[str]], Messenger] | None,
        draw: Callable[[], Draw] | None,
        cut: bool,
    ) -> WeightedParticles:
        to_know = inside is not None or cut
        with _rewindable(to_know and self._latest is None) as rewind:
            skip = self._known.guide
            while True:
                subsamples = Minibatch()
                handler = inside(skip) if inside else None
                supply = SubstituteMessenger(
                    subsamples, draw=draw and draw(), cut=skip if cut else None
                )
                first = self._single(programs, supply, handler)
                structure = self._latest = self.structures.of(programs, first)
                shared = structure.global_sites.guide
                if not to_know or shared == skip:
                    break
                skip = shared
                rewind()
        fixed = {n: first.guide_trace.nodes[n]["value"] for n in shared}
        rest = [
            self._single(
                programs,
                SubstituteMessenger(subsamples, fixed, draw and draw(), shared if cut else None),
                handler,
            )
            for _ in range(1, self.num_particles)
        ]
        return self.arrange(programs, [first, *rest])

    def _sample_vectorized(
        self,
        programs: Programs,
        inside: Callable[[frozenset[str]], Messenger] | None,
        draw: Callable[[], Draw] | None,
        cut: bool,
    ) -> WeightedParticles:
        with _rewindable(self._latest is None) as rewind:
            skip = self._known
            subsamples = Minibatch()
            for _ in range(_MAX_ATTEMPTS):
                handler = inside(skip.guide) if inside else None
                supply = SubstituteMessenger(
                    subsamples, draw=draw and draw(), cut=skip.guide if cut else None
                )
                run = self._vectorized(programs, supply, skip, self.num_particles, handler)
                structure = self._latest = self.structures.of(programs, run)
                if structure.global_sites == skip:
                    self._check_count(programs, run, skip)
                    self.alike.check(programs, run, skip)
                    return WeightedParticles([run], [structure.block_of], structure)
                # Global sites were drawn once per particle, or local ones once: run again on the
                # same minibatch, which the generators draw again if they are set back.
                skip = structure.global_sites
                if rewind():
                    subsamples = Minibatch()
        raise RuntimeError(
            f"the programs show other global sites in each of {_MAX_ATTEMPTS} runs on the same "
            f"minibatch (now {sorted(skip.guide | skip.model)}), so the particles cannot be "
            f"vectorised: pass vectorize_particles=False"
        )

    @property
    def _known(self) -> GlobalSites:
        """The sites that particles shared in the latest step."""
        return _NONE if self._latest is None else self._latest.global_sites

    def _single(
        self, programs: Programs, supply: SubstituteMessenger, inside: Messenger | None = None
    ) -> Run:
        guide_trace, model_trace = run_pair(programs, supply, inside=inside)
        check_sites(guide_trace, model_trace, self.strict_enumeration)
        nesting = nesting_of(guide_trace, model_trace)
        self._check_nesting(nesting)
        run = collect(guide_trace, model_trace, nesting, None, self.declared_nesting)
        run.subsamples = supply.subsamples
        self.auxiliary.settle(programs, run)
        return run

    def _vectorized(
        self,
        programs: Programs,
        supply: SubstituteMessenger,
        skip: GlobalSites,
        count: int,
        inside: Messenger | None = None,
    ) -> Run:
        if self.declared_nesting != float("inf"):
            nesting = int(self.declared_nesting)
        elif self._found_nesting is not None:
            nesting = self._found_nesting
        else:
            nesting = self._found_nesting = dependencies.find_nesting(
                programs, self.strict_enumeration
            )
        try:
            return self._vectorized_once(programs, supply, skip, count, inside, nesting)
        except (NoCoordinateError, _StopRecomputationError):
            raise
        except Exception as error:
            # Either the programs fail without particles too (then this raises their own error),
            # or their plates have changed since the last step, or they cannot be vectorised.
            actual = dependencies.find_nesting(programs, self.strict_enumeration)
            self._check_nesting(actual)
            if self.declared_nesting == float("inf") and actual != nesting:
                self._found_nesting = actual
                supply.subsamples.clear()
                return self._vectorized_once(programs, supply, skip, count, inside, actual)
            raise RuntimeError(
                f"the model or the guide cannot be run with {count} vectorised particles in batch "
                f"dim {-nesting - 1}, though it runs with one. Pass vectorize_particles=False, or "
                f"make it broadcast over leading dims: index from the right, as in z[..., 0], or "
                f"means[..., group] in the place of means[group]. "
                f"The error was: {type(error).__name__}: {error}"
            ) from error

    def _check_count(self, programs: Programs, run: Run, skip: GlobalSites) -> None:
        """
        Check that as many particles as there are data are not taken for the data.

        ``means[group]`` takes particles in the place of groups, and where these are as many as the
        data the shapes fit all the same. With another count they do not. Looked at once for all
        runs of the same shapes.
        """
        sizes = {f.size for t in run.terms for f in plate_frames(t.site)}
        sizes |= {n for t in run.terms for n in t.site["fn"].event_shape}
        if run.leading is None or run.leading not in sizes:
            return
        shapes = tuple(
            (t.key, t.site["fn"].batch_shape, t.site["fn"].event_shape) for t in run.terms
        )
        if shapes in self._counted:
            return
        other = next(n for n in itertools.count(run.leading + 1) if n not in sizes)
        try:
            with dependencies.isolated(), torch.no_grad():
                supply = SubstituteMessenger(Minibatch(run.subsamples))
                self._vectorized_once(programs, supply, skip, other, None, run.nesting)
        except Exception as error:
            raise RuntimeError(
                f"the model or the guide runs with {run.leading} vectorised particles, the size of "
                f"another dim, but not with {other}, so that one may be taken for the other. Pass "
                f"vectorize_particles=False, or make it broadcast over leading dims: index from "
                f"the right, as in means[..., group] in the place of means[group]. "
                f"The error was: {type(error).__name__}: {error}"
            ) from error
        if len(self._counted) >= _MAX_COUNTED:
            self._counted.clear()
        self._counted.add(shapes)

    def _vectorized_once(
        self,
        programs: Programs,
        supply: SubstituteMessenger,
        skip: GlobalSites,
        count: int,
        inside: Messenger | None,
        nesting: int,
    ) -> Run:
        dim = -nesting - 1
        leading = ParticlePlate(count, dim, skip.guide), ParticlePlate(count, dim, skip.model)
        guide_trace, model_trace = run_pair(programs, supply, leading, inside)
        check_sites(guide_trace, model_trace, self.strict_enumeration)
        if nesting_of(guide_trace, model_trace) > nesting:
            # Plates without a declared dim have taken dims to the left of the particles'.
            raise ValueError("the programs have more plates than max_plate_nesting says")
        run = collect(guide_trace, model_trace, nesting, count)
        run.subsamples = supply.subsamples
        self.auxiliary.settle(programs, run)
        names = zip(("guide", "model"), leading, strict=True)
        run.unbatched = frozenset(FactorKey(p, n) for p, plate in names for n in plate.unbatched)
        return run

    def _check_nesting(self, nesting: int) -> None:
        if nesting > self.declared_nesting:
            raise ValueError(
                f"max_plate_nesting={int(self.declared_nesting)}, but the programs have plates in "
                f"{nesting} batch dims: pass max_plate_nesting={nesting} or leave it out"
            )


@contextmanager
def _rewindable(active: bool) -> Iterator[Callable[[], bool]]:
    """A function that sets the random number generators back to where an active block began."""
    if not active:
        yield lambda: False
        return
    state = pyro.util.get_rng_state()
    device = torch.cuda.is_initialized() and torch.cuda.get_rng_state()

    def rewind() -> bool:
        pyro.util.set_rng_state(state)
        if device is not False:
            torch.cuda.set_rng_state(device)
        return True

    yield rewind
