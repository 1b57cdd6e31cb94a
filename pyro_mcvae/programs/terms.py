"""The factors of the log weight: the densities of both programs' sites."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
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

from pyro_mcvae.programs import sites
from pyro_mcvae.programs.known_logs import known_logs
from pyro_mcvae.programs.sites import (
    RELAXED,
    is_masked,
    is_random,
    is_scored,
    layers,
    naming_site,
    reparameterized,
    unscaled_log_prob,
    with_mask,
)
from pyro_mcvae.programs.types import (
    LEADING,
    Distribution,
    FactorKey,
    Site,
    is_subsampled,
    noted,
    plate_key,
    subsampling_scale,
)

# The density of a guide's draw in Pyro's parts: its value, its score, its path gradient.

# What has no parts of its own: the default, and what passes on those of another distribution.
_PLAIN = (
    None,
    *(c.score_parts for c in (PyroDistribution, ExpandedDistribution, MaskedDistribution)),
)


def score_parts(site: Site) -> ScoreParts:
    """Pyro's ``ScoreParts`` of a guide site, unscaled and unmasked; the score of the whole draw."""
    if site["infer"].get(RELAXED):
        log_prob = unscaled_log_prob(site, "guide")
        return ScoreParts(log_prob, 0, log_prob)
    if is_random(site) and not reparameterized(site):
        # Not the distribution's own: rejection samplers know the parts of their own draws only.
        log_prob = unscaled_log_prob(site, "guide")
        drawn = with_mask(site["fn"], None) if is_masked(site["fn"]) else None
        return ScoreParts(log_prob, log_prob if drawn is None else drawn.log_prob(site["value"]), 0)
    with naming_site(site, "guide"), known_logs(site["value"]):
        parts = site["fn"].score_parts(site["value"], *site["args"], **site["kwargs"])
        if is_rejection_sampled(site["fn"]):
            return parts._replace(score_function=_score(site["fn"], site["value"]))
        return parts


def is_rejection_sampled(fn: Distribution) -> bool:
    """
    Whether a distribution is, or is made of, a :class:`pyro.distributions.Rejector`.

    Its ``has_rsample`` is half of the truth: what it accepts follows the parameters too, so that
    the gradient of an expectation needs the score function of that (Naesseth et al., 2017).
    """
    return any(map(_has_parts, layers(fn)))


def _has_parts(fn: Distribution) -> bool:
    return getattr(type(fn), "score_parts", None) not in _PLAIN


def _score(fn: Distribution, value: Tensor) -> Tensor:
    """That score, which Pyro drops under ``to_event`` and transforms."""
    if _has_parts(fn):
        score: Tensor = fn.score_parts(value).score_function
        return score
    if isinstance(fn, TransformedDistribution):
        for transform in reversed(fn.transforms):
            value = transform.inv(value)
    return sum_rightmost(_score(fn.base_dist, value), fn.event_dim - fn.base_dist.event_dim)


# The factors of the weight of one run, and what tells the sites of two runs apart.


class SiteForm(NamedTuple):
    """
    All that a site shows but its values.

    :ivar draw: of a latent of the guide: whether it is a point mass, and whether reparameterized.
    :ivar plates: its frames, outermost first, as plain tuples: frames are slow to compare.
    :ivar shapes: of its batch, its event and its log density.
    :ivar marks: what it says of its place in the other program, and of its dims.
    :ivar members: of a sum over enumerated sites: their forms.
    """

    key: FactorKey
    observed: bool
    draw: tuple[bool, bool]
    plates: tuple[tuple[Any, ...], ...]
    distribution: type
    shapes: tuple[Any, ...]
    marks: tuple[Hashable, ...]
    members: tuple[SiteForm, ...]

    @property
    def structure(self) -> Hashable:
        """
        What of it belongs to its program's structure, however many data there are: the user's
        plates, and which of these are subsampled, but no sizes.
        """
        frames = [CondIndepStackFrame(*f) for f in self.plates]
        plates = tuple([(plate_key(f), is_subsampled(f)) for f in frames if f.name != LEADING])
        members = tuple([m.structure for m in self.members])
        return self.key, self.observed, self.draw, plates, members


# How large a site is: its plates' sizes, and its event.
SiteSizes = tuple[tuple[int, ...], tuple[int, ...]]


def site_sizes(site: Site) -> SiteSizes:
    """The sizes of a site's plates, the particles' left out, and of its event."""
    frames = site["cond_indep_stack"]
    plates = tuple([f.size for f in frames if f.name != LEADING])
    return plates, tuple(getattr(site["fn"], "event_shape", ()))


_MARKS = ("enumerate", "is_auxiliary", "_enumerate_dim")


def _num_states(site: Site) -> tuple[int, ...]:
    """How many values an enumerated site has at once."""
    dim = site["infer"].get("_enumerate_dim")
    return () if dim is None else (site["value"].shape[dim - site["fn"].event_dim],)


