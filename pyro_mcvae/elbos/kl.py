"""Closed-form Kullback-Leibler divergences at single sites of a program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Independent, Transform, kl, kl_divergence

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import inner_scale, is_delta, is_latent, is_masked, masked
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Site
from pyro_mcvae.structure.dependencies import dependencies_of


def analytic_kl_sites(run: Run, find_apart: Callable[[], Set[str]]) -> dict[str, Tensor]:
    r"""
    :math:`E_q[\log p(z) - \log q(z)] = -KL(q \| p)` of each latent site that allows it.

    A site allows it if the divergence is known in closed form and the model's distribution of the
    site depends on no draw of the guide that depends on it. That is so where whatever precedes the
    site in the model precedes it in the guide; for other sites the programs are looked at.

    :param find_apart: finds the names of the sites for which it is so.
    :returns: by site name, batch-shaped, with the user's scale and mask, without the plates' N/B.
    """
    model = {t.key.name: t for t in run.terms if not t.in_guide and is_latent(t.site)}
    guide = {t.key.name: t for t in run.terms if t.in_guide and t.key.name in model}
    place = {name: i for i, name in enumerate(guide)}
    found, latest = {}, -1
    for name, model_term in model.items():
        if name not in guide:
            continue
        in_order = place[name] > latest
        latest = max(latest, place[name])
        if not is_delta(guide[name].site["fn"]) and (in_order or name in find_apart()):
            value = _negative_kl(model_term, guide[name])
            if value is not None:
                found[name] = value
    return found


def sites_apart(programs: Programs, run: Run) -> frozenset[str]:
    """The latents whose distribution in the model depends on no draw that depends on them."""
    names = frozenset(t.key.name for t in run.terms if t.in_guide and is_latent(t.site))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what cannot be looked at is sampled
        found = dependencies_of(programs, names, run)
    above = found.ancestors(names)
    priors = {n: found.factors.get(FactorKey("model", n), names) - {n} for n in names}
    return frozenset(n for n in names if not any(n in above[p] for p in priors[n]))


def _negative_kl(model_term: Term, guide_term: Term) -> Tensor | None:
    p, q = model_term.site, guide_term.site
    if is_masked(p["fn"]) or is_masked(q["fn"]):
        return None  # Pyro's closed form takes both masks for both densities
    if not _is_right(q["fn"], p["fn"]):
        return None
    try:
        divergence = kl_divergence(q["fn"], p["fn"])
        if _same_weighting(p, q):
            return -masked(q, divergence)
        # E[log p] = -KL - H and E[log q] = -H carry their own scales and masks.
        entropy = q["fn"].entropy()
    except NotImplementedError:
        return None
    return masked(q, entropy) - masked(p, divergence + entropy)


def _is_right(q: Any, p: Any) -> bool:
    """
    Whether what PyTorch takes for the divergence is it, with its gradient.

    Two of its rules are for whole families. That of transformed distributions is for one transform
    that loses nothing: of a :class:`~pyro.distributions.FoldedDistribution` it is that of the
    normals before they are folded, and parameters of two transforms that have equal values now get
    no gradient. That of exponential families detaches the first distribution.
    """
    while isinstance(q, Independent) and isinstance(p, Independent):
        q, p = q.base_dist, p.base_dist
    kinds = type(q), type(p)
    # Which may be NotImplemented, of which nobody may ask whether it is true.
    rule = kl._KL_MEMOIZE[kinds] if kinds in kl._KL_MEMOIZE else kl._dispatch_kl(*kinds)
    if rule is not kl._kl_transformed_transformed:
        return rule is not kl._kl_expfamily_expfamily
    return _is_right(q.base_dist, p.base_dist) and all(
        a.bijective and (a is b or (_is_fixed(a) and _is_fixed(b)))
        for a, b in zip(q.transforms, p.transforms, strict=False)
    )


def _is_fixed(transform: Transform) -> bool:
    """Whether a transform has nothing but numbers, so that an equal one is the same one."""
    values = (v for n, v in vars(transform).items() if n != "_inv")
    return all(v is None or isinstance(v, int | float) for v in values)


def _same_weighting(p: Site, q: Site) -> bool:
    """Whether both sites have the same user's scale and mask, compared without reading tensors."""
    scales = inner_scale(p), inner_scale(q)
    if any(isinstance(s, torch.Tensor) for s in scales):
        same_scale = p["scale"] is q["scale"]
    else:
        same_scale = bool(scales[0] == scales[1])
    return same_scale and p["mask"] is q["mask"]
