"""The plates around a site: what they are known by, and how they scale its log density."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pyro.poutine.indep_messenger import CondIndepStackFrame

from pyro_mcvae.programs.types import Site

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
