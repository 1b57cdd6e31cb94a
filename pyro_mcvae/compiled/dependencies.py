"""What a pair of programs reads besides its arguments: globals, closures, attributes."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from numbers import Number
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple, TypeAlias

import pyro
import torch
from pyro.infer.elbo import ELBO
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import Distribution, Transform

from pyro_mcvae.compiled.ownership import is_of_the_user, is_written, methods
from pyro_mcvae.programs.source_lines import is_library, is_library_file

__all__ = ["Dependencies", "Entry", "contents", "is_plain", "item"]

# Values that are compared; everything else by identity.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_ENTRIES, _MAX_DEPTH, _MAX_LENGTH = 16384, 12, 64
_MISSING = object()
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# What may stand in an attribute and be replaced; not all of it is looked into.
_WATCHED = (
    *(Tensor, nn.Module, ELBO, Distribution, Transform, *_CONTAINERS),
    *(FunctionType, MethodType, functools.partial),
    *(type, BuiltinFunctionType, range, slice, Number, torch.dtype, torch.device),
)
# What every module has: followed as parameters, buffers and submodules, or no part of what it does.
_OF_A_MODULE = {*vars(nn.Module()), "_pyro_context", "_pyro_name"}
_OF_A_MODULE -= {"training", "_forward_hooks", "_forward_pre_hooks"}
_OF_A_MODULE -= {"_backward_hooks", "_backward_pre_hooks"}
_OF_A_PLATE = ("name", "size", "subsample_size", "dim")


Getter: TypeAlias = Callable[[Any], object]


class Entry(NamedTuple):
    """One thing that can be seen: ``get(key)`` was ``value``."""

    get: Getter
    key: object
    value: object
    name: str

    @property
    def unchanged(self) -> bool:
        """Whether it still has the value."""
        return _is_same(self.get(self.key), self.value)


def is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


def _is_same(now: Any, then: Any) -> bool:
    """Whether what was made anew is what it was: AutoGuides make their plates at each step."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if is_plain(then) or isinstance(then, frozenset):
        return bool(now == then)
    if isinstance(then, list | tuple):
        return len(now) == len(then) and all(map(_is_same, now, then))
    if isinstance(then, dict):
        return now.keys() == then.keys() and all(_is_same(now[k], then[k]) for k in then)
    if isinstance(then, pyro.plate):
        return all(getattr(now, name) == getattr(then, name) for name in _OF_A_PLATE)
    return False


@dataclass
class Dependencies:
    """
    The globals, closed-over variables, attributes, parameters and buffers that programs can see.

    Followed from the programs through functions, methods, partials, modules, containers and objects
    of classes that are not PyTorch's, Pyro's or other installed packages'.

    :ivar is_cut: whether there are too many to look at in each step.
    """

    entries: list[Entry] = field(default_factory=list)
    objects: list[object] = field(default_factory=list)
    is_cut: bool = False
    _seen: dict[int, object] = field(default_factory=dict)

    @classmethod
    def of(cls, *roots: object) -> Dependencies:
        """Everything that can be seen from the roots, with its present values."""
        found = cls()
        for root in roots:
            found._visit(root, type(root).__name__, 0)
        return found

    def changed(self) -> Entry | None:
        """The first entry that has another value now."""
        # At every step: by identity, and by value only where that fails.
        for entry in self.entries:
            if entry[0](entry[1]) is not entry[2] and not entry.unchanged:
                return entry
        return None

    def watch_gradient(self, value: Tensor, name: str) -> None:
        """Whether a tensor requires a gradient is one of the values."""
        needs = value.requires_grad
        self.entries.append(Entry(_requires_grad, value, needs, f"requires_grad of {name}"))

    def _visit(self, value: object, name: str, depth: int) -> None:
        if isinstance(value, (*_PLAIN, Tensor)) or depth > _MAX_DEPTH or id(value) in self._seen:
            return
        self.is_cut |= len(self.entries) > _MAX_ENTRIES
        if self.is_cut:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module) or is_of_the_user(value):
            self.objects.append(value)
        for entry in _entries(value, name):
            self.entries.append(entry)
            if isinstance(entry.value, Tensor):
                self.watch_gradient(entry.value, entry.name)
            self._visit(entry.value, entry.name, depth + 1)
        for part, label in _parts(value, name):
            self._visit(part, label, depth + 1)


