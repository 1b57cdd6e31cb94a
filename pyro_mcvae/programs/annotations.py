"""What a site's ``infer`` holds for this package: options of the user, and notes of the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyro_mcvae.programs.errors import SiteError
from pyro_mcvae.programs.types import Message, Site

# What the values of a discrete site of the guide can be told.
SLOT_OPTIONS = frozenset({"num_categories", "num_samples", "budget", "baseline", "exact_entropy"})
_VALID = (*sorted(SLOT_OPTIONS), "baseline_input")
# The package's own notes. Users' keys never reach them.
_NOTES = "_mcvae_notes"


def options_of(site: Site) -> Mapping[str, Any]:
    """Return the options that the user gave a site in ``infer={"mcvae": {...}}``."""
    options: Mapping[str, Any] = site["infer"].get("mcvae", {})
    return options


def note(msg: Message, **notes: object) -> None:
    """Add notes of the package to a site."""
    msg["infer"] = {**msg["infer"], _NOTES: {**msg["infer"].get(_NOTES, {}), **notes}}


def noted(site: Site, name: str) -> Any:
    """Return one of the package's notes of a site, or None."""
    return site["infer"].get(_NOTES, {}).get(name)


def check_options(msg: Message, drawn: Site | None, in_model: bool) -> None:
    """
    Check the options of a site, if it has some.

    :param drawn: for a site of the model, the draw of the guide that it takes.
    :param in_model: whether the site is one of the model.
    :raises SiteError: naming an option that does not exist, or has no effect there.
    """
    if "mcvae" not in msg["infer"]:
        return
    found = msg["infer"]["mcvae"]
    site = f"site '{msg['name']}' of the {'model' if in_model else 'guide'}"
    if not isinstance(found, Mapping):
        raise SiteError(f"infer['mcvae'] of {site} must be a dict of options, got {found!r}")
    for name in found:
        if name not in _VALID:
            raise SiteError(
                f"{site} has the unknown option {name!r} in infer['mcvae']: the options of a site "
                f"are {', '.join(_VALID)}"
            )
    if found and msg["is_observed"]:
        raise SiteError(
            f"{site} is observed, so that infer['mcvae'] = {found} has no effect: remove it, and "
            f"pass it to a discrete latent of the guide"
        )
    # A function that serves as model and guide has the options in both.
    if in_model and not (drawn is not None and found.keys() <= options_of(drawn).keys()):
        raise SiteError(
            f"infer['mcvae'] = {found} of {site} has no effect, because options are those of the "
            f"guide's draws: pass it to pyro.sample('{msg['name']}', ...) of the guide"
        )
