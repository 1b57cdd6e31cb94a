"""
Group latents into blocks that share a weight, and find the factors outside all blocks.

A *block* is a set of local latents with the plates that all of its factors share. Its log weight
has one entry per element of those plates, because given the global latents the program is a
product over them. Latents outside every plate are *global*: they are drawn once per step and
enter as in the plain ELBO. Two rules keep the bound correct:

* A plate's scale N/B may multiply a bound, never a weight inside a logarithm of a mean. So a
  block's plates include every subsampled plate around its factors. Latents for which this is
  impossible become global.
* A factor that depends on a local latent belongs to that latent's block. If it lies outside a
  plate, the plate's elements are not independent and share one weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pyro.poutine.indep_messenger import CondIndepStackFrame

from pyro_mcvae.programs.types import FactorKey, PlateKey, is_subsampled, plate_key

Frames = frozenset[CondIndepStackFrame]


class Factor(NamedTuple):
    """A factor's plates, and the guide's random sites that it depends on (None: unknown)."""

    frames: Frames
    parents: frozenset[str] | None


class GlobalSites(NamedTuple):
    """The guide's and the model's sites that all particles share."""

    guide: frozenset[str] = frozenset()
    model: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Block:
    """Latents that share one log weight per element of ``plates`` (leftmost dim first)."""

    plates: tuple[PlateKey, ...]

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """Return the plates' batch dims, negative and increasing; sequential plates have none."""
        return tuple(p.dim for p in self.plates if p.dim is not None)


@dataclass(frozen=True)
class Structure:
    """The blocks of a program, and for each factor its block's index (None: global)."""

    blocks: tuple[Block, ...]
    block_of: Mapping[FactorKey, int | None]
    # Random guide sites whose distribution depends on no other reparameterized draw.
    roots: frozenset[str] = field(default_factory=frozenset)
    # Whether the guide consists of random sites that do not depend on each other.
    mean_field: bool = False
    # For sites of the guide whose masks depend on draws: these draws.
    masked_by: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # For factors across whose plates latents meet: these plates.
    coupled: Mapping[FactorKey, frozenset[PlateKey]] = field(default_factory=dict)
    # A guide site, and an observed site that uses its parameters instead of its draws.
    collapsed: tuple[str, str] | None = None

    @cached_property
    def outside(self) -> frozenset[FactorKey]:
        """Return the factors that all particles share, if there are weights."""
        return frozenset(key for key, b in self.block_of.items() if b is None and self.blocks)

    @cached_property
    def global_sites(self) -> GlobalSites:
        """Return the sites of either program that all particles share."""
        return GlobalSites(
            *(
                frozenset(k.name for k in self.outside if k.program == p)
                for p in GlobalSites._fields
            )
        )


def needs_dependencies(factors: Mapping[FactorKey, Factor], latents: Iterable[str]) -> bool:
    """Return whether the plates alone do not determine the blocks, so dependencies are traced."""
    frames = [factors[FactorKey("guide", name)].frames for name in latents]
    if not frames:
        return False
    shared = frozenset.intersection(*frames)
    everywhere = frozenset.intersection(*(f.frames for f in factors.values()))
    subsampled = {f for factor in factors.values() for f in factor.frames if is_subsampled(f)}
    if not subsampled <= shared:
        return True
    if not any(frames):
        return False
    return not shared or not shared <= everywhere


def derive_structure(
    factors: Mapping[FactorKey, Factor], latents: Iterable[str], joint: bool = False
) -> Structure:
    """
    Sort a program's factors into blocks.

    :param factors: every scored site of the model and the guide with its plates and parents.
    :param latents: the guide's random sites, in the guide's order.
    :param bool joint: use one weight for the whole program.
    :raises ValueError: if ``joint`` is True and a plate is subsampled.
    """
    if joint:
        _check_joint(factors)
        return Structure((Block(()),), dict.fromkeys(factors, 0))
    frames = {name: factors[FactorKey("guide", name)].frames for name in latents}
    if not frames:
        return _without_latents(factors)
    local = {name for name, f in frames.items() if f} or set(frames)
    involved: dict[int, list[FactorKey]] = {}
    while local:
        components = _components(local, frames, factors)
        involved = _involved(components, factors)
        demoted: set[str] = set()
        for i, component in enumerate(components):
            shared = _shared_plates(involved[i], factors)
            around = {f for key in involved[i] for f in factors[key].frames}
            outside = {f for f in around - shared if is_subsampled(f)}
            # N/B of these plates would be inside the logarithm.
            if outside:
                demoted |= {z for z in component if not outside <= frames[z]} or component
        if not demoted:
            break
        local -= demoted
    if not local:
        return Structure((), dict.fromkeys(factors, None))
    if _globals_follow_locals(local, set(frames) - local, factors):
        # The guide draws a global latent from a local one: particles cannot share it.
        return weigh_together({key: factor.frames for key, factor in factors.items()})
    blocks = tuple(
        Block(_sorted_keys(_shared_plates(involved[i], factors))) for i in sorted(involved)
    )
    block_of: dict[FactorKey, int | None] = {key: i for i, keys in involved.items() for key in keys}
    for key, factor in factors.items():
        if key not in block_of:
            block_of[key] = _block_index(factor, blocks, no_globals=set(frames) == local)
    return Structure(blocks, {key: block_of[key] for key in factors})