def _entries(value: Any, name: str) -> Iterator[Entry]:
    if isinstance(value, FunctionType):
        if not is_library(value.__code__):
            yield from _globals(value)
        for label, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if (held := contents(cell)) is not _MISSING:
                yield Entry(contents, cell, held, f"'{label}', which {value.__name__} closes over")
        yield from _attributes(value, value.__name__)
    elif isinstance(value, torch.jit.ScriptModule):
        get = functools.partial(_attribute, value)
        yield from (Entry(get, key, get(key), f"'{key}' of {name}") for key in _scripted(value))
    elif isinstance(value, nn.Module):
        for kind in ("parameters", "buffers", "modules"):
            yield from _named(getattr(value, f"_{kind}"), f"'{{}}' of the {kind} of {name}")
    elif isinstance(value, set | frozenset):
        yield Entry(frozenset, value, frozenset(value), name)
    elif isinstance(value, list | tuple | deque | dict) and len(value) <= _MAX_LENGTH:
        if not isinstance(value, tuple):
            yield Entry(len, value, len(value), f"the length of {name}")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        get = functools.partial(item, value)
        yield from (Entry(get, k, v, f"{name}[{k!r}]") for k, v in items)
    if isinstance(value, ELBO):
        get = functools.partial(_attribute, value)
        yield Entry(get, "num_particles", get("num_particles"), f"num_particles of {name}")
    if isinstance(value, nn.Module | Messenger | ELBO) or is_of_the_user(value):
        yield from _attributes(value, type(value).__name__)
        yield from _class_attributes(value, type(value))
    elif isinstance(value, type) and is_written(value):
        yield from _class_attributes(value, value)


def _globals(function: FunctionType) -> Iterator[Entry]:
    space, names = function.__globals__, _names(function.__code__)
    for name in names:
        # What a function imports by itself is no global, but a module all the same.
        held = space.get(name, sys.modules.get(name, _MISSING))
        if isinstance(held, ModuleType):
            yield from _of_module(held, names, set())
        elif held is not _MISSING:
            yield from _named(space, "global '{}'", [name])


def _of_module(module: ModuleType, names: Iterable[str], seen: set[int]) -> Iterator[Entry]:
    """What can be seen of a module of the user's, and of those within it, by these names."""
    path = getattr(module, "__file__", None)
    if not path or is_library_file(path) or id(module) in seen:
        return
    seen.add(id(module))
    inner = [n for n in names if n in vars(module)]
    yield from _named(vars(module), f"'{{}}' of module {module.__name__}", inner)
    for held in (vars(module)[n] for n in inner):
        if isinstance(held, ModuleType):
            yield from _of_module(held, names, seen)


def _names(code: CodeType) -> dict[str, None]:
    """The globals and attributes that a function names, functions within it included."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.update(_names(constant))
    return found


def _named(
    space: dict[str, object], name: str, keys: Iterable[str] | None = None
) -> Iterator[Entry]:
    for key in list(space if keys is None else keys):
        yield Entry(space.get, key, space[key], name.format(key))


def _scripted(value: torch.jit.ScriptModule) -> list[str]:
    """What TorchScript holds of a module: its mode, its tensors, its attributes and submodules."""
    members = [value.named_parameters, value.named_buffers]
    names = [key for named in members for key, _ in named(recurse=False)]
    children = [key for key, _ in value.named_children()]
    attributes = getattr(getattr(value, "_concrete_type", None), "get_attributes", dict)
    return list(dict.fromkeys(["training", *names, *attributes(), *children]))


def _attributes(value: object, kind: str) -> Iterator[Entry]:
    space = getattr(value, "__dict__", {})
    keys = [k for k in space if k not in _OF_A_MODULE or not isinstance(value, nn.Module)]
    keys = [k for k in keys if _is_watched(space[k])]
    yield from _named(space, f"attribute '{{}}' of {kind}", keys)


def _class_attributes(value: object, kind: type) -> Iterator[Entry]:
    """What an object has of its class, until it is given its own, and what it has in slots."""
    own = () if value is kind else getattr(value, "__dict__", ())
    get = functools.partial(_attribute, value)
    for part in filter(is_written, kind.__mro__):
        for key, held in list(vars(part).items()):
            slot = isinstance(held, MemberDescriptorType) and value is not kind
            if slot or (key not in own and not key.startswith("__") and _is_datum(held)):
                yield Entry(get, key, get(key), f"attribute '{key}' of {kind.__name__}")


def _is_datum(held: object) -> bool:
    """Whether it is not a method, whose own globals are watched."""
    return _is_watched(held) and not isinstance(held, FunctionType | property)


def _is_watched(value: object) -> bool:
    known = is_plain(value) or isinstance(value, _WATCHED)
    return known or _is_array(value) or is_of_the_user(value)


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _parts(value: object, name: str) -> Iterator[tuple[object, str]]:
    """What is followed, though it cannot be another."""
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, nn.Module) or is_of_the_user(value):
        parts = methods(type(value))
    elif isinstance(value, type):
        parts = methods(value) if is_written(value) else []
    else:
        parts = [getattr(value, f"__{n}__", None) for n in ("wrapped", "defaults", "kwdefaults")]
    yield from ((part, name) for part in parts if part is not None)


def _requires_grad(value: Any) -> object:
    return value.requires_grad


def _attribute(value: object, key: str) -> object:
    return getattr(value, key, _MISSING)


def item(held: Any, key: object) -> object:
    try:
        return held[key]
    except LookupError:
        return _MISSING


def contents(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING  # not filled yet
