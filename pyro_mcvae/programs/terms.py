"""The factors of the log weight: the densities of both programs' sites."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from pyro.distributions.distribution import Distribution as PyroDistribution
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.distributions.util import is_identically_zero, sum_rightmost
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import TransformedDistribution

from pyro_mcvae.ops.compat import ENUMERATE_DIM, validate
from pyro_mcvae.programs import sites
from pyro_mcvae.programs.distributions import may_cache
from pyro_mcvae.programs.log_values import at_logs
from pyro_mcvae.programs.sites import (
    is_masked,
    is_random,
    is_scored,
    layers,
    naming_site,
    observes_data,
    reparameterized,
    unscaled_log_prob,
    with_mask,
)
from pyro_mcvae.programs.types import (
    PARTICLE_PLATE,
    Distribution,
    FactorKey,
    Site,
    is_subsampled,
    noted,
    plate_key,
    subsampling_scale,
)

# The density of a guide's draw in Pyro's parts: its value, its score, its path gradient.

# score_parts methods without separate parts: the default, and methods that delegate.
_PLAIN = (
    None,
    *(c.score_parts for c in (PyroDistribution, ExpandedDistribution, MaskedDistribution)),
)


def score_parts(site: Site) -> ScoreParts:
    """Return Pyro's ``ScoreParts`` of a guide site, unscaled, unmasked, for the whole draw."""
    if is_random(site) and not reparameterized(site):
        # Do not use the distribution's parts: rejection samplers have them only for their own
        # draws.
        log_prob = unscaled_log_prob(site, "guide")
        drawn = with_mask(site["fn"], None) if is_masked(site["fn"]) else None
        return ScoreParts(log_prob, log_prob if drawn is None else drawn.log_prob(site["value"]), 0)
    with naming_site(site, "guide"):
        fn = at_logs(site["fn"], site["value"])
        parts = fn.score_parts(site["value"], *site["args"], **site["kwargs"])
        if is_rejection_sampled(site["fn"]):
            return parts._replace(score_function=_score(site["fn"], site["value"]))
        return parts


def is_rejection_sampled(fn: Distribution) -> bool:
    """
    Return whether a distribution is, or is made of, a :class:`pyro.distributions.Rejector`.

    Its ``has_rsample`` is only partly true, because acceptance depends on the parameters too. The
    gradient of an expectation needs the score function of the acceptance (Naesseth et al., 2017).
    """
    return any(map(_has_parts, layers(fn)))


def _has_parts(fn: Distribution) -> bool:
    return getattr(type(fn), "score_parts", None) not in _PLAIN


def _score(fn: Distribution, value: Tensor) -> Tensor:
    """Return the score of a rejection sampler, which Pyro drops in wrappers and transforms."""
    if _has_parts(fn):
        score: Tensor = fn.score_parts(value).score_function
        return score
    if isinstance(fn, TransformedDistribution):
        for transform in reversed(fn.transforms):
            value = transform.inv(value)
    return sum_rightmost(_score(fn.base_dist, value), fn.event_dim - fn.base_dist.event_dim)


# The factors of the weight of one run, and the structure by which runs are compared.


class SiteForm(NamedTuple):
    """
    The structure of a site: everything except its values.

    :ivar draw: for a latent of the guide: whether it is a point mass, and whether reparameterized.
    :ivar plates: its frames, outermost first, as plain tuples: frames are slow to compare.
    :ivar shapes: batch shape, event shape and shape of the log density.
    :ivar marks: its ``infer`` entries on enumeration and auxiliary variables.
    :ivar members: for a sum over enumerated sites: their forms.
    :ivar states: for such a sum: the number of values of each of its enumerated sites.
    """

    key: FactorKey
    observed: bool
    draw: tuple[bool, bool]
    plates: tuple[tuple[Any, ...], ...]
    distribution: type
    shapes: tuple[Any, ...]
    marks: tuple[Hashable, ...]
    members: tuple[SiteForm, ...]
    states: tuple[int, ...]

    @property
    def structure(self) -> Hashable:
        """
        Return the part that is the same with and without leading dims.

        It has the user's plates with their sizes, and which of them are subsampled.
        """
        frames = [CondIndepStackFrame(*f) for f in self.plates if f[0] != PARTICLE_PLATE]
        plates = tuple([(plate_key(f), f.size, is_subsampled(f)) for f in frames])
        inner = self.shapes[1], self.states, tuple([m.structure for m in self.members])
        return self.key, self.observed, self.draw, plates, inner


