"""Where the guide's random sites of a run stand, and their values there."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from torch import Tensor

from pyro_mcvae.coordinates.coordinate import Coordinate, Coordinates, coordinate_of
from pyro_mcvae.coordinates.noise import noise_of
from pyro_mcvae.coordinates.packing import Packing, SiteShape
from pyro_mcvae.ops.shapes import as_shape
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.annotations import note
from pyro_mcvae.programs.errors import NoCoordinateError
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.messengers import SampleFn
from pyro_mcvae.programs.sites import bare, changed_draw, is_straight_through
from pyro_mcvae.programs.types import Message, SiteChanges


class Placed(NamedTuple):
    """A site's coordinate, and where it stands."""

    coordinate: Coordinate
    at: Tensor


# For each random guide site of a run.
Record = dict[str, Placed]


def coordinate_at(msg: Message, kind: Coordinates) -> Coordinate:
    """
    The coordinate of a site of the guide.

    :raises NoCoordinateError: naming the site, where there is none.
    """
    try:
        return coordinate_of(msg["fn"], kind)
    except NotImplementedError as error:
        raise _unknown(msg, error) from error


def _unknown(msg: Message, error: Exception) -> NoCoordinateError:
    if is_straight_through(msg["fn"]):
        return NoCoordinateError(
            f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) rounds its draws, so "
            f"that they cannot be moved: use the relaxed distribution without StraightThrough "
            f"in guide and model, or weigh the draws where they are with TraceIWAE_ELBO"
        )
    fn = bare(msg["fn"])
    site = f"guide site '{msg['name']}' ({type(fn).__name__})"
    reason = str(error) or "it does not say its support"
    if noise_of(fn) is not None:
        return NoCoordinateError(
            f'{site} has no unconstrained form ({reason}): use coordinates="noise"'
        )
    return NoCoordinateError(
        f"{site} has neither explicit noise nor an unconstrained form ({reason}): use another "
        f"distribution, or say how it is made from noise with register_noise"
    )


def value_at(msg: Message, placed: Placed) -> Tensor:
    """The value of a guide site, and what is known of it: its density, that it needs a score."""
    coordinate, at = placed
    note(msg, scored=not coordinate.reparameterized, log_prob=coordinate.log_prob(at))
    return coordinate.value(at)


def placing_at(
    values: Mapping[str, Tensor],
    record: Record,
    kind: Coordinates,
    held: SampleFn,
) -> SampleFn:
    """
    What gives the sites of a run their values at given coordinates.

    :param values: the coordinates by site, of any shape.
    :param record: fills with them, and with what sites have that are not among them.
    :param held: the coordinates of further sites.
    """

    def sample_fn(msg: Message) -> Tensor | None:
        coordinate, value = coordinate_at(msg, kind), values.get(msg["name"])
        value = held(msg) if value is None else value
        if value is None:
            # A site of other draws: noted, to be refused once the run is over.
            record[msg["name"]] = Placed(coordinate, msg["fn"]())
            return None
        at = as_shape(value, msg["fn"].batch_shape + coordinate.event_shape)
        record[msg["name"]] = Placed(coordinate, at)
        return value_at(msg, record[msg["name"]])

    return sample_fn


def latents_at(record: Record, detach: bool) -> SiteChanges:
    """What changes at each guide site of a run at other coordinates: value and annotations."""
    found: dict[str, dict[str, Any]] = {}
    for name, placed in record.items():
        msg: Message = {"infer": {}}
        value = value_at(msg, placed)
        found[name] = {**msg, "value": changed_draw(Tensor.detach, value) if detach else value}
    return found


def packing_of(sample: WeightedParticles, record: Record, held: Set[str]) -> Packing:
    """How the local sites of a record, but for those held, are packed into one vector per datum."""
    nesting = max((-d for b in sample.blocks for d in b.dims), default=0)
    nesting = max(nesting, sample.runs[0].nesting)
    if sample.runs[0].leading is None:
        # Dims that lie in no plate are parts of the vector, as those of an event are.
        depths = (at.dim() - len(c.event_shape) for c, at in record.values())
        nesting = max(nesting, *depths, 0)
    shapes = {}
    for name, (coordinate, at) in record.items():
        block = sample.block_of[0].get(FactorKey("guide", name))
        if block is not None and name not in held:
            events = len(coordinate.event_shape)
            batch = tuple(at.shape[: at.dim() - events])
            batch = batch[max(0, len(batch) - nesting) :]
            batch = (1,) * (nesting - len(batch)) + batch
            shapes[name] = SiteShape(block, batch, tuple(coordinate.event_shape), at.dtype)
    return Packing(shapes, [b.dims for b in sample.blocks], sample.shapes)
