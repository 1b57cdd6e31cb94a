"""Draw the particles of one step, and map their log weights per datum to sites."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor

from pyro_mcvae.checks.faults import check_not_collapsed
from pyro_mcvae.particles.runner import Execution, Layout, Runner
from pyro_mcvae.programs.enumeration import draw_states
from pyro_mcvae.programs.messengers import Minibatch, ModelNoise, SampleFn, Substitutes
from pyro_mcvae.programs.run import Programs, Run, replay_model, run_model, terms_of, with_changes
from pyro_mcvae.programs.sites import changed_draw, is_latent
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import (
    FactorKey,
    SiteChanges,
    plate_frames,
    plate_key,
    subsampling_scale,
)
from pyro_mcvae.structure.blocks import Block, GlobalSites, Structure
from pyro_mcvae.structure.cache import Analyses
from pyro_mcvae.structure.finder import StructureFinder, without_auxiliary


@dataclass
class WeightedParticles:
    r"""
    Runs of both programs that share one minibatch and their global latents.

    For a program with one block the log weights have shape ``[K, *plates]``, one per particle and
    datum. With several blocks (sequential plates, or separate data plates) the blocks' elements are
    concatenated: ``[K, elements]``; without blocks there are no elements. In every case the entries
    are independent of each other given the global latents, so objectives need not distinguish the
    cases.

    :ivar runs: one vectorized run, or one run per particle.
    :ivar block_of: for each run, the block of each factor (None: global).
    """

    runs: list[Run]
    block_of: list[Mapping[FactorKey, int | None]]
    structure: Structure

    @property
    def subsamples(self) -> Minibatch:
        """Return the minibatch of all runs: the indices of each plate."""
        return self.runs[0].subsamples

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.structure.blocks

    @property
    def plate_names(self) -> tuple[str, ...]:
        """Return the names of the plates of :attr:`log_weight`; empty for several blocks."""
        if len(self.blocks) != 1:
            return ()
        return tuple(p.name for p in self.blocks[0].plates if p.dim is not None)

    @property
    def num_particles(self) -> int:
        return self.runs[0].leading or len(self.runs)

    def noise(self, count: int) -> Iterator[ModelNoise]:
        """Yield the noise outside sample sites for further runs with ``count`` particles."""
        recorded = [r.noise for r in self.runs if r.noise] if count == self.num_particles else []
        return itertools.chain(recorded, iter(ModelNoise, None))

    def local_sum(self, pick: Callable[[Term, int], Tensor | int], signed: bool = False) -> Tensor:
        """
        Sum a quantity of the local terms per particle and datum.

        :param pick: maps a term and its run's index to a batch-shaped tensor, or 0 to omit it.
        :param bool signed: whether the guide's terms are subtracted.
        :returns: shape ``[K, *plates]`` (or ``[K, elements]``).
        """
        totals: list[list[Tensor | None]] = [[None] * len(self.runs) for _ in self.blocks]
        for i, (run, block_of) in enumerate(zip(self.runs, self.block_of, strict=True)):
            for term in run.terms:
                b = block_of[term.key]
                if b is not None and isinstance(value := pick(term, i), Tensor):
                    part = run.sum_to(value, self.blocks[b].dims)
                    totals[b][i] = _plus(totals[b][i], part, signed and term.in_guide)
        return self.join([self._stack(*t) for t in zip(totals, self.shapes, strict=True)])

    @cached_property
    def log_weight(self) -> Tensor:
        r"""Return log p(x_n, z_n) - log q(z_n | x_n), without N/B: shape ``[K, *plates]``."""
        return self.local_sum(lambda t, i: t.log_prob, signed=True)

    @property
    def model_log_prob(self) -> Tensor:
        """Return log p(x_n, z_n) without N/B: shape ``[K, *plates]``."""
        return self.local_sum(lambda t, i: 0 if t.in_guide else t.log_prob)

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """Return the shape of one particle's weights: ``[*plates]``, or ``[elements]``."""
        shapes = self.shapes
        return shapes[0] if len(shapes) == 1 else (sum(math.prod(s) for s in shapes),)

    def check_shapes(self, **values: Tensor) -> None:
        """
        Check that tensors have an entry for each weight; others would be broadcast and summed.

        :raises ValueError: otherwise.
        """
        for name, value in values.items():
            if value.shape != self.weights_shape:
                raise ValueError(
                    f"the {name} must have an entry for each weight of sample.log_weight, without "
                    f"its first dim, that of the particles: shape {list(self.weights_shape)}, got "
                    f"{list(value.shape)}"
                )

    @cached_property
    def scale(self) -> float | Tensor:
        """Return N/B of each entry's plates; a float if it is the same for all."""
        scales = [subsampling_scale(frames) for frames in self.frames] or [1.0]
        return scales[0] if len(set(scales)) == 1 else self._spread(scales)

    @property
    def num_weights(self) -> Tensor:
        """Return the number of weights in the bound, N/B times those of a minibatch."""
        return (self.log_weight.new_ones(self.log_weight.shape[1:]) * self.scale).sum()

    def _spread(self, values: list[float]) -> Tensor:
        """Expand one number per block to the block's entries."""
        parts = self.split(self.log_weight[0])
        return torch.cat([p.new_full((p.numel(),), v) for p, v in zip(parts, values, strict=True)])

    def with_runs(self, runs: list[Run]) -> WeightedParticles:
        """Return a sample of further runs with the same sites and plates."""
        sample = WeightedParticles(runs, self.block_of, self.structure)
        vars(sample).update(frames=self.frames, shapes=self.shapes)  # cached properties
        return sample

    def global_values(self) -> dict[str, Tensor]:
        """Return the draws of the guide's global sites."""
        nodes = self.runs[0].guide_trace.nodes
        return {name: nodes[name]["value"] for name in self.structure.global_sites.guide}

    def is_local(self, term: Term) -> bool:
        """Return whether a term of the first run belongs to a block."""
        return self.block_of[0][term.key] is not None

    @property
    def has_local_scores(self) -> bool:
        """Return whether a local draw is not reparameterized."""
        terms = self.runs[0].terms
        return any(isinstance(t.score, Tensor) and self.is_local(t) for t in terms)

    def global_terms(self) -> list[Term]:
        """Return the terms outside every block, from the first run (all runs have the same)."""
        return [t for t in self.runs[0].terms if not self.is_local(t)]

    def align(self, value: Tensor, term: Term, i: int) -> Tensor:
        """
        Reshape a block's part of ``[K, *plates]`` so that it multiplies a site's value in run i.

        :param value: the part of the term's block, from :meth:`split`.
        """
        run, b = self.runs[i], self.block_of[i][term.key]
        assert b is not None
        return run.align(
            value if run.leading is not None else value[i],
            self.blocks[b].dims,
            term.site["value"],
            term.site["fn"].event_dim,
        )

    @cached_property
    def frames(self) -> list[tuple[CondIndepStackFrame, ...]]:
        """Return each block's plates in this step, with their sizes."""
        frames = {plate_key(f): f for t in self.runs[0].terms for f in plate_frames(t.site)}
        return [tuple(frames[key] for key in b.plates) for b in self.blocks]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the sizes of each block's plates, without sequential ones."""
        return [tuple(f.size for f in frames if f.dim is not None) for frames in self.frames]

    def _stack(self, parts: list[Tensor | None], sizes: tuple[int, ...]) -> Tensor:
        shape, tensors = (self.runs[0].leading or 1, *sizes), [p for p in parts if p is not None]
        if len(tensors) < len(parts):
            like = tensors[0] if tensors else torch.zeros(())
            tensors = [like.new_zeros(shape) if p is None else p for p in parts]
        tensors = [p if p.dim() == len(shape) else p.unsqueeze(0) for p in tensors]
        full = [p if p.shape == shape else p.expand(shape) for p in tensors]
        return full[0] if len(full) == 1 else torch.cat(full)

    def join(self, parts: list[Tensor]) -> Tensor:
        """Concatenate one ``[K, *plates]`` per block; the inverse of :meth:`split`."""
        if len(parts) == 1:
            return parts[0]
        flat = [p.reshape(p.shape[0], -1) for p in parts]
        return torch.cat(flat, dim=1) if flat else self._no_weights()

    def _no_weights(self) -> Tensor:
        """Return empty weights, for a program whose latents all became global."""
        return self.runs[0].terms[0].log_prob.new_zeros((self.num_particles, 0))

    def split(self, value: Tensor) -> list[Tensor]:
        """Split ``[K, *plates]`` (or ``[K, elements]``) into one tensor per block."""
        if len(self.blocks) == 1:
            return [value]
        lead = value.shape[:-1]
        parts = value.split([math.prod(s) for s in self.shapes], dim=-1)
        return [p.reshape(lead + s) for p, s in zip(parts, self.shapes, strict=True)]


