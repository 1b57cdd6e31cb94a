"""Latents whose log densities the user scales inside of the weights, as a beta-VAE does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_mcvae.programs.plates import plate_frames
from pyro_mcvae.programs.sites import inner_scale, is_latent, is_random
from pyro_mcvae.programs.terms import Term


class Scales(NamedTuple):
    """The user's scale of a latent in each program, 1 where the program has no such site."""

    model: float = 1.0
    guide: float = 1.0


def scaled_latents(terms: Iterable[Term]) -> dict[str, Scales]:
    """Return the scales of the guide's latents that have another one than 1, by name."""
    sites = [(t.key, t.site) for term in terms for t in term.sites if is_latent(t.site)]
    drawn = {key.name for key, _ in sites if key.program == "guide"}
    found: dict[str, Scales] = {}
    for key, site in sites:
        if key.name in drawn and (key.program == "model" or is_random(site)):
            own = {key.program: _largest(inner_scale(site))}
            found[key.name] = found.get(key.name, Scales())._replace(**own)
    return {name: scales for name, scales in found.items() if scales != Scales()}


def refuse_large_scales(terms: list[Term], objective: str, reads: bool) -> None:
    """
    Refuse chains towards a density that has no integral.

    A scale around everything tempers p(x, z) as well, and is left alone.

    :param bool reads: whether the entries of tensors may be read.
    :raises ValueError: naming a latent that the guide scales by more than 1.
    """
    known = (t for t in terms if reads or not isinstance(t.site["scale"], Tensor))
    for name, scales in scaled_latents(known).items():
        if scales.guide > 1 and common_scale(terms) is None:
            raise ValueError(
                f"site '{name}' is scaled by poutine.scale ({scales.guide:g} in the guide, "
                f"{scales.model:g} in the model), and {objective} moves latents along p / q: its "
                f"chains run away, because q to the power {1 - scales.guide:g} grows without end. "
                f"Use TraceSGVB_ELBO, which has the objective of a beta-VAE, or scale the "
                f"observations by 1 / beta instead of the latents by beta"
            )


def common_scale(terms: Iterable[Term]) -> float | None:
    """Return the user's own scale of all sites in plates, if it is one, and another than 1."""
    scales = {inner_scale(t.site) for t in terms if plate_frames(t.site)}
    scale = scales.pop() if len(scales) == 1 else None
    return scale if isinstance(scale, float) and scale != 1.0 else None


def _largest(scale: float | Tensor) -> float:
    """The scale that is furthest above 1, or else furthest below."""
    if not isinstance(scale, Tensor):
        return float(scale)
    low, high = torch.aminmax(scale.detach())
    return float(high if high > 1 else low)
