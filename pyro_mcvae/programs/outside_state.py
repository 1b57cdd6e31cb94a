"""Restore the values outside programs that a run of them has changed."""

from __future__ import annotations

import functools
from collections import deque
from itertools import zip_longest
from types import MemberDescriptorType
from typing import Any, cast

import torch
from pyro.distributions import Distribution
from torch import Tensor, nn

from pyro_mcvae.ops.vmap_dims import is_mapped
from pyro_mcvae.programs.outside_values import (
    CONTAINERS,
    IMMUTABLE,
    MISSING,
    Dependencies,
    Entry,
    array_content,
    attribute,
    contents,
    flat_items,
    is_plain,
    is_written,
    item,
    numpy,
)

# The getters by which containers are compared.
_OF_CONTAINERS = (len, tuple, frozenset, flat_items)
# Stands for an item that was added to a sequence or set, or was removed from it.
_ADDED = object()


class OutsideState:
    """
    The values outside programs before an extra run, such as counters, schedules and memory banks.

    :param read: what the programs read.
    """

    def __init__(self, read: Dependencies) -> None:
        containers: list[tuple[Any, str]] = [
            (e.key, e.name)
            for e in read.entries
            if e.get in _OF_CONTAINERS and isinstance(e.key, list | dict | set | deque)
        ]
        objects = [o for o in read.objects if hasattr(o, "__dict__")]
        containers += [(vars(o), f"an attribute of {type(o).__name__}") for o in objects]
        self._held = [(c, c.copy(), name) for c, name in containers]
        others = (e for e in read.entries if e.get not in _OF_CONTAINERS)
        self._values = [e._replace(value=e.get(e.key)) for e in others]

    def put_back(self) -> str:
        """
        Restore the values that a run has replaced, and the items of containers.

        Nothing is restored after a run that has made a network, a parameter or another object in an
        empty place: a flag or counter may tell later runs that it exists.

        :returns: the name of a value of a run under vmap, which is over; or an empty string.
        """
        held = [(c, items, name) for c, items, name in self._held if not _holds(c, items)]
        values = [(entry, entry.get(entry.key)) for entry in self._values if not entry.unchanged]
        made = any(_is_made(entry.value, now) for entry, now in values)
        pairs = [(*pair, name) for c, items, name in held for pair in _pairs(c, items)]
        if not (made or any(_is_made(before, now) for before, now, _ in pairs)):
            for container, items, _ in held:
                _refill(container, items)
            for entry, _ in values:
                put_back(entry)
        found = [(entry.name, now) for entry, now in values]
        found += [(name, now) for _, now, name in pairs]
        return next((n for n, now in found if isinstance(now, Tensor) and is_mapped(now)), "")


def _pairs(container: Any, before: Any) -> list[tuple[object, object]]:
    """Return what was at each place of a container before, and what is there now."""
    if isinstance(container, dict):
        keys = dict.fromkeys([*before, *container])
        return [(before.get(k, MISSING), container.get(k, MISSING)) for k in keys]
    if isinstance(container, set):
        return [(_ADDED, v) for v in container - before]
    return [*zip_longest(before, container, fillvalue=_ADDED)]


def _holds(container: Any, items: Any) -> bool:
    """Return whether a container has the same objects as before."""
    return len(container) == len(items) and all(a is b for a, b in _pairs(container, items))


def _is_made(before: object, now: object) -> bool:
    """Return whether a value is a new object that a run sets up, and does not only update."""
    if now is before or now is None:
        return False
    if now is MISSING:
        return callable(before)  # a hook that sets up its module once
    if isinstance(now, (nn.Module, nn.Parameter, torch.optim.Optimizer)):
        return True
    kept = is_plain(now) or isinstance(now, (Tensor, Distribution, *IMMUTABLE, *CONTAINERS))
    return (before is None or before is MISSING) and not kept


def put_back(entry: Entry) -> None:
    """Restore a variable, or an item of a mutable container."""
    get, key, value = entry.get, entry.key, cast(Any, entry.value)
    target: Any = get.args[0] if isinstance(get, functools.partial) and get.func is item else None
    if get is contents:
        key.cell_contents = value  # type: ignore[attr-defined]
    elif get is flat_items:
        pairs = isinstance(key, dict)
        _refill(key, zip(value[::2], value[1::2], strict=True) if pairs else value)
    elif get is array_content and isinstance(key, numpy.ndarray) and isinstance(value, bytes):
        key[...] = numpy.frombuffer(value, key.dtype).reshape(key.shape)
    elif isinstance(space := getattr(get, "__self__", target), dict | list | deque):
        space[key] = value  # type: ignore[index]
    elif get is len and isinstance(key, list):
        del key[value:]
    elif isinstance(get, functools.partial) and get.func is attribute:
        _put_back_attribute(get.args[0], cast(str, key), value)


def _put_back_attribute(owner: Any, key: str, value: object) -> None:
    """Restore an attribute where it is: in a slot of an object, or in a class."""
    if not isinstance(owner, type):
        getattr(owner, "__dict__", {}).pop(key, None)  # the class had the value
    kinds = (owner if isinstance(owner, type) else type(owner)).__mro__
    kind = next((k for k in kinds if key in vars(k)), None)
    if kind is not None and is_written(kind):
        slot = isinstance(vars(kind)[key], MemberDescriptorType)
        setattr(owner if slot else kind, key, value)


def _refill(container: Any, items: Any) -> None:
    if isinstance(container, list):
        container[:] = items  # other threads never see an empty one
    elif isinstance(container, dict):
        before = dict(items)
        for key in container.keys() - before.keys():
            del container[key]
        for key, value in before.items():
            if container.get(key, MISSING) is not value:
                container[key] = value
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(items)
