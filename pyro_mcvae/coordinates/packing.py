"""Pack the coordinates of all sites into one vector per datum, and unpack them."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_mcvae.coordinates.coordinate import (
    Coordinate,
    Coordinates,
    UnconstrainedCoordinate,
    coordinate_of,
)
from pyro_mcvae.coordinates.noise import noise_of
from pyro_mcvae.ops.tensors import as_shape
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.messengers import SampleFn
from pyro_mcvae.programs.sites import (
    bare,
    changed_draw,
    is_random,
    is_straight_through,
    masked_entries,
)
from pyro_mcvae.programs.types import (
    FactorKey,
    Message,
    NoCoordinateError,
    NothingToMoveError,
    SiteChanges,
    note,
)

# Pack the coordinates of several sites into one vector per datum, and unpack them.


@dataclass(frozen=True, slots=True)
class SiteShape:
    """
    The shape of one site's coordinate, which is ``[leading, *batch_shape, *event_shape]``.

    :ivar block: the index of the block that the site belongs to.
    :ivar batch_shape: the sizes of all plate dims, 1 for plates without the site.
    """

    block: int
    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...]
    dtype: torch.dtype


class _Place(NamedTuple):
    """
    The position of a site in the vectors of its block.

    :ivar inner: the shape of its part of one vector, events last.
    :ivar order: the permutation of its leading and plate dims that puts the block's dims first;
        ``back`` is the inverse; None for the identity.
    """

    begin: int
    end: int
    inner: tuple[int, ...]
    order: list[int] | None
    back: list[int] | None


def _permuted(value: Tensor, order: list[int] | None) -> Tensor:
    """Permute the first dims; None for the identity."""
    return value if order is None else value.permute(*order, *range(len(order), value.dim()))


def _unless_same(order: list[int]) -> list[int] | None:
    return None if order == list(range(len(order))) else order


def _leading(value: Tensor, site: SiteShape) -> int:
    batch = value.shape[: value.dim() - len(site.event_shape)]
    # Not -1, which is ambiguous for an empty event, such as that of dist.Unit.
    return math.prod(batch) // math.prod(site.batch_shape)


class Packing:
    """
    A bijection between coordinates by site and ``[leading, *plates, D]``.

    With several blocks the elements of their plates are concatenated, ``[leading, elements, D]``,
    and shorter vectors are padded with zeros.

    :param sites: the shape of each site's coordinate.
    :param dims: the (negative) batch dims of each block's plates.
    :param plates: the sizes of each block's plates, for blocks without a site.

    Example::

        >>> sites = {
        ...     "a": SiteShape(0, (1, 5), (), torch.float32),
        ...     "b": SiteShape(0, (8, 5), (2,), torch.float32),
        ... }
        >>> packing = Packing(sites, [(-1,)])
        >>> values = {"a": torch.randn(3, 1, 5), "b": torch.randn(3, 8, 5, 2)}
        >>> packing.pack(values).shape
        torch.Size([3, 5, 17])
        >>> bool((packing.unpack(packing.pack(values))["b"] == values["b"]).all())
        True
    """

    def __init__(
        self,
        sites: Mapping[str, SiteShape],
        dims: list[tuple[int, ...]],
        plates: list[tuple[int, ...]] | None = None,
    ) -> None:
        self.sites = dict(sites)
        self._places: dict[str, _Place] = {}
        self._widths = [0] * len(dims)
        self._shapes: list[tuple[int, ...]] = [()] * len(dims) if plates is None else [*plates]
        for name, site in self.sites.items():
            nesting = len(site.batch_shape)
            block_dims = [1 + nesting + d for d in dims[site.block]]
            inner_dims = [a for a in range(1, nesting + 1) if a not in block_dims]
            sizes = tuple(site.batch_shape[a - 1] for a in inner_dims)
            begin = self._widths[site.block]
            end = begin + math.prod(sizes) * math.prod(site.event_shape)
            order = [0, *block_dims, *inner_dims]
            orders = order, [order.index(a) for a in range(len(order))]
            inner = sizes + site.event_shape
            self._places[name] = _Place(begin, end, inner, *map(_unless_same, orders))
            self._widths[site.block] = end
            self._shapes[site.block] = tuple(site.batch_shape[a - 1] for a in block_dims)

    @property
    def padded(self) -> bool:
        """Return whether some vectors are shorter than others, and padded."""
        return len(set(self._widths)) > 1

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Pack coordinates by site into ``[leading, *plates, D]``."""
        parts: list[list[Tensor]] = [[] for _ in self._widths]
        for name, site in self.sites.items():
            place, value = self._places[name], values[name]
            inner = site.batch_shape + site.event_shape
            if value.dim() != 1 + len(inner) or value.shape[1:] != inner:
                value = value.reshape(_leading(value, site), *inner)
            value = _permuted(value, place.order)
            shape = (value.shape[0], *self._shapes[site.block], place.end - place.begin)
            parts[site.block].append(as_shape(value, shape))
        parts = parts if all(parts) else self._with_empty(parts)
        blocks = [p[0] if len(p) == 1 else torch.cat(p, dim=-1) for p in parts]
        return blocks[0] if len(blocks) == 1 else self._concatenated(blocks)

    def _with_empty(self, parts: list[list[Tensor]]) -> list[list[Tensor]]:
        """Add empty vectors for blocks without a site."""
        like = next(p[0] for p in parts if p)
        empty = [[like.new_zeros((len(like), *shape, 0))] for shape in self._shapes]
        return [p or e for p, e in zip(parts, empty, strict=True)]

    def _concatenated(self, blocks: list[Tensor]) -> Tensor:
        depth = max(self._widths)
        sizes = [math.prod(s) for s in self._shapes]
        flat_blocks = [
            b.reshape(b.shape[0], n, b.shape[-1]) for b, n in zip(blocks, sizes, strict=True)
        ]
        padded = [torch.nn.functional.pad(b, (0, depth - b.shape[-1])) for b in flat_blocks]
        return torch.cat(padded, dim=1)

    def pack_runs(self, values: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Pack the coordinates of several runs, concatenated in the leading dim."""
        packed = [self.pack(part) for part in values]
        return packed[0] if len(packed) == 1 else torch.cat(packed)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """Unpack ``[leading, *plates, D]`` to coordinates by site, in each site's dtype."""
        blocks = [packed] if len(self._widths) == 1 else self._split(packed)
        values = {}
        for name, site in self.sites.items():
            place, part = self._places[name], blocks[site.block]
            if place.end - place.begin < part.shape[-1]:
                part = part[..., place.begin : place.end]
            part = as_shape(part, (*part.shape[:-1], *place.inner))
            values[name] = _permuted(part, place.back).to(site.dtype)
        return values

    def _split(self, packed: Tensor) -> list[Tensor]:
        parts = packed.split([math.prod(s) for s in self._shapes], dim=1)
        return [
            p[..., :width].reshape(p.shape[0], *shape, width)
            for p, shape, width in zip(parts, self._shapes, self._widths, strict=True)
        ]


# The coordinates of the guide's random sites in a run, and their values.


class Placed(NamedTuple):
    """A site's coordinate system, and its position there."""

    coordinate: Coordinate
    at: Tensor


# For each random guide site of a run.
Record = dict[str, Placed]


def coordinate_at(msg: Message, kind: Coordinates) -> Coordinate:
    """
    Return the coordinate of a site of the guide.

    :raises NoCoordinateError: naming the site, if it has none.
    """
    try:
        return coordinate_of(msg["fn"], kind)
    except NotImplementedError as error:
        raise _no_coordinate(msg, error) from error


def _no_coordinate(msg: Message, error: Exception) -> NoCoordinateError:
    if is_straight_through(msg["fn"]):
        return NoCoordinateError(
            f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) rounds its draws, so "
            f"they cannot be moved: use the relaxed distribution without StraightThrough in "
            f"guide and model, or TraceIWAE_ELBO, which does not move draws"
        )
    fn = bare(msg["fn"])
    site = f"guide site '{msg['name']}' ({type(fn).__name__})"
    reason = str(error) or "it does not define its support"
    if noise_of(fn) is not None:
        return NoCoordinateError(
            f'{site} has no unconstrained form ({reason}): use coordinates="noise"'
        )
    return NoCoordinateError(
        f"{site} has neither explicit noise nor an unconstrained form ({reason}): use another "
        f"distribution, or register its map from noise by register_noise"
    )


