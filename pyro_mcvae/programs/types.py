"""Types, errors, names of factors and plates, and annotations of sites."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypedDict

import pyro.distributions as dist
import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Tensor

# The types of what Pyro and its programs exchange.

# A model or a guide: a function, or an object that is called with the data.
Program: TypeAlias = Callable[..., object]
Distribution: TypeAlias = dist.TorchDistribution


class Site(TypedDict, total=False):
    """What Pyro's message, and the node of a trace, say of a sample statement."""

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
    cond_indep_stack: tuple[CondIndepStackFrame, ...]
    done: bool
    stop: bool
    continuation: Callable[[Site], None] | None
    log_prob: Tensor
    unscaled_log_prob: Tensor


# Which fields of which sites of a trace change, by name.
SiteChanges: TypeAlias = Mapping[str, Mapping[str, object]]
Transform: TypeAlias = torch.distributions.Transform
Constraint: TypeAlias = torch.distributions.constraints.Constraint
# What __torch_function__ is given: any function of torch.
TorchFunction: TypeAlias = Callable[..., Any]
# The same keys, while the statement is run: ``value`` is None before the draw.
Message: TypeAlias = Site


# Errors that callers tell apart.


class SiteError(ValueError):
    """Says what is wrong with a site and what to do: another attempt would not help."""


class NoCoordinateError(SiteError):
    """A guide site has neither explicit noise nor an unconstrained form."""


class NothingToMoveError(ValueError):
    """No random latent of the guide belongs to single data, so that none can be moved for one."""


class LeadingDimsError(RuntimeError):
    """
    Programs with leading dims are other ones than without, or none.

    :ivar reason: the site or the operation, and what is wrong with it, in a few words.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = textwrap.shorten(reason or message, 120, placeholder=" ...")


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its name, if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# What names a factor of a log weight.


class FactorKey(NamedTuple):
    """One factor of the weight: a site's density in the ``"model"`` or in the ``"guide"``."""

    program: str
    name: str


# The plates around a site: what they are known by, and how they scale its log density.

# The plate of the particles; the name that Pyro's own vectorised objectives give it.
LEADING = "num_particles_vectorized"


class PlateKey(NamedTuple):
    """
    A plate as it is known from one minibatch to the next: without its size.

    :ivar dim: None of a sequential plate.
    :ivar counter: which of its elements a sequential plate is at, from 1; 0 of others.
    """

    name: str
    dim: int | None
    counter: int


def plate_key(frame: CondIndepStackFrame) -> PlateKey:
    """The key of a frame."""
    # Pyro counts on where a program loops over a plate again: the elements are those of before.
    counter = frame.counter and (frame.counter - 1) % frame.size + 1
    return PlateKey(frame.name, frame.dim, counter)


def plate_frames(site: Site) -> frozenset[CondIndepStackFrame]:
    """The user's plates around a site, the particles' plate left out; counters as in the keys."""
    frames = (f for f in site["cond_indep_stack"] if f.name != LEADING)
    return frozenset([f._replace(counter=plate_key(f).counter) if f.counter else f for f in frames])


def is_subsampled(frame: CondIndepStackFrame) -> bool:
    """Whether the plate's minibatch is smaller than the plate."""
    return frame.full_size is not None and frame.full_size != frame.size


def subsampling_scale(frames: Iterable[CondIndepStackFrame]) -> float:
    """The product of N / B over plates: the part of a site's scale that comes from them."""
    scale = 1.0
    for frame in frames:
        if is_subsampled(frame):
            scale = scale * frame.full_size / frame.size
    return scale


# What a site's ``infer`` holds for this package: options of the user, and notes of the package.

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