_MARKS = ("enumerate", "is_auxiliary", ENUMERATE_DIM)


def _num_states(site: Site) -> tuple[int, ...]:
    """Return the number of values of an enumerated site, or nothing for other sites."""
    dim = site["infer"].get(ENUMERATE_DIM)
    return () if dim is None else (site["value"].shape[dim - site["fn"].event_dim],)


@dataclass(frozen=True)
class Deferred:
    """The log density of a site of a program, which is not computed yet."""

    site: Site
    program: str

    @classmethod
    def checked(cls, site: Site, program: str) -> Deferred:
        """
        Validate the value of a site, and return its density, which is not computed yet.

        :raises ValueError: naming a site whose density rejects its value.
        """
        fn = sites.bare(site["fn"])  # wrappers do not validate
        with naming_site(site, program):
            validate(fn, site["value"])
        return cls(site, program)

    @property
    def shape(self) -> tuple[torch.Size | None, ...]:
        """Return the values that determine the shape, besides that of the distribution."""
        return tuple([getattr(self.site[name], "shape", None) for name in ("value", "mask")])

    def log_prob(self) -> Tensor:
        return sites.masked(self.site, sites.unscaled_log_prob(self.site, self.program))


@dataclass(frozen=True)
class Term:
    """
    One factor of the weight of one run.

    :ivar density: :attr:`log_prob`, or an object that computes it at the first use.
    :ivar entropy: the part of a guide's ``log_prob`` that its own gradient passes through; None for
        all of it.
    :ivar score: the guide's score-function term, unscaled, or 0 where it is reparameterized.
    :ivar left_out: whether it is the draw of an auxiliary variable, whose density is not part of
        the weight.
    :ivar members: for a sum over enumerated sites of the model: the summed factors, not scaled.
    """

    key: FactorKey
    site: Site
    density: Tensor | Deferred
    entropy: Tensor | int | None = 0
    score: Tensor | int = 0
    left_out: bool = False
    members: tuple[Term, ...] = ()

    @cached_property
    def log_prob(self) -> Tensor:
        """
        Return the site's log density with the user's scale and mask, without the plates' N/B.

        Its shape is ``[leading, *batch]``.
        """
        return self.density.log_prob() if isinstance(self.density, Deferred) else self.density

    @cached_property
    def in_guide(self) -> bool:
        return self.key.program == "guide"

    @cached_property
    def plate_scale(self) -> float:
        """Return N/B of the plates around the site."""
        return subsampling_scale(self.site["cond_indep_stack"])

    def without_density(self) -> Term:
        """Return the term of a draw that keeps its score but is not a factor of the weight."""
        zero = torch.zeros_like(self.log_prob)
        return replace(self, density=zero, entropy=0, left_out=True)

    @cached_property
    def form(self) -> SiteForm:
        """Return everything about the site except its values."""
        site, fn, observed = self.site, self.site["fn"], self.site["is_observed"]
        drawn = self.in_guide and not observed
        draw = drawn and sites.is_delta(fn), drawn and sites.reparameterized(site)
        plates = tuple([tuple(frame) for frame in site["cond_indep_stack"]])
        batch, event = getattr(fn, "batch_shape", None), getattr(fn, "event_shape", None)
        marks = tuple([site["infer"].get(mark) for mark in _MARKS])
        shapes, members = (batch, event, self.density.shape), tuple([t.form for t in self.members])
        inner = marks, members, self.states
        return SiteForm(self.key, observed, draw, plates, type(fn), shapes, *inner)

    @property
    def states(self) -> tuple[int, ...]:
        """Return the number of values of each enumerated site of a sum."""
        return tuple([n for t in self.members for n in _num_states(t.site)])

    @property
    def sites(self) -> tuple[Term, ...]:
        """Return the factors of single sites: the summed ones, or the factor itself."""
        return self.members or (self,)