def value_at(msg: Message, placed: Placed) -> Tensor:
    """Return the value of a guide site, and annotate its density and whether it needs a score."""
    coordinate, at = placed
    note(msg, scored=not coordinate.reparameterized, log_prob=coordinate.log_prob(at))
    return coordinate.value(at)


def placing_at(
    values: Mapping[str, Tensor], record: Record, kind: Coordinates, fixed: SampleFn
) -> SampleFn:
    """
    Return a sample function that gives the sites of a run their values at given coordinates.

    :param values: the coordinates by site, of any shape.
    :param record: receives the coordinates of all sites.
    :param fixed: returns the coordinates of fixed sites.
    """

    def sample_fn(msg: Message) -> Tensor | None:
        coordinate, value = coordinate_at(msg, kind), values.get(msg["name"])
        value = fixed(msg) if value is None else value
        if value is None:
            # A site without coordinates: recorded, and rejected by check_names after the run.
            record[msg["name"]] = Placed(coordinate, msg["fn"]())
            return None
        at = as_shape(value, msg["fn"].batch_shape + coordinate.event_shape)
        record[msg["name"]] = Placed(coordinate, at)
        return value_at(msg, record[msg["name"]])

    return sample_fn


def latents_at(record: Record, detach: bool) -> SiteChanges:
    """Return the changed fields of each guide site at other coordinates."""
    changes: dict[str, dict[str, Any]] = {}
    for name, placed in record.items():
        msg: Message = {"infer": {}}
        value = value_at(msg, placed)
        changes[name] = {**msg, "value": changed_draw(Tensor.detach, value) if detach else value}
    return changes


