"""
Which latents are weighed together: the blocks of a program and what stays outside them.

A *block* is a set of local latents with the plates that all of its factors share. Its log weight
has one entry per element of those plates, because given the global latents the program is a
product over them. Latents outside every plate are *global*: they are drawn once per step and
enter as in the plain ELBO. Two rules keep the bound correct:

* A plate's scale N/B may multiply a bound, never a weight inside a logarithm of a mean. So a
  block's own plates hold every subsampled plate around its factors, and latents for which that
  cannot be arranged become global.
* A factor that depends on a local latent belongs to that latent's block, wherever it stands. If
  it stands outside a plate, the plate's elements are not independent and share one weight.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from pyro.poutine.indep_messenger import CondIndepStackFrame

from pyro_mcvae.programs.types import FactorKey, PlateKey, is_subsampled, plate_key

Frames = frozenset[CondIndepStackFrame]


class Factor(NamedTuple):
    """A factor's plates, and the guide's random sites that it depends on (None: not known)."""

    frames: Frames
    parents: frozenset[str] | None


class GlobalSites(NamedTuple):
    """The guide's and the model's sites that stay outside the particles: all share them."""

    guide: frozenset[str] = frozenset()
    model: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Block:
    """Latents that share one log weight per element of ``plates`` (leftmost dim first)."""

    plates: tuple[PlateKey, ...]

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """The plates' batch dims, negative, in increasing order; sequential plates have none."""
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
    # A guide site and an observed site that has its parameters in place of its draws.
    collapsed: tuple[str, str] | None = None
    # What others found out for runs of this structure, by their own keys.
    notes: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def outside(self) -> frozenset[FactorKey]:
        """The factors that stay outside the particles, if there are weights."""
        return frozenset(key for key, b in self.block_of.items() if b is None and self.blocks)

    @cached_property
    def global_sites(self) -> GlobalSites:
        """The sites of either program that stay outside the particles."""
        return GlobalSites(
            *(
                frozenset(k.name for k in self.outside if k.program == p)
                for p in GlobalSites._fields
            )
        )


def needs_dependencies(factors: Mapping[FactorKey, Factor], latents: Iterable[str]) -> bool:
    """Whether the plates alone do not settle the blocks, so that dependencies must be traced."""
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
    :param bool joint: weigh everything together, one weight for the whole program.
    :raises ValueError: if ``joint`` meets a subsampled plate.
    """
    if joint:
        _refuse_joint_subsampling(factors)
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
            own = _shared_plates(involved[i], factors)
            around = {f for key in involved[i] for f in factors[key].frames}
            outside = {f for f in around - own if is_subsampled(f)}
            # N/B of these plates would land inside the logarithm.
            if outside:
                demoted |= {z for z in component if not outside <= frames[z]} or component
        if not demoted:
            break
        local -= demoted
    if not local:
        return Structure((), dict.fromkeys(factors, None))
    if _globals_follow_locals(local, set(frames) - local, factors):
        # The guide draws a global latent from a local one: it cannot be drawn once for all.
        return weigh_together({key: factor.frames for key, factor in factors.items()})
    blocks = tuple(
        Block(_sorted_keys(_shared_plates(involved[i], factors))) for i in sorted(involved)
    )
    block_of: dict[FactorKey, int | None] = {key: i for i, keys in involved.items() for key in keys}
    for key, factor in factors.items():
        if key not in block_of:
            block_of[key] = _home(factor, blocks, no_globals=set(frames) == local)
    return Structure(blocks, {key: block_of[key] for key in factors})


def weigh_together(frames: Mapping[FactorKey, Frames]) -> Structure:
    """One weight over everything; on minibatches, which have none, the plain ELBO's averages."""
    if any(is_subsampled(f) for found in frames.values() for f in found):
        return Structure((), dict.fromkeys(frames, None))
    return Structure((Block(()),), dict.fromkeys(frames, 0))


def _without_latents(factors: Mapping[FactorKey, Factor]) -> Structure:
    """Of a program whose guide draws nothing: its factors by the plates that all of them share."""
    found = [f.frames for f in factors.values() if f.frames]
    shared = frozenset.intersection(*found) if found else frozenset()
    if not shared and any(is_subsampled(f) for frames in found for f in frames):
        return Structure((), dict.fromkeys(factors, None))
    block = Block(_sorted_keys(shared))
    return Structure((block,), {k: _home(f, (block,), True) for k, f in factors.items()})


def _refuse_joint_subsampling(factors: Mapping[FactorKey, Factor]) -> None:
    for factor in factors.values():
        for f in factor.frames:
            if is_subsampled(f):
                raise ValueError(
                    f"joint=True weighs all data together, so it needs all of them, but plate "
                    f"'{f.name}' is subsampled ({f.size} of {f.full_size}). Use joint=False, or "
                    f"pass the full data."
                )


def _components(
    local: set[str], frames: Mapping[str, Frames], factors: Mapping[FactorKey, Factor]
) -> list[set[str]]:
    """Latents connected through a shared plate or a shared factor."""
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
        # Plates inside a sequential plate are other plates in each of its turns.
        turns = frozenset(plate_key(f) for f in frames[name] if f.dim is None)
        for f in frames[name]:
            members.setdefault((f, turns), set()).add(name)
    yield from members.values()


def _parents(factor: Factor, local: set[str]) -> set[str]:
    return local if factor.parents is None else local.intersection(factor.parents)


def _involved(
    components: list[set[str]], factors: Mapping[FactorKey, Factor]
) -> dict[int, list[FactorKey]]:
    """For each component the factors that depend on it; no factor depends on two of them."""
    index = {name: i for i, component in enumerate(components) for name in component}
    local = set(index)
    found: dict[int, list[FactorKey]] = {i: [] for i in range(len(components))}
    for key, factor in factors.items():
        for i in {index[name] for name in _parents(factor, local)}:
            found[i].append(key)
    return found


def _shared_plates(keys: list[FactorKey], factors: Mapping[FactorKey, Factor]) -> Frames:
    return frozenset.intersection(*(factors[key].frames for key in keys))


def _sorted_keys(frames: Frames) -> tuple[PlateKey, ...]:
    keys = [plate_key(f) for f in frames]
    return tuple(sorted(keys, key=lambda k: (k.dim is not None, k.dim or 0, k.name, k.counter)))


def _globals_follow_locals(
    local: set[str], global_: set[str], factors: Mapping[FactorKey, Factor]
) -> bool:
    return any(_parents(factors[FactorKey("guide", name)], local) for name in global_)


def _home(factor: Factor, blocks: tuple[Block, ...], no_globals: bool) -> int | None:
    """Where a factor without local parents goes: into the block whose plates it shares."""
    keys = {plate_key(f) for f in factor.frames}
    subsampled = {plate_key(f) for f in factor.frames if is_subsampled(f)}
    for i, block in enumerate(blocks):
        # N/B of a plate that is not the block's would be lost inside the weight.
        if subsampled <= set(block.plates) <= keys and (block.plates or no_globals):
            return i
    return None
