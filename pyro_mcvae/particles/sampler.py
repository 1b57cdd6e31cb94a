"""The particles of one step: what is drawn for each of them, and what once for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from pyro_mcvae.checks.collapsed import check_not_collapsed
from pyro_mcvae.particles.layout import Execution, Layout, never
from pyro_mcvae.particles.runner import Runner
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.execution import Programs, with_changes
from pyro_mcvae.programs.messengers import SampleFn, Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.model_noise import ModelNoise
from pyro_mcvae.programs.replay import replay_model
from pyro_mcvae.programs.run import Run, terms_of
from pyro_mcvae.programs.sites import is_latent
from pyro_mcvae.programs.types import SiteChanges
from pyro_mcvae.structure.blocks import GlobalSites, Structure
from pyro_mcvae.structure.cache import Analyses
from pyro_mcvae.structure.finder import StructureFinder

_NONE = GlobalSites()

# Makes what draws the guide's sites in one run, from its particles and the sites that all share.
MakeSampleFn = Callable[[range, frozenset[str]], SampleFn]


class ParticleSampler:
    """
    Draws the particles of one objective, vectorised or one after the other.

    A sampler keeps what it learned about the programs' structure from step to step, and looks
    again when a program shows another structure.

    :param int num_particles: the number of draws of the local latents.
    :param vectorize: run the programs once for all particles; None where that is right, and in a
        loop elsewhere.
    :param max_plate_nesting: how many batch dims belong to plates; infinite to find out.
    :param bool joint: one weight over everything.
    :param bool strict_enumeration: refuse guide sites that are marked for enumeration.
    :param bool find_roots: find out which guide sites depend on no other draw.
    """

    def __init__(
        self,
        num_particles: int,
        vectorize: bool | None,
        max_plate_nesting: float,
        *,
        joint: bool = False,
        strict_enumeration: bool = True,
        find_roots: bool = False,
    ) -> None:
        self.num_particles = num_particles
        self.analyses = Analyses()
        self.runner = Runner(max_plate_nesting, strict_enumeration, vectorize, self.analyses)
        self.structures = StructureFinder(joint, find_roots, self.analyses)
        self._latest = Structure((), {})

    def vectorizes(self, programs: Programs, count: int) -> bool:
        """Whether that many particles share one run."""
        find_shared = partial(self._shared_sites, programs)
        return count > 1 and self.runner.together(
            Execution(programs, never, find_shared=find_shared)
        )

    def _shared_sites(self, programs: Programs, run: Run) -> GlobalSites:
        """What all particles of a run share."""
        self._latest = self.structures.of(programs, run)
        return self._latest.global_sites

    def independent(self, programs: Programs, detach_latents: bool = False) -> list[Run]:
        """
        Draw every latent, global ones too, once per particle; no weights are formed.

        :param detach_latents: they reach the model without their gradient to the guide.
        """
        substitutes = Substitutes(attached=frozenset() if detach_latents else None)
        execution = _execution(programs, substitutes)
        if self.num_particles > 1:
            run = self.runner.run_together(execution, self.num_particles)
            if run is not None:
                return [run]
        return [self.runner.run(execution, None) for _ in range(self.num_particles)]

    def sample(
        self,
        programs: Programs,
        make_sample_fn: MakeSampleFn | None = None,
        detach_latents: bool = False,
        count: int | None = None,
        keep_noise: bool = False,
    ) -> WeightedParticles:
        """
        Draw global latents once and local ones once per particle.

        :param make_sample_fn: called for each run with its particles, and the sites of the guide
            that all of them share, returns what draws the guide's sites.
        :param detach_latents: local ones reach the model without their gradient to the guide.
        :param count: another number of particles.
        :param keep_noise: for runs at other latents, in which models draw the same numbers apart
            from their sites.
        """
        count, subsamples = count or self.num_particles, Minibatch()

        def run_rows(fixed: Mapping[str, Tensor], rows: range | None, layout: Layout) -> Run:
            shared, rows = layout.shared.guide, rows or range(layout.count or 1)
            sample_fn = None if make_sample_fn is None else make_sample_fn(rows, shared)
            attached = shared if detach_latents else None
            noise = ModelNoise() if keep_noise else None
            return layout.run(programs, Substitutes(subsamples, fixed, sample_fn, attached, noise))

        shared, depends = self._latest.global_sites, make_sample_fn is not None or detach_latents
        execute, find_shared = partial(run_rows, {}, None), partial(self._shared_sites, programs)
        execution = Execution(programs, execute, subsamples, shared, find_shared, depends)
        run = self.runner.run_together(execution, count) if count > 1 else None
        first = run or self.runner.run(execution, None)
        sample = WeightedParticles([first], [self._latest.block_of], self._latest)
        if run is None and count > 1:
            sample = self._with_others(execution, sample, count, run_rows)
        if sample.structure.collapsed and (count > 1 or make_sample_fn is not None):
            check_not_collapsed(sample.structure)
        return sample

    def _with_others(
        self,
        execution: Execution,
        sample: WeightedParticles,
        count: int,
        run_rows: Callable[[Mapping[str, Tensor], range, Layout], Run],
    ) -> WeightedParticles:
        """The first particle and the others, which share what is global, one by one."""
        settled = replace(execution, shared=sample.structure.global_sites, find_shared=None)
        alone, fixed = (range(k, k + 1) for k in range(1, count)), sample.global_values()
        others = (partial(run_rows, fixed, row) for row in alone)
        each = (replace(settled, execute=other) for other in others)
        runs = [*sample.runs, *(self.runner.run(e, None) for e in each)]
        return self.arrange(execution.programs, runs)

    def single(
        self, programs: Programs, subsamples: Minibatch, values: Mapping[str, Tensor] | None = None
    ) -> WeightedParticles:
        """
        One draw of every latent, global ones too, on a given minibatch.

        :param values: of guide sites that are fixed.
        """
        return self.arrange(programs, [self.run_once(programs, subsamples, values)])

    def run_once(
        self,
        programs: Programs,
        subsamples: Minibatch | None = None,
        values: Mapping[str, Tensor] | None = None,
    ) -> Run:
        """One run without leading dims."""
        batch = Minibatch() if subsamples is None else subsamples
        return self.runner.run(_execution(programs, Substitutes(batch, values or {})), None)

    def resample(
        self,
        programs: Programs,
        sample: WeightedParticles,
        count: int,
        make_sample_fn: MakeSampleFn | None = None,
        detach_latents: bool = False,
    ) -> WeightedParticles:
        """
        Run the programs again on the minibatch and the global latents of ``sample``.

        :param count: the leading size, which need not be the sample's.
        :param make_sample_fn: as of :meth:`sample`, returns what gives the local sites their
            values; None to draw them anew.
        :param detach_latents: local ones reach the model without their gradient to the guide.
        """
        fixed, shared = sample.global_values(), sample.structure.global_sites
        attached: frozenset[str] | None = frozenset() if detach_latents else None

        def find_shared(run: Run) -> GlobalSites:
            self.structures.of(programs, run)  # looks at what particles share
            return shared

        def execution(rows: range, noise: ModelNoise) -> Execution:
            sample_fn = None if make_sample_fn is None else make_sample_fn(rows, shared.guide)
            substitutes = Substitutes(sample.subsamples, fixed, sample_fn, attached, noise)
            return replace(_execution(programs, substitutes, shared), find_shared=find_shared)

        run = None
        if self.vectorizes(programs, count):
            together = execution(range(count), next(sample.noise(count)))
            run = self.runner.run_together(together, count)
        if run is not None:
            return self.arrange(programs, [run])
        rows = (range(k, k + 1) for k in range(count))
        each = (execution(*one) for one in zip(rows, sample.noise(count), strict=False))
        return self.arrange(programs, [self.runner.run(e, None) for e in each])

    def replay(
        self, programs: Programs, sample: WeightedParticles, latents: Iterable[SiteChanges]
    ) -> WeightedParticles:
        """
        Run the model alone at other latents, with the guide's distributions of ``sample``.

        For guides whose structure is mean-field only.

        :param latents: for each run of ``sample``, by guide site, what changes there: its value,
            and annotations.
        """
        found, shared = [], sample.structure.global_sites
        for run, changes in zip(sample.runs, latents, strict=True):
            layout = Layout(run.leading, run.nesting, shared, run.way, run.state_dim is not None)
            found.append(replay_model(programs, run, changes, layout.leading()))
        if all(same for _, same in found):
            return sample.with_runs([run for run, _ in found])
        runs = [run if same else self._looked_at(programs, run, shared) for run, same in found]
        return self.arrange(programs, runs)

    def replay_at_rest(
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
            terms = tuple(t for t in run.terms if not t.in_guide)
            trace = with_changes(run.guide_trace, draws)
            bare.append(replace(run, guide_trace=trace, terms=terms))
        found = self.replay(programs, sample.with_runs(bare), [{} for _ in bare])
        return found if found.block_of is sample.block_of else None

    def arrange(self, programs: Programs, runs: list[Run]) -> WeightedParticles:
        """Sort runs whose global latents may differ into a sample, to sum them per datum."""
        structures = [self.structures.of(programs, run) for run in runs]
        if any(s.blocks != structures[0].blocks for s in structures):
            raise ValueError(
                f"two particles of one step have different plates: {structures}; plates must not "
                f"depend on the latents (joint=True weighs such programs as a whole)"
            )
        return WeightedParticles(runs, [s.block_of for s in structures], structures[0])

    def _looked_at(self, programs: Programs, run: Run, shared: GlobalSites) -> Run:
        """Another branch of the model may have latents that the guide's draws are not for."""
        run = replace(run, terms=terms_of(run.guide_trace, run.model_trace, run.state_dim))
        self.runner.check(programs, run, shared)
        return self.runner.without_auxiliary(programs, run)


def _execution(
    programs: Programs, substitutes: Substitutes, shared: GlobalSites = _NONE
) -> Execution:
    def execute(layout: Layout) -> Run:
        return layout.run(programs, substitutes)

    return Execution(programs, execute, substitutes.subsamples, shared)