def packing_of(sample: WeightedParticles, record: Record, fixed: Set[str]) -> Packing:
    """Return the packing of a record's local sites, except fixed ones."""
    nesting = max((-d for b in sample.blocks for d in b.dims), default=0)
    nesting = max(nesting, sample.runs[0].nesting)
    if sample.runs[0].leading is None:
        # Dims outside plates are part of the vector, like event dims.
        depths = (at.dim() - len(c.event_shape) for c, at in record.values())
        nesting = max(nesting, *depths, 0)
    shapes = {}
    for name, (coordinate, at) in record.items():
        block = sample.block_of[0].get(FactorKey("guide", name))
        if block is not None and name not in fixed:
            events = len(coordinate.event_shape)
            batch = tuple(at.shape[: at.dim() - events])
            batch = batch[max(0, len(batch) - nesting) :]
            batch = (1,) * (nesting - len(batch)) + batch
            shapes[name] = SiteShape(block, batch, tuple(coordinate.event_shape), at.dtype)
    return Packing(shapes, [b.dims for b in sample.blocks], sample.shapes)


# Plans: properties of the coordinates of all draws of one structure.


@dataclass(frozen=True)
class Plan:
    """
    The coordinates of a structure.

    :ivar packing: how they are packed into vectors.
    :ivar normal: whether their density under the guide is standard normal.
    :ivar coordinates_interact: whether one first coordinate may depend on another. A draw without
        explicit noise depends on earlier draws, so its gradients are not partial derivatives.
    :ivar discrete: the sites with a discrete coordinate, which chains do not move.
    """

    packing: Packing
    normal: bool
    coordinates_interact: bool
    discrete: tuple[str, ...]

    @property
    def moving(self) -> Set[str]:
        """Return the sites that chains move."""
        return self.packing.sites.keys() - set(self.discrete)


def plan_key(
    sample: WeightedParticles, records: list[Record], fixed: frozenset[str]
) -> tuple[Hashable, ...]:
    """Return what the plan of a first draw depends on, besides the structure of the programs."""
    run = sample.runs[0]
    sites = [(n, at.shape, at.dtype, c.kind) for record in records for n, (c, at) in record.items()]
    return run.nesting, run.leading, run.shapes, len(records), tuple(sites), fixed