def _plus(total: Tensor | None, part: Tensor, minus: bool) -> Tensor:
    if total is None:
        return -part if minus else part
    return total - part if minus else total + part


# The particles of one step: local latents drawn per particle, and global ones once.

_NONE = GlobalSites()
# The kind of the findings of the sites that the particles of a call share.
_SHARED = "shared sites"

# Returns the sample function of one run's guide, from its particles and the shared sites.
MakeSampleFn = Callable[[range, frozenset[str]], SampleFn]


class ParticleSampler:
    """
    Draws the particles of one objective, vectorized or one after another.

    A sampler caches the programs' structure between steps, and analyzes it again when it changes.

    :param int num_particles: the number of draws of the local latents.
    :param vectorize: whether to run the programs once for all particles. None does so only if it is
        correct, and otherwise runs a loop.
    :param max_plate_nesting: the number of batch dims of plates; infinite to infer it.
    :param bool joint: use one weight for the whole program.
    :param bool strict_enumeration: reject guide sites that are marked for enumeration.
    :param bool find_roots: find the guide sites that depend on no other draw.
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
        """Return whether ``count`` particles share one run."""
        find_shared = partial(self._shared_sites, programs)
        execution = Execution(programs, find_shared=find_shared)
        return count > 1 and self.runner.together(execution)

    def _shared_sites(self, programs: Programs, run: Run) -> GlobalSites:
        """Return the sites that all particles of a run share."""
        self._latest = self.structures.of(programs, run)
        self.analyses.of(programs).put((_SHARED, programs.call.key), self._latest.global_sites)
        return self._latest.global_sites

    def independent(
        self, programs: Programs, detach_latents: bool = False, defers: bool = False
    ) -> list[Run]:
        """
        Draw every latent, also global ones, once per particle, without weights.

        :param detach_latents: whether latents are detached in the model.
        :param defers: whether densities are computed only when they are needed. Gradients must then
            be on or off as in this call.
        """
        attached = frozenset[str]() if detach_latents else None
        substitutes = Substitutes(attached=attached, defers=defers)
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

        :param make_sample_fn: called for each run with its particles, and the guide's sites that
            they share; returns the sample function of the guide's sites.
        :param detach_latents: whether local latents are detached in the model.
        :param count: another number of particles.
        :param keep_noise: whether to record random numbers outside sample sites, for further runs
            at other latents.
        """
        count, subsamples = count or self.num_particles, Minibatch()

        def run_rows(fixed: Mapping[str, Tensor], rows: range | None, layout: Layout) -> Run:
            shared, rows = layout.shared.guide, rows or range(layout.count or 1)
            sample_fn = None if make_sample_fn is None else make_sample_fn(rows, shared)
            attached = shared if detach_latents else None
            noise = ModelNoise() if keep_noise else None
            return layout.run(programs, Substitutes(subsamples, fixed, sample_fn, attached, noise))

        known = self.analyses.of(programs).latest((_SHARED, programs.call.key))
        shared, guesses = known or self._latest.global_sites, known is None
        depends = make_sample_fn is not None or detach_latents
        execute, find_shared = partial(run_rows, {}, None), partial(self._shared_sites, programs)
        execution = Execution(programs, execute, subsamples, shared, find_shared, guesses, depends)
        run = self.runner.run_together(execution, count) if count > 1 else None
        first = run or self.runner.run(execution, None)
        sample = WeightedParticles([first], [self._latest.block_of], self._latest)
        if run is None and count > 1:
            sample = self._with_fixed_sites(execution, sample, count, run_rows)
        if sample.structure.collapsed and (count > 1 or make_sample_fn is not None):
            check_not_collapsed(sample.structure)
        return sample

    def _with_fixed_sites(
        self,
        execution: Execution,
        sample: WeightedParticles,
        count: int,
        run_rows: Callable[[Mapping[str, Tensor], range, Layout], Run],
    ) -> WeightedParticles:
        """Run the other particles one by one, with the global latents of the first."""
        fixed_sharing = replace(execution, shared=sample.structure.global_sites, find_shared=None)
        rows, fixed = (range(k, k + 1) for k in range(1, count)), sample.global_values()
        executions = (partial(run_rows, fixed, row) for row in rows)
        each = (replace(fixed_sharing, execute=execute) for execute in executions)
        runs = [*sample.runs, *(self.runner.run(e, None) for e in each)]
        return self.arrange(execution.programs, runs)

    def single(
        self, programs: Programs, subsamples: Minibatch, values: Mapping[str, Tensor] | None = None
    ) -> WeightedParticles:
        """
        Draw every latent once, also global ones, on a given minibatch.

        :param values: values of fixed guide sites.
        """
        return self.arrange(programs, [self.run_once(programs, subsamples, values)])

    def run_once(
        self,
        programs: Programs,
        subsamples: Minibatch | None = None,
        values: Mapping[str, Tensor] | None = None,
    ) -> Run:
        """Run the programs without leading dims."""
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

        :param count: the number of particles, which may differ from the sample's.
        :param make_sample_fn: as in :meth:`sample`; returns the sample function of local sites;
            None to draw them again.
        :param detach_latents: whether local latents are detached in the model.
        """
        fixed, shared = sample.global_values(), sample.structure.global_sites
        attached: frozenset[str] | None = frozenset() if detach_latents else None

        def find_shared(run: Run) -> GlobalSites:
            self.structures.of(programs, run)  # checks the structure
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

        Only for mean-field guides.

        :param latents: for each run of ``sample``, the changed fields by guide site: values and
            annotations.
        """
        replays, shared = [], sample.structure.global_sites
        for run, changes in zip(sample.runs, latents, strict=True):
            layout = Layout(run.leading, run.nesting, shared, run.mode, run.state_dim is not None)
            replays.append(replay_model(programs, run, changes, layout.leading()))
        if all(same for _, same in replays):
            return sample.with_runs([run for run, _ in replays])
        runs = [run if same else self._checked(programs, run, shared) for run, same in replays]
        return self.arrange(programs, runs)

    def replay_detached(
        self, programs: Programs, sample: WeightedParticles
    ) -> WeightedParticles | None:
        """
        Run the model alone at the detached draws of ``sample``.

        :returns: a sample with the terms of the model only, or None if the model has other sites.
        """
        detached = []
        for run in sample.runs:
            nodes = run.guide_trace.nodes
            drawn = {n: s["value"] for n, s in nodes.items() if is_latent(s)}
            draws = {n: {"value": changed_draw(Tensor.detach, v)} for n, v in drawn.items()}
            terms = tuple(t for t in run.terms if not t.in_guide)
            trace = with_changes(run.guide_trace, draws)
            detached.append(replace(run, guide_trace=trace, terms=terms))
        replayed = self.replay(programs, sample.with_runs(detached), [{} for _ in detached])
        return replayed if replayed.block_of is sample.block_of else None

    def arrange(self, programs: Programs, runs: list[Run]) -> WeightedParticles:
        """Sort runs whose global latents may differ into a sample, to sum them per datum."""
        structures = [self.structures.of(programs, run) for run in runs]
        if any(s.blocks != structures[0].blocks for s in structures):
            raise ValueError(
                f"two particles of one step have different plates: {structures}; plates must not "
                f"depend on the latents (joint=True weighs such programs as a whole)"
            )
        return WeightedParticles(runs, [s.block_of for s in structures], structures[0])

    def _checked(self, programs: Programs, run: Run, shared: GlobalSites) -> Run:
        """Check a run of another branch of the model, which may have other latents."""
        run = replace(run, terms=terms_of(run.guide_trace, run.model_trace, run.state_dim))
        self.runner.check(programs, run, shared)
        return without_auxiliary(programs, run, self.analyses)


def _execution(
    programs: Programs, substitutes: Substitutes, shared: GlobalSites = _NONE
) -> Execution:
    def execute(layout: Layout) -> Run:
        return layout.run(programs, substitutes)

    return Execution(programs, execute, substitutes.subsamples, shared)


# A sample in which the model's enumerated sites are drawn, like all other latents.


def with_drawn_states(programs: Programs, sample: WeightedParticles) -> WeightedParticles:
    """Draw each enumerated site from its posterior given the other latents of a sample."""
    if all(run.state_dim is None for run in sample.runs):
        return sample
    shared = sample.structure.global_sites

    def with_states(run: Run) -> Run:
        leading = Layout(run.leading, run.nesting, shared, run.mode).leading()
        substitutes = Substitutes(run.subsamples, draw_states(run.model_trace))
        model_trace = run_model(programs, run.guide_trace, substitutes, leading)
        terms = terms_of(run.guide_trace, model_trace)
        return replace(run, model_trace=model_trace, terms=terms, state_dim=None, noise=None)

    return sample.with_runs([with_states(run) for run in sample.runs])
