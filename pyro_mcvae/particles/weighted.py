"""The particles of one step: their log weights per datum, and how these map back to sites."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor

from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.model_noise import ModelNoise
from pyro_mcvae.programs.plates import is_subsampled, plate_frames, plate_key, subsampling_scale
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.structure.blocks import Block, Structure


@dataclass
class WeightedParticles:
    r"""
    Runs of both programs that share one minibatch and their global latents.

    The log weights have shape ``[K, *plates]``, one per particle and datum, where a program has
    one block. With several blocks (sequential plates, or separate data plates) the blocks'
    elements are laid side by side: ``[K, elements]``; with none there are no elements. In any case
    each entry is independent of the others given the global latents, and an objective need not know
    which case it is.

    :ivar runs: one vectorised run, or one run per particle.
    :ivar block_of: for each run, the block of each factor (None: global).
    """

    runs: list[Run]
    block_of: list[Mapping[FactorKey, int | None]]
    structure: Structure

    @property
    def subsamples(self) -> Minibatch:
        """The minibatch that all runs share: the indices of each plate."""
        return self.runs[0].subsamples

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.structure.blocks

    @property
    def plate_names(self) -> tuple[str, ...]:
        """The names of the plates of :attr:`log_weight`; empty for several blocks side by side."""
        if len(self.blocks) != 1:
            return ()
        return tuple(p.name for p in self.blocks[0].plates if p.dim is not None)

    @property
    def num_particles(self) -> int:
        return self.runs[0].leading or len(self.runs)

    def noise(self, count: int) -> Iterator[ModelNoise]:
        """For further runs, of so many particles, what the models are to draw apart from sites."""
        known = [r.noise for r in self.runs if r.noise] if count == self.num_particles else []
        return itertools.chain(known, iter(ModelNoise, None))

    def local_sum(self, pick: Callable[[Term, int], Tensor | int], signed: bool = False) -> Tensor:
        """
        Sum a quantity of the local terms per particle and datum.

        :param pick: maps a term and its run's index to a batch-shaped tensor, or 0 to leave out.
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
        r"""log p(x_n, z_n) - log q(z_n | x_n), without subsampling's N/B: ``[K, *plates]``."""
        return self.local_sum(lambda t, i: t.log_prob, signed=True)

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """``[*plates]``, or ``[elements]``: that of one particle's weights."""
        shapes = self.shapes
        return shapes[0] if len(shapes) == 1 else (sum(math.prod(s) for s in shapes),)

    def check_shapes(self, **values: Tensor) -> None:
        """
        :raises ValueError: for what has no entry for each weight: it would be summed all the same.
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
        """N/B of each entry's plates; a float where it is the same for all."""
        scales = [subsampling_scale(frames) for frames in self.frames] or [1.0]
        return scales[0] if len(set(scales)) == 1 else self._spread(scales)

    @property
    def num_weights(self) -> Tensor:
        """How many weights a bound is the sum of, N/B times those of a minibatch."""
        return (self.log_weight.new_ones(self.log_weight.shape[1:]) * self.scale).sum()

    def _spread(self, values: list[float]) -> Tensor:
        """A number for each block, at each of its entries."""
        parts = self.split(self.log_weight[0])
        return torch.cat([p.new_full((p.numel(),), v) for p, v in zip(parts, values, strict=True)])

    def with_runs(self, runs: list[Run]) -> WeightedParticles:
        """A sample of further runs that show the same sites and plates as these."""
        sample = WeightedParticles(runs, self.block_of, self.structure)
        vars(sample).update(frames=self.frames, shapes=self.shapes)  # which are cached
        return sample

    def global_values(self) -> dict[str, Tensor]:
        """The draws of the guide's global sites."""
        nodes = self.runs[0].guide_trace.nodes
        return {name: nodes[name]["value"] for name in self.structure.global_sites.guide}

    def is_local(self, term: Term) -> bool:
        """Whether a term of the first run belongs to a block."""
        return self.block_of[0][term.key] is not None

    @property
    def has_local_scores(self) -> bool:
        """Whether a local draw is not reparameterized."""
        terms = self.runs[0].terms
        return any(isinstance(t.score, Tensor) and self.is_local(t) for t in terms)

    @property
    def subsampled_frames(self) -> list[CondIndepStackFrame]:
        """The plates of the sites that do not show all of their data."""
        frames = (f for t in self.runs[0].terms for f in plate_frames(t.site))
        return [f for f in frames if is_subsampled(f)]

    def global_terms(self) -> list[Term]:
        """The terms outside of every block, from the first run (they are the same in all)."""
        return [t for t in self.runs[0].terms if not self.is_local(t)]

    def align(self, value: Tensor, term: Term, i: int) -> Tensor:
        """
        A block's part of ``[K, *plates]`` in the shape that multiplies a site's value in run i.

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
        """For each block its plates in this step, with their sizes."""
        known = {plate_key(f): f for t in self.runs[0].terms for f in plate_frames(t.site)}
        return [tuple(known[key] for key in b.plates) for b in self.blocks]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """For each block its plates' sizes, those of sequential ones left out."""
        return [tuple(f.size for f in frames if f.dim is not None) for frames in self.frames]

    def _stack(self, parts: list[Tensor | None], sizes: tuple[int, ...]) -> Tensor:
        shape, found = (self.runs[0].leading or 1, *sizes), [p for p in parts if p is not None]
        if len(found) < len(parts):
            like = found[0] if found else torch.zeros(())
            found = [like.new_zeros(shape) if p is None else p for p in parts]
        found = [p if p.dim() == len(shape) else p.unsqueeze(0) for p in found]
        full = [p if p.shape == shape else p.expand(shape) for p in found]
        return full[0] if len(full) == 1 else torch.cat(full)

    def join(self, parts: list[Tensor]) -> Tensor:
        """One ``[K, *plates]`` per block, laid side by side; the inverse of :meth:`split`."""
        if len(parts) == 1:
            return parts[0]
        flat = [p.reshape(p.shape[0], -1) for p in parts]
        return torch.cat(flat, dim=1) if flat else self._no_weights()

    def _no_weights(self) -> Tensor:
        """Where a subsampled plate lies around the factors of every latent."""
        return self.runs[0].terms[0].log_prob.new_zeros((self.num_particles, 0))

    def split(self, value: Tensor) -> list[Tensor]:
        """``[K, *plates]`` (or ``[K, elements]``) as one tensor per block."""
        if len(self.blocks) == 1:
            return [value]
        lead = value.shape[:-1]
        parts = value.split([math.prod(s) for s in self.shapes], dim=-1)
        return [p.reshape(lead + s) for p, s in zip(parts, self.shapes, strict=True)]


def _plus(total: Tensor | None, part: Tensor, minus: bool) -> Tensor:
    if total is None:
        return -part if minus else part
    return total - part if minus else total + part
