"""The density of a guide's draw in Pyro's parts: its value, its score, its path gradient."""

from __future__ import annotations

from pyro.distributions.distribution import Distribution as PyroDistribution
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.distributions.util import sum_rightmost
from torch import Tensor
from torch.distributions import TransformedDistribution

from pyro_mcvae.programs.known_logs import known_logs
from pyro_mcvae.programs.masks import with_mask
from pyro_mcvae.programs.sites import (
    RELAXED,
    is_masked,
    is_random,
    layers,
    naming_site,
    reparameterized,
    unscaled_log_prob,
)
from pyro_mcvae.programs.types import Distribution, Site

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