def weigh_together(frames: Mapping[FactorKey, Frames]) -> Structure:
    """Return a structure with one weight, or, for minibatches, without weights (plain ELBO)."""
    if any(is_subsampled(f) for factor_frames in frames.values() for f in factor_frames):
        return Structure((), dict.fromkeys(frames, None))
    return Structure((Block(()),), dict.fromkeys(frames, 0))


def _without_latents(factors: Mapping[FactorKey, Factor]) -> Structure:
    """Return the structure for a guide without draws: one block, with the shared plates."""
    plated = [f.frames for f in factors.values() if f.frames]
    shared = frozenset.intersection(*plated) if plated else frozenset()
    if not shared and any(is_subsampled(f) for frames in plated for f in frames):
        return Structure((), dict.fromkeys(factors, None))
    block = Block(_sorted_keys(shared))
    return Structure((block,), {k: _block_index(f, (block,), True) for k, f in factors.items()})


def _check_joint(factors: Mapping[FactorKey, Factor]) -> None:
    for factor in factors.values():
        for f in factor.frames:
            if is_subsampled(f):
                raise ValueError(
                    f"joint=True uses one weight for all data, so it needs all of them, but plate "
                    f"'{f.name}' is subsampled ({f.size} of {f.full_size}). Use joint=False, or "
                    f"pass the full data."
                )


def _components(
    local: set[str], frames: Mapping[str, Frames], factors: Mapping[FactorKey, Factor]
) -> list[set[str]]:
    """Return the groups of latents that are connected through a shared plate or factor."""
    component_of = {name: {name} for name in local}
    groups = [*_plate_groups(local, frames), *(_parents(f, local) for f in factors.values())]
    for group in groups:
        touching = sorted({id(c): c for c in map(component_of.get, group) if c}.values(), key=len)
        if len(touching) > 1:
            largest = touching.pop()
            for smaller in touching:
                largest |= smaller
                component_of.update(dict.fromkeys(smaller, largest))
    # In the guide's order, so that blocks come in the order of the program.
    return list({id(component_of[n]): component_of[n] for n in frames if n in local}.values())


def _plate_groups(local: set[str], frames: Mapping[str, Frames]) -> Iterable[set[str]]:
    unplated = {name for name in local if not frames[name]}
    yield unplated
    members: dict[tuple[object, ...], set[str]] = {}
    for name in local - unplated:
        # Plates inside a sequential plate count as different plates in each iteration.
        turns = frozenset(plate_key(f) for f in frames[name] if f.dim is None)
        for f in frames[name]:
            members.setdefault((f, turns), set()).add(name)
    yield from members.values()


def _parents(factor: Factor, local: set[str]) -> set[str]:
    return local if factor.parents is None else local.intersection(factor.parents)


def _involved(
    components: list[set[str]], factors: Mapping[FactorKey, Factor]
) -> dict[int, list[FactorKey]]:
    """Return the factors that depend on each component; no factor depends on two of them."""
    index = {name: i for i, component in enumerate(components) for name in component}
    local = set(index)
    involved: dict[int, list[FactorKey]] = {i: [] for i in range(len(components))}
    for key, factor in factors.items():
        for i in {index[name] for name in _parents(factor, local)}:
            involved[i].append(key)
    return involved


def _shared_plates(keys: list[FactorKey], factors: Mapping[FactorKey, Factor]) -> Frames:
    return frozenset.intersection(*(factors[key].frames for key in keys))


def _sorted_keys(frames: Frames) -> tuple[PlateKey, ...]:
    keys = [plate_key(f) for f in frames]
    return tuple(sorted(keys, key=lambda k: (k.dim is not None, k.dim or 0, k.name, k.counter)))


def _globals_follow_locals(
    local: set[str], global_: set[str], factors: Mapping[FactorKey, Factor]
) -> bool:
    return any(_parents(factors[FactorKey("guide", name)], local) for name in global_)


def _block_index(factor: Factor, blocks: tuple[Block, ...], no_globals: bool) -> int | None:
    """Return the index of the block whose plates a factor without local parents shares, if any."""
    keys = {plate_key(f) for f in factor.frames}
    subsampled = {plate_key(f) for f in factor.frames if is_subsampled(f)}
    for i, block in enumerate(blocks):
        # N/B of a plate that is not the block's would be lost inside the weight.
        if subsampled <= set(block.plates) <= keys and (block.plates or no_globals):
            return i
    return None
