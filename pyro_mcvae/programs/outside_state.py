"""Restore the values outside programs that a run of them has changed."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import operator
from array import array as array_of_numbers
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from enum import Enum
from threading import local
from types import FunctionType, MemberDescriptorType
from typing import Any, cast

import torch
from pyro.distributions import Distribution
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer

from pyro_mcvae.ops.checks import WarnOnce
from pyro_mcvae.ops.compat import OF_MODULES, is_mapped, tables_of, version_of, version_restored
from pyro_mcvae.programs.outside_values import (
    CONTAINERS,
    IMMUTABLE,
    MISSING,
    Dependencies,
    Entry,
    GeneratorStates,
    array_content,
    attribute,
    can_be_split,
    contents,
    flat_items,
    is_a,
    is_plain,
    is_written,
    items_of,
    numpy,
    pairs_of,
    scripted_value,
    space_of,
)

# The getters by which containers are compared.
_OF_CONTAINERS = (len, tuple, frozenset, flat_items)
# Larger tensors are data, and are not copied.
_MAX_COPIED = 2**22
# Objects of torch.nn and Pyro are set up once, and a run does not update their attributes.
_LIBRARIES = ("torch.nn.", "pyro.", "pyro_mcvae.")
# Stands for an item that was added to a sequence or set, or was removed from it.
_ADDED = object()

_warn = WarnOnce(logging.getLogger(__name__))


# The parts of a module, by name, before and after a run.
_Parts = tuple[dict[str, object], dict[str, object]]


class Changes(Enum):
    """What a run changes outside programs: nothing, buffers (such as running means), or more."""

    NONE = "nothing"
    BUFFERS = "buffers"
    VALUES = "values"


class OutsideState:
    """
    The values outside programs before an extra run: counters, schedules, buffers, memory banks.

    Tensors are restored in place, with their version, so that autograd may still use those that the
    step has saved.

    :param read: what the programs read.
    :param generators: whether to restore random number generators, too.
    """

    def __init__(self, read: Dependencies, generators: bool = True) -> None:
        self._iterators = _split_iterators(read)
        modules = [o for o in read.objects if is_a(o, nn.Module)]
        spaces = [space_of(o) or {} for o in read.objects if _is_left(o)]
        left = {id(v) for space in spaces for v in (space, *space.values())}
        entries = [e for e in read.entries if id(_container(e)) not in left]
        containers: list[tuple[Any, str]] = [
            (e.key, e.name)
            for e in entries
            if e.get in _OF_CONTAINERS and is_a(e.key, list | dict | set | deque)
        ]
        containers += [
            (space, f"an attribute of {_name_of(o)}")
            for o in read.objects
            if not _is_of_a_library(o) and (space := space_of(o)) is not None
        ]
        containers = [(c, name) for c, name in containers if id(c) not in left]
        self._modules = [(m, _parts_of(m)) for m in modules]
        self._held = [(c, _copy(c), name) for c, name in _with_inner(containers)]
        held = {id(c) for c, _, _ in self._held}
        self._values = [
            e._replace(value=e.get(e.key))
            for e in entries
            if e.get not in _OF_CONTAINERS and id(_container(e)) not in held
        ]
        in_modules = {id(b) for m in modules for b in tables_of(m)["buffers"].values()}
        tensors = {id(e.value): (e.value, e.name) for e in entries if is_a(e.value, Tensor)}
        self._generators = GeneratorStates(read) if generators else None
        optimizers = [o for o in read.objects if is_a(o, Optimizer)]
        optimized = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
        self._tensors = [
            _SavedTensor(tensor, name, key in in_modules)
            for key, (tensor, name) in tensors.items()
            if (not tensor.requires_grad or key in optimized)
            and not (tensor.is_inference() or is_mapped(tensor))
        ]

    @property
    def changes(self) -> Changes:
        """Return what a run has changed."""
        written = [tensor for tensor in self._tensors if tensor.is_written]
        if (
            not all(_holds(container, items) for container, items, _ in self._held)
            or not all(entry.unchanged for entry in self._values)
            or not all(tensor.is_buffer for tensor in written)
            or (self._generators is not None and self._generators.moved())
        ):
            return Changes.VALUES
        return Changes.BUFFERS if written else Changes.NONE

    def put_back(self) -> str:
        """
        Restore the values that a run has replaced, the items of containers, and tensors.

        A network, a parameter or another object that a run has made in an empty place stays there,
        and so do the flags beside it, by which later runs may detect it.

        :returns: the name of a value of a run under vmap, which is over; or an empty string.
        """
        found: list[tuple[str, object]] = []
        parts, left = self._made_parts()
        for container, items, name in self._held:
            if id(container) not in left and not _holds(container, items):
                found += [(name, now) for _, now in _pairs(container, items)]
                made = parts.get(id(container), ({}, {}))
                _refill(container, _with_made(container, items, *made))
        values = [
            (entry, entry.get(entry.key))
            for entry in self._values
            if not (id(_container(entry)) in left or entry.unchanged)
        ]
        found += [(entry.name, now) for entry, now in values]
        is_made = any(_is_made(entry.value, now) for entry, now in values)
        for entry, now in values:
            if not (is_made and _stays(entry.value, now)):
                put_back(entry)
        for tensor in self._tensors:
            tensor.put_back()
        for iterator in self._iterators:
            iterator.put_back()
        if self._generators is not None:
            self._generators.put_back()
        return next((n for n, now in found if is_a(now, Tensor) and is_mapped(now)), "")

    def _made_parts(self) -> tuple[dict[int, _Parts], set[int]]:
        """
        Find the modules in which a run has made a parameter or a submodule.

        :returns: their parts, by the id of their attributes, and the ids of what stays as it is:
            modules of libraries, such as ``nn.ParameterDict``, whose attributes list their parts.
        """
        parts, left = dict[int, _Parts](), set[int]()
        for module, before in self._modules:
            now = _parts_of(module)
            if any(_is_made(before.get(k, MISSING), v) for k, v in now.items()):
                parts[id(vars(module))] = before, now
                if _is_of_a_library(module):
                    own = [v for v in vars(module).values() if is_a(v, CONTAINERS)]
                    left |= set(map(id, [module, vars(module), *own]))
        return parts, left


class StateOfOneRun:
    """
    Gives several runs the outside values of the first one, and counts all of them as one run.

    A chain evaluates programs at each of its positions. Programs may count their calls or store
    values. With this state all evaluations have the same density.

    :param read: what the programs read, before the first run.
    """

    def __init__(self, read: Dependencies) -> None:
        self._read, self._before = read, OutsideState(read)
        self._after: OutsideState | None = None

    def after_first(self) -> Changes:
        """Return what the first run has changed."""
        changes = self._before.changes
        if changes is not Changes.NONE:
            self._after = OutsideState(self._read)
        return changes

    @contextmanager
    def again(self) -> Iterator[None]:
        """Return a context for another run."""
        assert self._after is not None
        self._before.put_back()
        try:
            yield
        finally:
            self._after.put_back()


def buffers_of(read: Dependencies) -> Dependencies:
    """Return only the buffers of modules."""
    modules: list[object] = [o for o in read.objects if is_a(o, nn.Module)]
    spaces = {id(tables_of(cast("nn.Module", m))["buffers"]) for m in modules}
    entries = [
        e
        for e in read.entries
        if id(_container(e)) in spaces or (_is_scripted(e) and is_a(e.value, Tensor))
    ]
    return replace(read, entries=entries, objects=modules, generators={}, torch_generators={})


def _name_of(value: object) -> str:
    """Return the name of a function or class, or of an object's class."""
    named = is_a(value, type | FunctionType)
    return str(cast(Any, value if named else type(value)).__name__)


