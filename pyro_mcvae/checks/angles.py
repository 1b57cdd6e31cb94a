"""Angles of a model that a guide draws on the whole line: each is there once for each turn."""

from __future__ import annotations

import math

from pyro import distributions as dist
from torch.distributions import TransformedDistribution, VonMises, constraints

from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import bare, is_delta, is_latent, is_random, known_support
from pyro_mcvae.programs.types import Distribution, Site

_CIRCULAR = (VonMises, dist.SineBivariateVonMises, dist.SineSkewed)


def is_circular(fn: Distribution) -> bool:
    """Whether draws are angles: the density is one on the circle, and repeats on the line."""
    while not isinstance(fn, _CIRCULAR):
        base = getattr(fn, "base_dist", None)
        if base is None or isinstance(fn, TransformedDistribution):
            return False
        fn = base
    return True


def unwound(run: Run) -> list[str]:
    """
    What is wrong with the angles of a model that its guide draws on the line, for each of them.

    There the density does not end: the integral that a bound is one of is infinite.
    """
    model = run.model_trace.nodes
    sites = {t.key.name: t.site for t in run.terms if t.in_guide}
    # Point masses are an AutoGuide's, of draws, or alone, and then have no density.
    drawn = any(is_random(site) and name not in model for name, site in sites.items())
    found = []
    for name, site in sites.items():
        own = model.get(name)
        angle = own is not None and is_latent(site) and is_latent(own) and is_circular(own["fn"])
        if angle and _is_on_line(site, drawn):
            kind = type(bare(model[name]["fn"])).__name__
            found.append(
                f"site '{name}' of the model is an angle ({kind}), whose density repeats itself at "
                f"every turn, and the guide draws it on the whole line: bounds and evidences count "
                f"every turn, and have no limit. Draw it from dist.VonMises, or within [-pi, pi)"
            )
    return found


def check_angles(run: Run) -> None:
    """
    :raises ValueError: naming an angle that the guide draws on the line.
    """
    for why in unwound(run):
        raise ValueError(why)


def _is_on_line(site: Site, drawn: bool) -> bool:
    fn = site["fn"]
    if is_circular(fn):
        return False
    if is_delta(fn):
        return drawn
    if bool((site["value"].abs() > math.pi + 1e-6).any()):
        return True
    support = known_support(fn)
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    # PyTorch has the whole line for a scaled Beta, too.
    return support is constraints.real and not isinstance(bare(fn), TransformedDistribution)