@dataclass(frozen=True)
class Term:
    """
    One factor of the weight of one run.

    :ivar log_prob: the site's log density with the user's scale and mask, not the plates' N/B;
        shape ``[leading, *batch]``.
    :ivar entropy: the part of a guide's ``log_prob`` that its own gradient passes through.
    :ivar score: the guide's score-function term, unscaled, or 0 where it is reparameterized.
    :ivar left_out: whether it is the draw of an auxiliary variable, whose density has no place in
        the weight.
    :ivar members: of a sum over enumerated sites of the model: the factors that were summed, not
        scaled.
    """

    key: FactorKey
    site: Site
    log_prob: Tensor
    entropy: Tensor | int = 0
    score: Tensor | int = 0
    left_out: bool = False
    members: tuple[Term, ...] = ()

    @cached_property
    def in_guide(self) -> bool:
        return self.key.program == "guide"

    @cached_property
    def plate_scale(self) -> float:
        """N/B of the plates around the site."""
        return subsampling_scale(self.site["cond_indep_stack"])

    def without_density(self) -> Term:
        """A draw of the guide that was made, and has its score, but is no factor."""
        zero = torch.zeros_like(self.log_prob)
        return replace(self, log_prob=zero, entropy=0, left_out=True)

    @cached_property
    def form(self) -> SiteForm:
        """All that the site shows but its values."""
        site, fn, observed = self.site, self.site["fn"], self.site["is_observed"]
        drawn = self.in_guide and not observed
        draw = drawn and sites.is_delta(fn), drawn and sites.reparameterized(site)
        plates = tuple([tuple(frame) for frame in site["cond_indep_stack"]])
        batch, event = getattr(fn, "batch_shape", None), getattr(fn, "event_shape", None)
        marks = tuple([site["infer"].get(mark) for mark in _MARKS])
        shapes, members = (batch, event, self.log_prob.shape), tuple([t.form for t in self.members])
        return SiteForm(self.key, observed, draw, plates, type(fn), shapes, marks, members)

    @property
    def sites(self) -> tuple[Term, ...]:
        """The factors of single sites: those that were summed, or the factor itself."""
        return self.members or (self,)

    @cached_property
    def sizes(self) -> SiteSizes:
        """How large the site is; for a sum also its members, and how many states they have."""
        own = site_sizes(self.site)
        if self.members:
            inner = [n for t in self.members for part in t.sizes for n in part]
            return own[0], (*inner, *(n for t in self.members for n in _num_states(t.site)))
        return own


def scored(trace: Trace) -> Iterator[Site]:
    """The sites of a trace that carry a log density."""
    return (site for site in trace.nodes.values() if is_scored(site))


def possible_terms(make: Callable[[Site], Term], trace: Trace) -> Iterator[Term]:
    """The terms of a trace, by :func:`model_term` or :func:`guide_term`, that can be computed."""
    for site in scored(trace):
        try:
            yield make(site)
        except ValueError:
            continue  # a flow without an inverse


def model_term(site: Site, key: FactorKey | None = None, log_prob: Tensor | None = None) -> Term:
    """The log density of a scored site of the model; ``key`` and density where they are known."""
    if log_prob is None:
        log_prob = sites.masked(site, sites.unscaled_log_prob(site, "model"))
    return Term(key or FactorKey("model", site["name"]), site, log_prob)


def guide_term(site: Site, key: FactorKey | None = None) -> Term:
    """The log density of a scored site of the guide; ``key`` where it is known already."""
    key = key or FactorKey("guide", site["name"])
    known = noted(site, "log_prob")
    if known is None:
        return _scored_term(site, key)
    # From the noise that the value was made of; see NoiseCoordinate.log_prob.
    log_prob = sites.masked(site, known)
    return Term(key, site, log_prob, log_prob)


def _scored_term(site: Site, key: FactorKey) -> Term:
    """The log density of a draw's value, by Pyro's parts."""
    parts = score_parts(site)
    entropy: Tensor | int
    log_prob = sites.masked(site, parts.log_prob)
    if parts.entropy_term is parts.log_prob or site["is_observed"]:
        # What is observed in a guide, a factor, is a function of the draws and of parameters: it
        # has a gradient of its own, whether or not a score function comes with it.
        entropy = log_prob
    elif is_identically_zero(parts.entropy_term):
        entropy = 0
    else:
        entropy = sites.masked(site, parts.entropy_term)
    score = 0 if is_identically_zero(parts.score_function) else parts.score_function
    return Term(key, site, log_prob, entropy, score)


def model_terms(model_trace: Trace) -> list[Term]:
    """The log density of every scored site of the model."""
    return [model_term(s) for s in scored(model_trace)]


def guide_terms(guide_trace: Trace) -> list[Term]:
    """The log density of every site of the guide that is a factor of the weight."""
    return [guide_term(s) for s in scored(guide_trace) if not sites.observes_data(s)]


def observed_terms(guide_trace: Trace) -> list[Term]:
    """
    The densities of what a guide observes, with all of their gradient.

    Nothing was drawn from them, so no weight has them. Averages of log p - log q count them, as
    Pyro does.
    """
    return [_observed_term(s) for s in scored(guide_trace) if sites.observes_data(s)]


def _observed_term(site: Site) -> Term:
    log_prob = sites.masked(site, sites.unscaled_log_prob(site, "guide"))
    return Term(FactorKey("guide", site["name"]), site, log_prob, log_prob)