def _is_of_a_library(value: object) -> bool:
    return _module_of(value).startswith(_LIBRARIES)


def _module_of(value: object) -> str:
    """Return the name of the module in which the class of an object is defined."""
    return str(attribute(type(value), "__module__", ""))


def _is_left(value: object) -> bool:
    """
    Return whether an object is not restored.

    The first run sets up lazy modules and AutoGuides. The package restores its own objects itself.
    """
    if _module_of(value).startswith("pyro_mcvae."):
        return space_of(value) is not None
    if is_a(value, LazyModuleMixin):
        return bool(cast(Any, value).has_uninitialized_params())
    return (space_of(value) or {}).get("prototype_trace", value) is None


def _container(entry: Entry) -> object:
    """Return the container of an entry's value, if it is an item or attribute."""
    get = entry.get
    if is_a(get, functools.partial):
        return get.args[0]
    return getattr(get, "__self__", None)


def _is_scripted(entry: Entry) -> bool:
    """Return whether a scripted module stores an entry's value."""
    return is_a(entry.get, functools.partial) and entry.get.func is scripted_value


class _SavedTensor:
    """
    The entries of a tensor, which a run may change in place.

    :param is_buffer: whether it may be a running mean, which changes without a new version.
    """

    def __init__(self, tensor: Tensor, name: str, is_buffer: bool) -> None:
        self._tensor, self._name, self.is_buffer = tensor, name, is_buffer
        self._version = version_restored(tensor)
        self._before = version_of(tensor)
        self._copy = tensor.detach().clone() if tensor.numel() <= _MAX_COPIED else None

    @property
    def is_written(self) -> bool:
        return version_of(self._tensor) != self._before

    def put_back(self) -> None:
        if not self.is_written and (self._copy is None or not self.is_buffer):
            return
        if self._copy is None:
            _warn(
                f"the programs change {self._name} in place, a tensor of {self._tensor.numel()} "
                f"numbers, which are not copied: extra runs of the programs change it, too"
            )
            return
        with torch.no_grad(), self._version:
            self._tensor.detach().copy_(self._copy)


