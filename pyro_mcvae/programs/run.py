"""One run of guide and model: its terms, what it shows, and its sums over plates."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.programs.mapping import Way
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.model_noise import ModelNoise
from pyro_mcvae.programs.sites import changed_draw, is_random
from pyro_mcvae.programs.state_sums import summed_terms
from pyro_mcvae.programs.terms import (
    SiteForm,
    SiteSizes,
    Term,
    guide_terms,
    model_terms,
    observed_terms,
)


@dataclass(frozen=True)
class Run:
    """
    The terms of one execution of both programs.

    :ivar terms: by :func:`terms_of`, or without some of them.
    :ivar nesting: how many batch dims belong to plates.
    :ivar leading: the size of the leading dimension at ``-nesting - 1``, or None if there is none.
    :ivar subsamples: the minibatch: the indices of each plate.
    :ivar state_dim: the first batch dim for the values of the model's enumerated sites, which are
        summed; None where the model drew them, if it has any.
    :ivar noise: what the model drew apart from its sites; None where nobody looked.
    :ivar way: how its particles were run.
    """

    guide_trace: Trace
    model_trace: Trace
    terms: tuple[Term, ...]
    nesting: int
    leading: int | None
    subsamples: Minibatch = field(default_factory=Minibatch)
    state_dim: int | None = None
    noise: ModelNoise | None = None
    way: Way = Way.BATCHED

    @cached_property
    def guide_data(self) -> list[Term]:
        """The densities of what the guide observes, which are no factors of the weight."""
        return observed_terms(self.guide_trace)

    @property
    def latents(self) -> dict[str, Tensor]:
        """The guide's random draws, without their graph."""
        nodes = self.guide_trace.nodes.items()
        return {n: changed_draw(Tensor.detach, s["value"]) for n, s in nodes if is_random(s)}

    @property
    def summands(self) -> list[Term]:
        """What a plain ELBO sums: the factors of the weight, and what the guide observes."""
        return [*self.terms, *self.guide_data]

    @cached_property
    def signature(self) -> tuple[Hashable, ...]:
        """
        What the run shows of its programs' structure: sites, plates, which of these are
        subsampled. Runs of one pair of programs with equal signatures have one structure.
        """
        return tuple([form.structure for form in self.form])

    @cached_property
    def form(self) -> tuple[SiteForm, ...]:
        """All that the run shows but its values."""
        return tuple([t.form for t in self.summands])

    @cached_property
    def sizes(self) -> tuple[SiteSizes, ...]:
        """How large the sites of the signature are, the leading dimension left out."""
        return tuple([t.sizes for t in self.terms])

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of the log densities."""
        return tuple([t.log_prob.shape for t in self.terms])

    @property
    def inner_sizes(self) -> frozenset[int]:
        """The sizes of all dims of plates and events."""
        return frozenset(n for sizes in self.sizes for part in sizes for n in part)

    @property
    def outer_sizes(self) -> frozenset[int]:
        """The sizes of the dims to the left of the plates': of particles, states or slots."""
        inner = [t.log_prob.shape[: max(0, t.log_prob.dim() - self.nesting)] for t in self.terms]
        return frozenset(n for shape in inner for n in shape if n > 1)

    def sum_to(self, value: Tensor, dims: tuple[int, ...]) -> Tensor:
        """
        Sum a batch-shaped tensor over all plates but ``dims``: ``[leading, *dims]``, or ``[*dims]``
        where it has no leading dimension.
        """
        needed = -min(dims, default=0)
        if value.dim() < needed:
            value = value.reshape((1,) * (needed - value.dim()) + value.shape)
        lead = -self.nesting - 1
        has_lead = self.leading is not None and value.dim() > self.nesting
        drop = [d for d in range(-value.dim(), 0) if d not in dims and not (has_lead and d == lead)]
        return value.sum(drop) if drop else value

    def align(self, weight: Tensor, dims: tuple[int, ...], value: Tensor, event_dim: int) -> Tensor:
        """
        Reshape ``[leading, *dims]`` so that it multiplies a site's value.

        :param weight: without its first dimension where the run has no leading one.
        """
        sizes = iter(weight.shape[len(weight.shape) - len(dims) :])
        batch = [next(sizes) if d in dims else 1 for d in range(-self.nesting, 0)]
        shape = [*weight.shape[: len(weight.shape) - len(dims)], *batch, *[1] * event_dim]
        # Without a leading dimension a value outside of some plates has fewer dims than they.
        return weight.reshape(shape[max(0, len(shape) - value.dim()) :])


def terms_of(
    guide_trace: Trace, model_trace: Trace, state_dim: int | None = None
) -> tuple[Term, ...]:
    """
    The log density of every site of both traces that is a factor of the weight.

    :param state_dim: that of the run; None where the model drew its enumerated sites.
    """
    return (*model_factors(model_trace, state_dim), *guide_terms(guide_trace))


def model_factors(model_trace: Trace, state_dim: int | None) -> list[Term]:
    """Those of the model; ``state_dim`` as of :func:`terms_of`."""
    return model_terms(model_trace) if state_dim is None else summed_terms(model_trace)
