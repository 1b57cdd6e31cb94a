"""Types, errors, names of factors and plates, and annotations of sites."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypedDict

import pyro.distributions as dist
import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor

# The types of the objects that Pyro and models exchange.

# A model or a guide: a function, or an object that is called with the data.
Program: TypeAlias = Callable[..., object]
Distribution: TypeAlias = dist.TorchDistribution


class Site(TypedDict, total=False):
    """The fields of a sample statement, in Pyro's messages and in the nodes of a trace."""

    type: str
    name: str
    fn: Distribution
    value: Tensor
    is_observed: bool
    args: tuple[object, ...]
    kwargs: dict[str, object]
    infer: dict[str, Any]
    scale: float | Tensor
    mask: bool | Tensor | None
    own_mask: Tensor | None  # the model's, where the package uses another one
    cond_indep_stack: tuple[CondIndepStackFrame, ...]
    done: bool
    stop: bool
    continuation: Callable[[Site], None] | None
    log_prob: Tensor
    unscaled_log_prob: Tensor


# The fields that change at sites of a trace, by the sites' names.
SiteChanges: TypeAlias = Mapping[str, Mapping[str, object]]
Transform: TypeAlias = torch.distributions.Transform
Constraint: TypeAlias = torch.distributions.constraints.Constraint
# The functions that __torch_function__ receives: any function of torch.
TorchFunction: TypeAlias = Callable[..., Any]
# A sample statement that is being run: ``value`` is None before the draw.
Message: TypeAlias = Site


# Errors that callers distinguish.


class SiteError(ValueError):
    """An error of the user's program at a site, with its remedy: a retry would not help."""


class NoCoordinateError(SiteError):
    """A guide site has neither explicit noise nor an unconstrained form."""


class NothingToMoveError(ValueError):
    """No random latent of the guide is local, so none can be moved separately for each datum."""


class LeadingDimsError(RuntimeError):
    """
    Programs with leading dims fail, or have other densities than without.

    :ivar reason: the site or the operation, and its problem, in a few words.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = textwrap.shorten(reason or message, 120, placeholder=" ...")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# The key of a factor of a log weight.


class FactorKey(NamedTuple):
    """One factor of the weight: a site's density in the ``"model"`` or in the ``"guide"``."""

    program: str
    name: str


# The plates around a site: their keys, and how they scale its log density.

# The plate of the particles; the name that Pyro's own vectorized objectives give it.
PARTICLE_PLATE = "num_particles_vectorized"


class PlateKey(NamedTuple):
    """
    The key of a plate across minibatches: without its size.

    :ivar dim: None for a sequential plate.
    :ivar counter: the element of a sequential plate, from 1; 0 for other plates.
    """

    name: str
    dim: int | None
    counter: int


def plate_key(frame: CondIndepStackFrame) -> PlateKey:
    """Return the key of a frame."""
    # Pyro continues counting if a program loops over a plate again, over the same elements.
    counter = frame.counter and (frame.counter - 1) % frame.size + 1
    return PlateKey(frame.name, frame.dim, counter)


def plate_frames(site: Site) -> frozenset[CondIndepStackFrame]:
    """Return the user's plates around a site, without the particles' plate; counters as in keys."""
    frames = (f for f in site["cond_indep_stack"] if f.name != PARTICLE_PLATE)
    return frozenset([f._replace(counter=plate_key(f).counter) if f.counter else f for f in frames])


def is_subsampled(frame: CondIndepStackFrame) -> bool:
    """Return whether the plate's minibatch is smaller than the plate."""
    return frame.full_size is not None and frame.full_size != frame.size


def subsampling_scale(frames: Iterable[CondIndepStackFrame]) -> float:
    """Return the product of N / B over plates: their part of a site's scale."""
    scale = 1.0
    for frame in frames:
        if is_subsampled(frame):
            scale = scale * frame.full_size / frame.size
    return scale


# Entries of this package in a site's ``infer``: options of the user, and notes of the package.

# The options of a discrete site of the guide.
SLOT_OPTIONS = frozenset({"num_categories", "num_samples", "budget", "baseline", "exact_entropy"})
_VALID = (*sorted(SLOT_OPTIONS), "baseline_input")
# The key of the package's notes. Users' options have another key.
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
    Check the options of a site that has some.

    :param drawn: for a site of the model, the guide's draw that it is replayed on.
    :param in_model: whether the site is one of the model.
    :raises SiteError: naming an option that does not exist, or has no effect there.
    """
    options = msg["infer"]["mcvae"]
    site = f"site '{msg['name']}' of the {'model' if in_model else 'guide'}"
    if not isinstance(options, Mapping):
        raise SiteError(f"infer['mcvae'] of {site} must be a dict of options, got {options!r}")
    for name in options:
        if name not in _VALID:
            raise SiteError(
                f"{site} has the unknown option {name!r} in infer['mcvae']: the options of a site "
                f"are {', '.join(_VALID)}"
            )
    if options and msg["is_observed"]:
        raise SiteError(
            f"{site} is observed, so that infer['mcvae'] = {options} has no effect: remove it, and "
            f"pass it to a discrete latent of the guide"
        )
    # If one function is model and guide, both have the options.
    if in_model and not (drawn is not None and options.keys() <= options_of(drawn).keys()):
        raise SiteError(
            f"infer['mcvae'] = {options} of {site} has no effect, because options are those of the "
            f"guide's draws: pass it to pyro.sample('{msg['name']}', ...) of the guide"
        )
