"""Check masks, and draws without a weight that a factor depends on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, cast

import torch
from pyro import distributions as dist
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_mcvae.programs.run import Programs, Run, is_messenger
from pyro_mcvae.programs.sites import (
    counted_values,
    hides_masks,
    inner_scale,
    is_flat,
    is_latent,
    is_random,
    is_scored,
    layers,
    own_mask,
    site_masks,
    with_mask,
)
from pyro_mcvae.programs.types import FactorKey, Program, Site
from pyro_mcvae.structure.cache import Analysis
from pyro_mcvae.structure.marked import MarkedRunError, marked

# Which entries the masks of a step remove, and whether the model depends on them.


def has_masks(run: Run, in_guide: bool) -> bool:
    """Return whether the guide, or the model, has a mask around a latent that the guide draws."""
    drawn, terms = run.guide_trace.nodes, (t for t in run.terms if t.in_guide == in_guide)
    return any(site_masks(t.site) for t in terms if t.key.name in drawn and is_latent(t.site))


def mask_key(
    programs: Programs, run: Run, analysis: Analysis, concerns: Callable[[Site, Site], bool]
) -> Hashable:
    """
    Return what findings about the masks of latents depend on: None without such masks.

    If every factor of the model that depends on a latent is masked where the latent is, findings
    hold for all masks of which that is true. Otherwise they hold for the masks of this step.

    :param analysis: of the programs, where the factors that depend on latents are kept.
    :param concerns: called with a latent of the model and of the guide: whether it is asked about.
    """
    nodes = run.model_trace.nodes
    names = [n for n, site in _latents(run).items() if concerns(nodes[n], site)]
    masks = {n: m for n in names if (m := _masks_of_latent(run, n)) != (None, None)}
    if not masks:
        return None
    key = "mask readers", run.signature
    readers = analysis.cached(key, lambda: _readers(programs, run))
    kinds = tuple((n, *(part is None for part in parts)) for n, parts in masks.items())
    if all(_covers(run, n, *parts, readers) for n, parts in masks.items()):
        return kinds
    return kinds, tuple(_contents(part) for parts in masks.values() for part in parts)


def _masks_of_latent(run: Run, name: str) -> tuple[Tensor | None, Tensor | None]:
    """Return the entries of a latent that the model and the guide count."""
    traces = run.model_trace, run.guide_trace
    model, guide = (own_mask(trace.nodes[name]) for trace in traces)
    return model, guide


# For each latent, the other factors of the model that depend on it, and whether an entry of such a
# factor may depend on another element.
_Readers = dict[str, list[tuple[str, bool]]]


def _readers(programs: Programs, run: Run) -> _Readers | None:
    """Return the factors that depend on each latent; None if that is unknown."""
    try:
        found = marked(programs, run)
    except MarkedRunError:
        return None
    readers: _Readers = {}
    for key, bits in found.bits.items():
        for name in found.marker.names(bits) if key.program == "model" else ():
            if name != key.name:
                readers.setdefault(name, []).append((key.name, bool(found.coupled.get(key))))
    return readers


def _covers(
    run: Run, name: str, model: Tensor | None, guide: Tensor | None, readers: _Readers | None
) -> bool:
    """Return whether all factors that depend on a latent are masked where the latent is."""
    nodes = run.model_trace.nodes
    if readers is None or (guide is not None and _exceeds(model, guide, 0, 0)):
        return False
    event_dim = nodes[name]["fn"].event_dim
    parts = [part for part in (model, guide) if part is not None]
    kept = parts[0] if len(parts) == 1 else parts[0] & parts[1]
    for reader, across in readers.get(name, ()):
        site = nodes.get(reader)
        if across or site is None:
            return False
        if _exceeds(counted_values(site), kept, site["fn"].event_dim, event_dim):
            return False
    return True


def _exceeds(counted: Tensor | None, kept: Tensor, event_dim: int, kept_event_dim: int) -> bool:
    """Return whether a mask keeps elements of plates that another one removes, even in part."""
    for _ in range(min(kept_event_dim, kept.dim())):
        kept = kept.all(-1)
    if counted is None:
        return not bool(kept.all())
    for _ in range(min(event_dim, counted.dim())):
        counted = counted.any(-1)
    return bool((counted & ~kept).any())


def _contents(mask: Tensor | None) -> Hashable:
    return None if mask is None else (mask.shape, mask.cpu().numpy().tobytes())


# Latents that a mask removes from the model, but not from the guide.


class _WithGuideMask(Messenger):
    """Includes in a model's density also the masked entries that the guide includes."""

    def __init__(self, counted: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        self._counted = counted

    def _pyro_sample(self, msg: Site) -> None:
        if msg["name"] not in self._counted:
            return
        model_mask, guide_mask = counted_values(msg), self._counted[msg["name"]]
        both = None if model_mask is None or guide_mask is None else model_mask | guide_mask
        fn = with_mask(msg["fn"], both)
        if fn is not None:
            msg["fn"], msg["mask"] = fn, None
            msg["own_mask"] = model_mask


class MaskedLatents(NamedTuple):
    """
    Latents with entries that the model masks and the guide counts.

    :ivar unread: latents on whose masked entries no counted factor of the model depends, with the
        guide's mask; None if it has none.
    :ivar transported: latents whose density is that of another variable, computed from them.
        ``NeuTraReparam`` draws the noise of a flow without a density, and counts prior and Jacobian
        at observed point masses, whose values move with the noise.
    """

    unread: dict[str, Tensor | None]
    transported: frozenset[str]


def masked_latents(programs: Programs, run: Run) -> MaskedLatents:
    r"""
    Find the latents with entries that the model masks and the guide counts.

    These are padded entries of an AutoGuide, or the observed entries of ``x_unobserved``. The
    weight's expectation is then infinite, :math:`\int p(x, z)\, q(u) / q(u)\, du\, dz`. If no
    counted factor depends on :math:`u`, its prior does not change the evidence,
    :math:`\int p(x, z)\, p(u \mid z)\, du\, dz = p(x)`. With the prior (:func:`with_priors`), the
    weight's expectation is the evidence.

    :param run: an execution of the programs, with any leading dims.
    """
    latents, model = _latents(run), run.model_trace.nodes
    masked = [n for n in latents if own_mask(model[n]) is not None]
    # The guide may mask the same entries, which then have no density in the weight.
    names = [
        n
        for n in masked
        if (counted := counted_values(latents[n])) is None or _more(own_mask(model[n]), counted)
    ]
    if not names:
        return MaskedLatents({}, frozenset())
    try:
        found = marked(programs, run)
    except MarkedRunError:
        return MaskedLatents({}, frozenset())  # the model may depend on all of them
    readers = {n: found.readers_of_masked(FactorKey("model", n)) for n in names}
    transported = {
        n for n, keys in readers.items() if any(is_transported(found.site(k)) for k in keys)
    }
    guide_masks = {n: counted_values(latents[n]) for n in names if not readers[n]}
    if is_messenger(programs):
        guide_masks.clear()
    return MaskedLatents(guide_masks, frozenset(transported))


def masked_otherwise(run: Run) -> list[str]:
    """Return latents with masks in both programs, whose guide counts more entries."""
    model = run.model_trace.nodes
    masked = {n: s for n, s in _latents(run).items() if _masks_more(model[n], s)}
    return [n for n, site in masked.items() if counted_values(site) is not None]


def with_priors(model: Program, counted: Mapping[str, Tensor | None]) -> Program:
    """
    Return the model with the prior of all entries that the guide counts.

    :param counted: the guide's mask of each latent; None if it has none.
    """
    return cast("Program", _WithGuideMask(counted)(model))


def check_masks(run: Run, separable: frozenset[str]) -> None:
    """
    Check that weights are p / q: both programs count the same entries, without scales.

    :param separable: sites whose two densities need not match: the guide's point masses, and
        transported latents; see :class:`MaskedLatents`.
    :raises ValueError: naming a site that is scaled, masked in one program only,
        masked inside a transform, or auxiliary and masked.
    """
    for term in (t for term_ in run.terms for t in term_.sites):
        if is_latent(term.site):
            _check_site(term.site, term.key.program)
    _check_auxiliary(run)
    for name, site in _latents(run).items():
        model_site = run.model_trace.nodes[name]
        scale = inner_scale(model_site)
        if bool(torch.as_tensor(scale != 1.0).any()):
            raise ValueError(
                f"site '{name}' of the model is scaled by poutine.scale ({scale}), so its prior is "
                f"not a density, and the evidence is not defined: evaluate without the scale"
            )
        if name in separable or _count_alike(counted_values(model_site), counted_values(site)):
            continue
        if is_flat(model_site["fn"]) and counted_values(site) is None:
            continue  # like ImproperUniform: its prior is in the factors that depend on it
        if _masks_more(model_site, site):
            raise ValueError(
                f"site '{name}' has entries that a mask removes from the model and not from the "
                f"guide, though the model depends on them: without their prior the evidence is not "
                f"a probability of the data. Mask only the observations, or put the same "
                f"poutine.mask around the site in both programs; or, if its prior is in other "
                f"factors, draw it from a distribution with .mask(False)"
            )
        raise ValueError(
            f"site '{name}' has entries that a mask removes from the guide and not from the model, "
            f"so their densities do not cancel: put the same poutine.mask around the site in the "
            f"model and in the guide, or remove it from the guide"
        )


def _check_site(site: Site, program: str) -> None:
    scale = inner_scale(site)
    if program == "guide" and is_random(site) and bool(torch.as_tensor(scale != 1.0).any()):
        raise ValueError(
            f"site '{site['name']}' of the guide is scaled by poutine.scale ({scale}), so its "
            f"log density is not that of its draws: evaluate without the scale"
        )
    if hides_masks(site["fn"]):
        raise ValueError(
            f"site '{site['name']}' of the {program} has a mask inside a "
            f"{type(site['fn']).__name__}, which removes only a part of its density: mask the "
            f"whole distribution, as in {type(site['fn']).__name__}(...).mask(...)"
        )


def _check_auxiliary(run: Run) -> None:
    """Check that auxiliary sites, from which counted latents are computed, are not masked."""
    latents = _latents(run)
    if any(_masks_out(site) for site in latents.values()):
        return
    for term in run.terms:
        auxiliary = term.in_guide and is_random(term.site) and term.key.name not in latents
        if auxiliary and _masks_out(term.site):
            raise ValueError(
                f"a mask removes entries of the guide's auxiliary site '{term.key.name}', whose "
                f"density is then missing from that of the latents computed from it: remove the "
                f"mask"
            )


def _masks_out(site: Site) -> bool:
    counted = counted_values(site)
    return counted is not None and not bool(counted.all())


def _latents(run: Run) -> dict[str, Site]:
    """Return the guide's sites that are latents of the model."""
    model = run.model_trace.nodes
    sites = {t.key.name: t.site for t in run.terms if t.in_guide and is_latent(t.site)}
    return {n: s for n, s in sites.items() if n in model and is_latent(model[n])}


def _masks_more(model_site: Site, guide_site: Site) -> bool:
    return _more(counted_values(model_site), counted_values(guide_site))


def _more(model_mask: Tensor | None, guide_mask: Tensor | None) -> bool:
    if model_mask is None:
        return False
    return bool((~model_mask if guide_mask is None else guide_mask & ~model_mask).any())


def is_transported(site: Site) -> bool:
    """Return whether a site may be a transformed latent: a point mass with a density."""
    if not is_scored(site) or not site["is_observed"]:
        return False
    points = [layer for layer in layers(site["fn"]) if isinstance(layer, dist.Delta)]
    return any(bool((torch.as_tensor(p.log_density) != 0).any()) for p in points)


def _count_alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two masks remove the same entries; None removes none."""
    if a is None or b is None:
        mask = b if a is None else a
        return mask is None or bool(mask.all())
    a, b = torch.broadcast_tensors(a, b)
    return bool((a == b).all())


# Draws without a density in the weight, on which a factor of the model depends.


def check_unweighed(programs: Programs, run: Run, weighs: Callable[[Site], bool]) -> None:
    """
    Check that no factor of the model depends on draws that a mask removes from the guide.

    :param run: an execution of the programs, with any leading dims.
    :param weighs: whether a site of the guide is part of the weights. Others are averaged over.
    :raises ValueError: naming the latent, and the site of the model that depends on it.
    """
    draws = [t.site for t in run.terms if t.in_guide and is_random(t.site) and weighs(t.site)]
    names = [site["name"] for site in draws if _masks_out(site)]
    if not names:
        return
    try:
        found = marked(programs, run)
    except MarkedRunError as error:
        raise _unweighed_error(names[0], f"which is unknown ({error})") from error
    for name in names:
        for reader in found.readers_of_masked(FactorKey("guide", name)):
            raise _unweighed_error(name, f"'{reader.name}'")


def _unweighed_error(latent: str, reader: str) -> ValueError:
    return ValueError(
        f"a mask removes entries of site '{latent}' from the guide's density, and site {reader} "
        f"of the model depends on them: these draws have no density in the weight, so it does not "
        f"estimate the evidence, and bounds are too large. Use TraceSGVB_ELBO, which averages log "
        f"densities, or remove the mask from guide and model; a mask of padding is correct if no "
        f"counted site depends on the padded entries"
    )