def _with_inner(containers: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """Add the containers inside, which may be newer than what is known of the programs."""
    known = {id(c) for c, _ in containers}
    found = [*containers]
    for container, name in found:
        pairs = pairs_of(container) if is_a(container, dict) else enumerate(items_of(container))
        for key, value in pairs:
            is_own = is_a(value, list | dict | set | deque) and key not in OF_MODULES
            if is_own and id(value) not in known:
                known.add(id(value))
                found.append((value, name))
    return found


class _SavedIterator:
    """
    The items of an iterator that a run may take.

    Its places get another iterator over the same items.

    :param places: the entries that have the iterator.
    """

    def __init__(self, iterator: Iterator[object], places: list[Entry]) -> None:
        self._places = places
        taken, self._kept = itertools.tee(iterator)
        self._use(taken)

    def put_back(self) -> None:
        self._use(copy.copy(self._kept))

    def _use(self, iterator: Iterator[object]) -> None:
        for entry in self._places:
            put_back(entry._replace(value=iterator))


def _split_iterators(read: Dependencies) -> list[_SavedIterator]:
    """Save each iterator that programs read, with all the places that hold it."""
    places: dict[int, list[Entry]] = {}
    for entry in read.entries:
        now = entry.get(entry.key)
        if can_be_split(now):
            places.setdefault(id(now), []).append(entry)
    return [_SavedIterator(cast(Any, e[0].get(e[0].key)), e) for e in places.values()]


def _pairs(container: Any, before: Any) -> list[tuple[object, object]]:
    """Return what was at each place of a container before, and what is there now."""
    container = _copy(container)
    if is_a(container, dict):
        keys = dict.fromkeys([*before, *container])
        return [(before.get(k, MISSING), container.get(k, MISSING)) for k in keys]
    if is_a(container, set):
        return [(_ADDED, v) for v in container - before]
    return [*itertools.zip_longest(before, container, fillvalue=_ADDED)]


def _copy(container: Any) -> Any:
    """Return the items of a container in one of Python's types, whatever its class overrides."""
    kind: Any = next(k for k in (dict, list, set, deque) if is_a(container, k))
    return kind(pairs_of(container) if kind is dict else kind.__iter__(container))


def _holds(container: Any, items: Any) -> bool:
    """Return whether a container has the same objects as before."""
    container = container if type(container) in CONTAINERS else _copy(container)
    if len(container) != len(items):
        return False
    if is_a(container, dict):
        # The order of keys, too: the first may be the next that a program takes.
        return all(map(operator.is_, container, items)) and all(
            map(operator.is_, container.values(), items.values())
        )
    if is_a(container, set):
        return bool(container == items)
    return all(map(operator.is_, container, items))


def _parts_of(module: nn.Module) -> dict[str, object]:
    """Return the parameters and submodules of a module, which are not among its attributes."""
    tables = tables_of(module)
    # The tables of a scripted module are not dicts.
    return {k: v for kind in ("parameters", "modules") for k, v in tables[kind].items()}


def _with_made(container: Any, items: Any, parts: Any, parts_now: Any) -> Any:
    """
    Return the items of a container before a run, with what the run has made there.

    :param parts: the parts of the module whose attributes these are, before the run.
    :param parts_now: after the run.
    """
    container = _copy(container)
    if not is_a(container, dict):
        is_setup = not items and any(_is_made(MISSING, now) for now in container)
        return container if is_setup else items
    before = items | parts
    pairs = {k: (before.get(k, MISSING), now) for k, now in (container | parts_now).items()}
    if not any(_is_made(*pair) for pair in pairs.values()):
        return items
    stays = items | {k: pair[1] for k, pair in pairs.items() if _stays(*pair)}
    return {k: v for k, v in stays.items() if k not in parts_now}


def _stays(before: object, now: object) -> bool:
    """Return whether a value stays where a run has made something: that itself, or a flag."""
    return _is_made(before, now) or (is_a(now, bool) and is_a(before, bool))


def _is_made(before: object, now: object) -> bool:
    """Return whether a run has made an object in an empty place."""
    if not (before is None or before is MISSING) or now is None or now is MISSING:
        return False
    kept = is_plain(now) or is_a(now, (Distribution, *IMMUTABLE, *CONTAINERS))
    return not kept and (not is_a(now, Tensor) or is_a(now, nn.Parameter))


def put_back(entry: Entry) -> None:
    """Restore a variable, or an item of a mutable container."""
    get, key, value = entry.get, entry.key, cast(Any, entry.value)
    if get is contents:
        key.cell_contents = value  # type: ignore[attr-defined]
    elif get is flat_items:
        pairs = is_a(key, dict)
        _refill(key, zip(value[::2], value[1::2], strict=True) if pairs else value)
    elif get is array_content and is_a(value, bytes):
        _put_back_array(key, value)
    elif getattr(get, "__name__", "") == "__contains__":
        cast(Any, _container(entry)).pop(key, None)
    elif get is dict:
        _refill(vars(key) if is_a(key, local) else key, value)
    elif is_a(key, ContextVar):
        if value is not MISSING:
            key.set(value)
    elif is_a(get, functools.partial) and get.func is attribute:
        _put_back_attribute(get.args[0], cast(str, key), value)
    elif _is_scripted(entry):
        setattr(cast(Any, _container(entry)), cast(str, key), value)
    elif is_a(space := _container(entry), dict | list | deque):
        if value is not MISSING:
            cast(Any, space)[key] = value
        elif is_a(space, dict):
            space.pop(key, None)
    elif get is len and is_a(key, list):
        del key[value:]


def _put_back_array(array: Any, content: bytes) -> None:
    if is_a(array, numpy.ndarray):
        array[...] = numpy.frombuffer(content, array.dtype).reshape(array.shape)
    elif is_a(array, bytearray):
        array[:] = content
    elif is_a(array, array_of_numbers):
        array[:] = array_of_numbers(array.typecode, content)


def _put_back_attribute(owner: Any, key: str, value: object) -> None:
    """Restore an attribute where it is: in a slot of an object, or in a class."""
    if not is_a(owner, type):
        (space_of(owner) or {}).pop(key, None)  # the class had the value
    kinds = (owner if is_a(owner, type) else type(owner)).__mro__
    kind = next((k for k in kinds if key in vars(k)), None)
    if kind is None or not is_written(kind):
        return
    if not is_a(vars(kind)[key], MemberDescriptorType):
        setattr(kind, key, value)
    elif value is not MISSING:
        setattr(owner, key, value)
    elif hasattr(owner, key):
        delattr(owner, key)


def _refill(container: Any, items: Any) -> None:
    if is_a(container, list):
        container[:] = items  # other threads never see an empty one
    elif is_a(container, MutableMapping):
        before = dict(items)
        for key in set(container) - before.keys():
            del container[key]
        for key, value in before.items():
            if container.get(key, MISSING) is not value:
                container[key] = value
        if is_a(container, dict) and not all(map(operator.is_, _copy(container), before)):
            for key, value in before.items():
                del container[key]
                container[key] = value
    else:
        container.clear()
        (container.update if is_a(container, set) else container.extend)(items)