def plan_of(sample: WeightedParticles, records: list[Record], fixed: frozenset[str]) -> Plan:
    """
    Return the plan of a first draw.

    :param records: the coordinates of each run's sites.
    :param fixed: local sites of the guide that are fixed, and not packed.
    :raises ValueError: for guides without a latent that has a weight, or coordinates, or if a mask
        depends on a latent that moves.
    """
    points = [t.key.name for t in sample.runs[0].terms if t.in_guide]
    if points and not any(is_random(t.site) for t in sample.runs[0].terms if t.in_guide):
        raise ValueError(
            f"the guide draws no random latent (its site '{points[0]}' is a point mass), so there "
            f"are no coordinates to move: use TraceSGVB_ELBO, which needs none"
        )
    if not sample.blocks:
        raise NothingToMoveError(
            f"no latent of the guide ({', '.join(points) or 'it has none'}) has a separate weight, "
            f"because a subsampled plate does not enclose them: pass the full data, or use "
            f"TraceSGVB_ELBO"
        )
    packing = packing_of(sample, records[0], fixed)
    if points and not (packing.sites or fixed):
        raise NothingToMoveError(
            "all random latents of the guide are shared by several data of a minibatch, so none "
            "can move for a single datum: pass the full data, or use TraceSGVB_ELBO"
        )
    check_names(records, packing, sample.structure.global_sites.guide | fixed)
    first = [records[0][n].coordinate for n in packing.sites]
    unexplicit = any(isinstance(c, UnconstrainedCoordinate) for c in first)
    coordinates_interact = len(first) > 1 and unexplicit and not sample.structure.mean_field
    # The density of fixed sites may depend on the coordinates, except in a mean-field guide.
    normal = all(c.normal for c in first) and (sample.structure.mean_field or not fixed)
    discrete = (n for n in packing.sites if not records[0][n].coordinate.moves)
    plan = Plan(packing, normal, coordinates_interact, tuple(discrete))
    for name, draws in sample.structure.masked_by.items():
        if not draws.isdisjoint(plan.moving):
            raise _mask_moves_error(name, draws)
    return plan


def _mask_moves_error(name: str, draws: frozenset[str]) -> ValueError:
    return ValueError(
        f"the mask of site '{name}' of the guide depends on {', '.join(sorted(draws))}, so "
        f"moves would change the number of latents: let the masks of both programs depend on "
        f"data only (an unmasked latent without an effect does no harm), or use TraceIWAE_ELBO"
    )


def check_names(records: list[Record], packing: Packing, fixed_sites: frozenset[str]) -> None:
    """
    Check that all draws have the same sites, as packing needs.

    :param fixed_sites: the guide's sites that are not packed.
    :raises ValueError: naming a site that only some draws have.
    """
    for record in records:
        differing = (record.keys() | fixed_sites) ^ (packing.sites.keys() | fixed_sites)
        if differing:
            raise ValueError(
                f"guide site '{min(differing)}' is drawn in some executions and not in others, "
                f"so the latents have no vector of coordinates: draw it always, and mask it if "
                f"it is not used, or use TraceIWAE_ELBO, which weighs whole draws"
            )


# Masks of the coordinates that are part of the weight, and that move.


def coordinates_that_count(
    sample: WeightedParticles, records: list[Record], plan: Plan, without: Collection[str] = ()
) -> Tensor | None:
    """
    Return 1 for coordinates that are part of the weight; 0 for masked ones and for padding.

    :param without: sites whose coordinates are excluded like masked ones.
    :returns: shape ``[K, *plates, D]``; None if every entry is 1.
    """
    packing, sites = plan.packing, plan.packing.sites
    masks = [
        {n: m for n in sites if (m := masked_entries(run.guide_trace.nodes[n])) is not None}
        for run in sample.runs
    ]
    if not (any(masks) or without or packing.padded):
        return None
    packed = []
    for record, site_masks in zip(records, masks, strict=True):
        full = {n: torch.full_like(record[n].at, float(n not in without)) for n in sites}
        packed.append(full | {n: full[n] * _as_event(m, record[n]) for n, m in site_masks.items()})
    return packing.pack_runs(packed)


def _as_event(mask: Tensor, placed: Placed) -> Tensor:
    return mask.reshape(mask.shape + (1,) * len(placed.coordinate.event_shape))