def scored(trace: Trace) -> Iterator[Site]:
    """Yield the sites of a trace that carry a log density."""
    return (site for site in trace.nodes.values() if is_scored(site))


def model_term(site: Site, log_prob: Tensor | None = None) -> Term:
    """Return the term of a scored model site; pass ``log_prob`` to reuse it."""
    if log_prob is None:
        log_prob = sites.masked(site, sites.unscaled_log_prob(site, "model"))
    return Term(FactorKey("model", site["name"]), site, log_prob)


def guide_term(site: Site, key: FactorKey | None = None) -> Term:
    """Return the term of a scored guide site; pass ``key`` to reuse it."""
    key = key or FactorKey("guide", site["name"])
    stored_log_prob = noted(site, "log_prob")
    if stored_log_prob is None:
        return _scored_term(site, key)
    # Computed from the noise of the value; see NoiseCoordinate.log_prob.
    log_prob = sites.masked(site, stored_log_prob)
    return Term(key, site, log_prob, None)


def _scored_term(site: Site, key: FactorKey) -> Term:
    """Return the term of a draw, from Pyro's parts."""
    parts = score_parts(site)
    entropy: Tensor | int | None
    log_prob = sites.masked(site, parts.log_prob)
    if parts.entropy_term is parts.log_prob or site["is_observed"]:
        # An observed site of a guide is a function of the draws and of parameters. So it has a
        # gradient of its own, with or without a score function.
        entropy = None
    elif is_identically_zero(parts.entropy_term):
        entropy = 0
    else:
        entropy = sites.masked(site, parts.entropy_term)
    score = 0 if is_identically_zero(parts.score_function) else parts.score_function
    return Term(key, site, log_prob, entropy, score)


def model_terms(model_trace: Trace, defers: bool = False) -> list[Term]:
    """Return the log density of every scored site of the model."""
    make = _deferred_model_term if defers else model_term
    return [make(site) for site in scored(model_trace)]


def guide_terms(guide_trace: Trace, defers: bool = False) -> list[Term]:
    """Return the log density of every site of the guide that is a factor of the weight."""
    make = _deferred_guide_term if defers else guide_term
    return [make(site) for site in scored(guide_trace) if not observes_data(site)]


def _deferred_model_term(site: Site) -> Term:
    """Return :func:`model_term`, of latents with a density that is computed later."""
    if site["is_observed"] or may_cache(site["fn"]):
        return model_term(site)
    return Term(FactorKey("model", site["name"]), site, Deferred.checked(site, "model"))


def _deferred_guide_term(site: Site) -> Term:
    """Return :func:`guide_term`, of pathwise draws with a density that is computed later."""
    is_pathwise = is_random(site) and reparameterized(site)
    if not is_pathwise or may_cache(site["fn"]) or is_rejection_sampled(site["fn"]):
        return guide_term(site)
    return Term(FactorKey("guide", site["name"]), site, Deferred.checked(site, "guide"), None)


def observed_terms(guide_trace: Trace) -> list[Term]:
    """
    Return the densities of a guide's observed sites, with their full gradient.

    They are not draws, so no weight includes them. Averages of log p - log q include them, as in
    Pyro.
    """
    return [_observed_term(s) for s in scored(guide_trace) if observes_data(s)]


def _observed_term(site: Site) -> Term:
    log_prob = sites.masked(site, sites.unscaled_log_prob(site, "guide"))
    return Term(FactorKey("guide", site["name"]), site, log_prob, None)
