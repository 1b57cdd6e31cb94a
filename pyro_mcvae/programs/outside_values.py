"""Find the Python values outside model and guide that a step reads."""

from __future__ import annotations

import array
import dis
import functools
import gc
import operator
import random
import re
import sys
from argparse import Namespace
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from multiprocessing.sharedctypes import SynchronizedBase
from numbers import Number
from queue import Queue
from threading import local
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar, cast, overload
from weakref import WeakKeyDictionary

import pyro
import torch
from pyro.infer.elbo import ELBO
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pyro_mcvae.ops import compat
from pyro_mcvae.ops.compat import LoaderIterator
from pyro_mcvae.programs.source_lines import is_core, is_core_file, is_generated, is_own

T = TypeVar("T")


@overload
def is_a(value: object, kind: type[T] | tuple[type[T], ...]) -> TypeGuard[T]: ...
@overload
def is_a(value: object, kind: Any) -> bool: ...
def is_a(value: object, kind: Any) -> bool:
    """
    Return whether a user's object is of a class.

    ``isinstance`` also believes the object's ``__class__``, by which proxies and mocks claim to be
    tensors or modules, and which may raise any error.
    """
    return issubclass(type(value), kind)


# The functions that a step executes: only values that they read can affect it.


class ExecutedCode:
    """
    The code of all functions that are called inside a ``with`` statement.

    :param unknown: whether any function may be executed.
    :ivar codes: by id; None if unknown, or if another profiler is active.
    """

    def __init__(self, unknown: bool = False) -> None:
        self.codes: dict[int, CodeType] | None = None if unknown else {}
        self._names: dict[bool, frozenset[str]] = {}

    def __enter__(self) -> ExecutedCode:
        self._free = sys.getprofile() is None
        # Code that runs during garbage collection is not part of a program.
        self._collects = gc.isenabled()
        gc.disable()
        if self._free and self.codes is not None:
            self._names = {}
            sys.setprofile(self._called)
        else:
            self.codes = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._free:
            sys.setprofile(None)
        if self._collects:
            gc.enable()

    def _called(self, frame: FrameType, event: str, function: object) -> None:
        if event == "call":
            assert self.codes is not None
            code = frame.f_code
            if id(code) not in self.codes and not is_generated(frame):
                self.codes[id(code)] = code

    def has(self, code: CodeType) -> bool:
        """Return whether a function was executed, or may have been."""
        return self.codes is None or id(code) in self.codes

    def add(self, other: ExecutedCode) -> None:
        """Add the functions that another one has executed."""
        if self.codes is not None:
            self.codes |= other.codes or {}
            self._names = {}

    def core_names(self, own: bool) -> frozenset[str]:
        """
        Return the names in the executed code of Python, PyTorch and Pyro.

        :param own: include this package, whose names are those of its own classes.
        """
        if own not in self._names:
            codes = (code for code in (self.codes or {}).values() if is_core(code))
            self._names[own] = frozenset(names_of(*(c for c in codes if own or not is_own(c))))
        return self._names[own]


def names_of(*codes: CodeType, strings: bool = True) -> dict[str, None]:
    """
    Return the globals and attributes that functions, and functions inside them, refer to.

    :param strings: include string constants, which ``getattr`` may use.
    """
    names: dict[str, None] = {}
    for code in codes:
        names.update(_names(code, strings))
    return names


@lru_cache(maxsize=8192)
def _names(code: CodeType, strings: bool) -> dict[str, None]:
    # "@": of the asserts that pytest rewrites, and lead into all of pytest.
    names = dict.fromkeys(name for name in code.co_names if name[:1] != "@")
    for constant in code.co_consts:
        if is_a(constant, CodeType):
            names.update(_names(constant, strings))
        for part in constant if is_a(constant, tuple | frozenset) else (constant,):
            if strings and is_a(part, str):
                names[part] = None
    return names


# Values that a program reads besides its arguments: globals, closures, attributes, arrays.

numpy: Any = sys.modules["numpy"]  # Pyro needs it

# Types that are compared by value. All other objects are compared by identity.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
IMMUTABLE = (Number, numpy.generic, Enum, range, slice, torch.dtype, torch.device, torch.Size)
# How many values, and bytes of arrays, are compared at each step, which takes about half a
# millisecond; and the depth of the search.
_MAX_ENTRIES, _MAX_BYTES, _MAX_DEPTH = 16384, 1 << 20, 64
# Items of longer containers are one entry.
_SHORT = 64
_TOO_MANY = "too many to compare at each step"
MISSING = object()
# Classes of libraries whose objects keep state in attributes.
_WITH_ATTRIBUTES = (SimpleNamespace, Namespace, UserDict, UserList, Queue, Optimizer, LRScheduler)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_CACHED = type(lru_cache(len))
_GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState)
# Functions that read attributes whose names they hold.
_NAMING = (operator.attrgetter, operator.methodcaller)
# Types of attributes that may be replaced; not all of them are searched.
_WATCHED = (
    *(Tensor, nn.Module, ELBO, Distribution, Transform, *CONTAINERS, SimpleNamespace, Namespace),
    *(FunctionType, MethodType, ModuleType, functools.partial, *_NAMING),
    *(type, BuiltinFunctionType, *IMMUTABLE, *_GENERATORS, torch.Generator),
)
# Attributes of modules that are followed as parameters, buffers and submodules, or have no effect.
_OF_A_MODULE = compat.OF_PYRO_MODULES - compat.HOOKS - {"training"}
_OF_A_PLATE = ("name", "size", "subsample_size", "dim")

# Functions that may read attributes whose names do not occur in the code.
_DYNAMIC = {
    *("getattr", "hasattr", "vars", "__dict__", "__getattribute__", "dir", "getmembers"),
    *("attrgetter", "methodcaller", "copy", "deepcopy", "asdict", "astuple", "fields", "replace"),
    *("dumps", "__slots__", "__reduce__", "__getstate__"),
}
# Functions by which a program imports a module whose name is a string.
_IMPORTS = {"modules", "import_module", "__import__"}

Getter: TypeAlias = Callable[[Any], object]


class Entry(NamedTuple):
    """One value that can be read: ``get(key)`` was ``value``."""

    get: Getter
    key: object
    value: object
    name: str

    @property
    def unchanged(self) -> bool:
        """Return whether the value is the same now."""
        return _is_same(self.get(self.key), self.value)


def is_hashable(value: object) -> bool:
    """Return whether a value has a hash; a class may have one whose objects do not."""
    try:
        hash(value)
    except Exception:
        return False
    return True


def is_plain(value: object) -> bool:
    return is_a(value, _PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


def _is_same(now: Any, then: Any, tensors: bool = True) -> bool:
    """Return whether two values are equal; AutoGuides, for example, remake plates at each step."""
    if now is then or (not tensors and is_a(now, Tensor) and is_a(then, Tensor)):
        return True
    if type(now) is not type(then):
        return False
    if is_a(then, list | tuple):
        same = len(now) == len(then) and all(map(operator.is_, now, then))
        return same or (len(now) == len(then) and all(map(_is_same, now, then)))
    if is_plain(then) or is_a(then, (frozenset, *IMMUTABLE)):
        with suppress(Exception):  # of a user's class
            return bool(now == then)
        return False
    if is_a(then, dict):
        return now.keys() == then.keys() and all(_is_same(now[k], then[k]) for k in then)
    if is_a(then, pyro.plate):
        return all(getattr(now, name) == getattr(then, name) for name in _OF_A_PLATE)
    return False


@dataclass
class Dependencies:
    """
    The globals, closed-over variables, attributes, parameters and buffers that programs read.

    The search starts from the programs, and follows executed functions, methods, partials, modules,
    containers of any size, arrays, and objects of user-defined classes. It includes only attributes
    whose names occur in the executed functions.

    :ivar objects: objects whose attributes a step may write.
    :ivar functions: the executed functions of the programs.
    :ivar generators: random number generators other than PyTorch's.
    :ivar torch_generators: those of PyTorch, other than the default ones.
    :ivar iterator: the first iterator whose items are gone when they have been read.
    :ivar unsupported: the first read that cannot be compared, if any.
    """

    executed: ExecutedCode
    contents: bool = False
    entries: list[Entry] = field(default_factory=list)
    objects: list[object] = field(default_factory=list)
    functions: set[CodeType] = field(default_factory=set)
    generators: dict[str, Any] = field(default_factory=dict)
    torch_generators: dict[str, torch.Generator] = field(default_factory=dict)
    iterator: str = ""
    unsupported: str = ""
    _names: frozenset[str] = frozenset()
    _named: set[str] = field(default_factory=set)
    _methods: set[tuple[int, str]] = field(default_factory=set)
    _seen: dict[int, object] = field(default_factory=dict)
    _cached: set[int] = field(default_factory=set)
    _count: int = 0
    _bytes: int = 0

    @classmethod
    def of(
        cls,
        *roots: object,
        executed: ExecutedCode,
        contents: bool = False,
        named: Iterable[str] = (),
    ) -> Dependencies:
        """
        Collect everything that is read from the roots on, with its present values.

        :param executed: the functions to follow.
        :param contents: whether to compare also tensors that require no gradient.
        :param named: names that other functions refer to.
        """
        names: set[str] = {*named}
        _KINDS.clear()
        while True:
            dependencies = cls(executed, contents, _names=frozenset(names))
            for root in roots:
                if is_a(root, Tensor):
                    dependencies.watch_gradient(root, "an argument")
                dependencies._visit(root, type(root).__name__, 0)
            if dependencies._named <= names:
                break
            names |= dependencies._named  # functions are reached by attributes, named in functions
        return dependencies

    def with_arguments(self, *arguments: object) -> Dependencies:
        """Return the same with what the arguments of a call hold, and these tensors themselves."""
        unknown = ExecutedCode(unknown=True)
        held = Dependencies.of(*arguments, executed=unknown, named=self._names)
        given = [t for t in arguments if is_a(t, Tensor)]
        entries = [*held.entries, *(Entry(_itself, t, t, "an argument") for t in given)]
        return replace(
            self,
            entries=self.entries + entries,
            objects=self.objects + held.objects,
            generators=self.generators | held.generators,
            torch_generators=self.torch_generators | held.torch_generators,
        )

    def values(self) -> list[object]:
        """Return the present value of each entry."""
        return [entry.get(entry.key) for entry in self.entries]

    def changed(self, tensors: bool = True) -> Entry | None:
        """
        Return the first entry whose value has changed.

        :param tensors: whether a tensor that replaces another counts as a change.
        """
        # This runs at every step. It compares by identity first, and by value only if that fails.
        for entry in self.entries:
            now = entry[0](entry[1])
            if now is not entry[2] and not _is_same(now, entry[2], tensors):
                return entry
        return None

    def watch_gradient(self, value: Tensor, name: str) -> None:
        """Watch whether a tensor requires a gradient."""
        needs = value.requires_grad
        self.entries.append(Entry(_requires_grad, value, needs, f"requires_grad of {name}"))
        if self.contents and not needs and not value.is_inference():
            self.entries.append(Entry(compat.version_of, value, compat.version_of(value), name))

    def _visit(self, value: object, name: str, depth: int) -> None:
        if is_a(value, (*_PLAIN, Tensor)) or id(value) in self._seen:
            return
        if is_a(value, FunctionType):
            if not self._is_executed(value):
                return
            if not is_core(value.__code__):
                self.functions.add(value.__code__)
                self.objects.append(value)
                self._named.update(names_of(value.__code__))
        self._seen[id(value)] = value
        self._named.update(_names_held(value))
        if is_a(value, _CACHED):
            self._cached.add(id(value.__wrapped__))
        if depth > _MAX_DEPTH or self._count > _MAX_ENTRIES:
            self._add_unsupported(
                f"reads more than {_MAX_ENTRIES} values that may change: {_TOO_MANY}"
            )
            return
        if is_a(value, _GENERATORS):
            self.generators[name] = value
            return
        if is_a(value, torch.Generator):
            self.torch_generators[name] = value
            return
        try:
            if is_a(value, nn.Module) or is_of_the_user(value):
                self.objects.append(value)
            entries, parts = [*self._entries(value, name)], [*_parts(value, name)]
        except Exception as error:  # of a user's object, whose methods may raise any
            kind = type(value).__qualname__
            self._add_unsupported(
                f"reads {name}, a {kind} that cannot be inspected ({type(error).__name__}: {error})"
            )
            return
        for entry in entries:
            self.entries.append(entry)
            self._count += 1
            if is_a(entry.value, Tensor):
                self.watch_gradient(entry.value, entry.name)
            if entry.get not in _SUMMARIES:
                self._visit(entry.value, entry.name, depth + 1)
        for part, label in parts:
            self._visit(part, label, depth + 1)

    def _is_executed(self, function: FunctionType) -> bool:
        # The backward pass of a function may run in another thread.
        backward = function.__name__ in ("forward", "backward", "jvp", "setup_context")
        is_cached = id(function) in self._cached  # its result may have been there before
        return backward or is_cached or self.executed.has(function.__code__)

    def _entries(self, value: Any, name: str) -> Iterator[Entry]:
        if is_a(value, FunctionType):
            if not is_core(value.__code__):
                yield from _globals(value)
                get = functools.partial(attribute, value)
                for key in ("__defaults__", "__kwdefaults__"):
                    yield Entry(get, key, get(key), f"the defaults of {name}")
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            for label, cell in cells:
                if (content := contents(cell)) is not MISSING:
                    about = f"'{label}', which {value.__name__} closes over"
                    yield Entry(contents, cell, content, about)
            yield from self._attributes(value, value.__name__)
        elif is_a(value, torch.jit.ScriptModule):
            self._add_unsupported(f"runs a scripted module, {name}: use the module itself")
            yield from _scripted(value, name)
        elif is_a(value, nn.Module):
            for kind, space in compat.tables_of(value).items():
                yield Entry(len, space, len(space), f"the number of {kind} of {name}")
                yield from _named(space, "", f" of the {kind} of {name}")
        elif is_a(value, ModuleType):
            if is_written_in(value):
                yield from _named(vars(value), "", f" of {name}", self._names_in(vars(value)))
        elif is_a(value, CONTAINERS):
            yield from self._items(value, name)
        elif _is_array(value):
            yield from self._array(value, name)
        elif is_a(value, Distribution):
            keys = [k for k in vars(value) if k in value.arg_constraints or k == "base_dist"]
            yield from _named(vars(value), "", f" of {name}", keys)
        elif is_a(value, Mapping):
            yield Entry(dict, value, dict(value), name)
        elif is_a(value, ContextVar):
            yield Entry(_of_context, value, _of_context(value), name)
        elif is_a(value, local):
            space = vars(value)
            yield Entry(dict, space, dict(space), name)
        elif is_a(value, SynchronizedBase) and hasattr(value, "value"):
            yield Entry(_of_processes, value, _of_processes(value), name)
        elif is_a(value, Iterator) and not is_of_the_user(value):
            if not can_be_split(value):
                self.iterator = self.iterator or name
            self._add_unsupported(f"reads an iterator, {name}: pass its items as an argument")
        if is_a(value, ELBO):
            get = functools.partial(attribute, value)
            yield Entry(get, "num_particles", get("num_particles"), f"num_particles of {name}")
        if is_a(value, nn.Module | Messenger | ELBO) or is_of_the_user(value):
            yield from self._attributes(value, type(value).__name__)
            yield from self._class_attributes(value, type(value))
        elif is_a(value, type) and is_written(value):
            yield from self._class_attributes(value, value)

    def _names_in(self, space: dict[str, object]) -> list[str]:
        """Return the names of a module's values that may have been read."""
        computed = not _DYNAMIC.isdisjoint(self._names)
        return [
            name
            for name, value in space.items()
            if name in self._names or (computed and name[:2] != "__" and self._is_computed(value))
        ]

    def _is_computed(self, value: object) -> bool:
        """Return whether a value of a module may be read by a name that is computed."""
        if is_a(value, ModuleType):
            return False
        functions = _kind(value).methods if is_a(value, type) else [value]
        if not all(is_a(f, FunctionType) for f in functions):
            return _is_watched(value)
        return self.executed.codes is not None and any(
            self.executed.has(f.__code__) for f in cast("list[FunctionType]", functions)
        )

    def _items(self, value: Any, name: str) -> Iterator[Entry]:
        if is_a(value, set | frozenset):
            self._count += len(value) // 8
            yield Entry(frozenset, value, frozenset(value), name)
            yield from _objects_in(value, name)
            return
        self._count += len(value)
        if self._count > _MAX_ENTRIES:
            self._add_unsupported(
                f"reads {name}, of {len(value)} items: {_TOO_MANY}, make it a tensor"
            )
        elif len(value) > _SHORT:
            yield Entry(flat_items, value, flat_items(value), name)
            yield from _objects_in(value, name)
        else:
            if is_a(value, dict):
                yield Entry(tuple, value, tuple(value), f"the keys of {name}")
            elif not is_a(value, tuple):
                yield Entry(len, value, len(value), f"the length of {name}")
            pairs = pairs_of(value) if is_a(value, dict) else enumerate(value)
            get = functools.partial(item, value)
            yield from (Entry(get, k, v, f"{name}[{k!r}]") for k, v in list(pairs))

    def _array(self, value: Any, name: str) -> Iterator[Entry]:
        size: int = getattr(value, "nbytes", 0)
        content: Any = array_content(value) if size <= _MAX_BYTES else None
        self._bytes += len(content) if is_a(content, bytes) else size
        if self._bytes > _MAX_BYTES:
            self._add_unsupported(
                f"reads an array, {name}, of {size} bytes: {_TOO_MANY}, make it a tensor, which is "
                f"read at each step"
            )
        elif content is not None:
            yield Entry(array_content, value, content, name)

    def _add_unsupported(self, why: str) -> None:
        self.unsupported = self.unsupported or why

    def _attributes(self, value: object, kind: str) -> Iterator[Entry]:
        space = space_of(value) or {}
        keys = [k for k in space if k not in _OF_A_MODULE or not is_a(value, nn.Module)]
        keys = [k for k in keys if self._is_read(type(value), space[k], k)]
        yield from _named(space, "attribute ", f" of {kind}", keys)

    def _is_read(self, kind: type, value: object, name: str) -> bool:
        """Return whether an attribute may have been read; a large one only by the programs."""
        if not _is_watched(value):
            return False
        dynamic = not _DYNAMIC.isdisjoint(self._names)
        if dynamic or self.executed.codes is None or name in self._names:
            return True
        large = is_a(value, Iterator) or _is_array(value)
        large |= is_a(value, CONTAINERS) and len(value) > _SHORT
        return not large and name in self.executed.core_names(_kind(kind).own)

    def _class_attributes(self, value: object, kind: type) -> Iterator[Entry]:
        """Yield class attributes that the object does not override, and the values of slots."""
        instance_attrs = {} if value is kind else space_of(value)
        get = functools.partial(attribute, value)
        for part in _kind(kind).written:
            for key, attr in list(vars(part).items()):
                if is_a(attr, FunctionType) and self._is_executed(attr):
                    if (
                        value is not kind
                        and instance_attrs is not None
                        and key not in instance_attrs
                    ):
                        has = instance_attrs.__contains__
                        yield Entry(has, key, False, f"method '{key}' of an object")
                    if (id(part), key) not in self._methods:
                        self._methods.add((id(part), key))
                        yield Entry(vars(part).get, key, attr, f"method '{key}' of {part.__name__}")
                slot = is_a(attr, MemberDescriptorType) and value is not kind
                datum = (
                    key not in (instance_attrs or ())
                    and not key.startswith("__")
                    and _is_datum(attr)
                )
                if slot or (datum and self._is_read(kind, attr, key)):
                    # The value of another descriptor is computed, as by PyroSample, which draws it.
                    computed = hasattr(type(attr), "__get__") and not slot
                    read = vars(part).get if computed else get
                    yield Entry(read, key, read(key), f"attribute '{key}' of {kind.__name__}")


class GeneratorStates:
    """
    Random number generators other than PyTorch's default ones.

    A recording would repeat their draws.

    :param on_host: only those of Python and NumPy.
    """

    def __init__(self, dependencies: Dependencies, on_host: bool = False) -> None:
        rngs: dict[str, Any] = {"Python's generator": random, "NumPy's generator": numpy.random}
        rngs |= dependencies.generators
        if not on_host:
            rngs |= dependencies.torch_generators
        self._states = {name: (rngs[name], _state(rngs[name])) for name in rngs}

    def moved(self) -> str:
        """Return the name of a generator that has drawn since, or an empty string."""
        states = self._states.items()
        return next((n for n, (rng, old) in states if not _is_state(_state(rng), old)), "")

    def put_back(self) -> None:
        """Restore the states, so that the same numbers are drawn again."""
        for rng, state in self._states.values():
            if hasattr(rng, "setstate"):
                rng.setstate(state)
            elif is_a(rng, numpy.random.Generator):
                rng.bit_generator.state = state
            else:
                rng.set_state(state)


def _state(generator: Any) -> Any:
    if hasattr(generator, "getstate"):
        return generator.getstate()
    if is_a(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _is_state(now: Any, then: Any) -> bool:
    """Return whether two states are equal; NumPy's have arrays."""
    if is_a(then, Tensor):
        return torch.equal(now, then)
    if is_a(then, numpy.ndarray):
        return bool(numpy.array_equal(now, then))
    if is_a(then, tuple) and any(is_a(part, numpy.ndarray) for part in then):
        return len(now) == len(then) and all(map(_is_state, now, then))
    if is_a(then, dict):
        return now.keys() == then.keys() and all(_is_state(now[k], then[k]) for k in then)
    return bool(now == then)


def _globals(function: FunctionType) -> Iterator[Entry]:
    space, names = function.__globals__, names_of(function.__code__, strings=False)
    # A module that a function imports itself is not a global, but is followed too.
    imported = names if _IMPORTS.isdisjoint(names) else names_of(function.__code__)
    if "globals" in names:
        names |= dict.fromkeys(space)
    for name in names:
        if name in space:
            yield from _named(space, "global ", "", [name])
        elif name in _stored_globals(function.__code__):
            yield Entry(space.__contains__, name, False, f"global '{name}'")
    for name in imported:
        module = MISSING if name in names and name in space else sys.modules.get(name, MISSING)
        if is_a(module, ModuleType) and is_written_in(module):
            yield Entry(sys.modules.get, name, module, f"module {name}")


@lru_cache(maxsize=8192)
def _stored_globals(code: CodeType) -> frozenset[str]:
    """Return the globals that a function assigns to, which need not exist before it runs."""
    stores = (i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL")
    return frozenset(stores)


def _objects_in(container: Any, name: str) -> Iterator[Entry]:
    """Yield the items of a container whose own values may change."""
    for value in items_of(container):
        if not is_plain(value):
            yield Entry(_itself, value, value, f"an item of {name}")


def _named(
    space: dict[str, object], before: str, after: str, keys: Iterable[str] | None = None
) -> Iterator[Entry]:
    for key in list(space if keys is None else keys):
        yield Entry(space.get, key, space[key], f"{before}'{key}'{after}")


def _scripted(value: nn.Module, name: str) -> Iterator[Entry]:
    """Yield the buffers and plain values that a scripted module and its parts store in C++."""
    for module in value.modules():
        get = functools.partial(scripted_value, module)
        names = {key for key, _ in module.named_buffers(recurse=False)}
        names |= {*re.findall(r"self\.(\w+)", attribute(module, "code", ""))}
        for key, content in [(n, get(n)) for n in sorted(names)]:
            if is_plain(content) or (is_a(content, Tensor) and not is_a(content, nn.Parameter)):
                yield Entry(get, key, content, f"'{key}' of {name}")


def _is_datum(value: object) -> bool:
    """Return whether a value is watched and not a method, whose globals are watched instead."""
    return _is_watched(value) and not is_a(value, FunctionType | property)


def _is_watched(value: object) -> bool:
    is_listed = is_plain(value) or is_a(value, (*_WATCHED, Iterator))
    return is_listed or _is_array(value) or is_of_the_user(value)


def _is_array(value: object) -> bool:
    """Return whether a value contains numbers: an array, a pandas table or a buffer."""
    if is_a(value, (Tensor, type, bytes, *IMMUTABLE, *CONTAINERS)):
        return False
    buffers = bytearray, memoryview, array.array
    return is_a(value, buffers) or hasattr(type(value), "__array__")


def array_content(value: Any) -> object:
    values = numpy.asarray(value)
    return values.tolist() if values.dtype.hasobject else values.tobytes()


def flat_items(value: Any) -> tuple[object, ...]:
    if is_a(value, dict):
        return tuple(part for pair in pairs_of(value) for part in pair)
    return tuple(value)


def _names_held(value: object) -> Iterator[str]:
    """Yield the strings that a function holds as arguments, which may name attributes."""
    held: tuple[object, ...] = ()
    if is_a(value, functools.partial):
        held = (*value.args, *value.keywords.values())
    elif is_a(value, _NAMING):
        held = cast(Any, value).__reduce__()[1]
    yield from (name for text in held if is_a(text, str) for name in text.split("."))


def _parts(value: Any, name: str) -> Iterator[tuple[object, str]]:
    """Yield the parts of a value that are followed but cannot be replaced."""
    if is_a(value, functools.partial):
        parts = [value.func, *value.args, value.keywords]
    elif is_a(value, MethodType):
        parts = [value.__self__, value.__func__]
    elif is_a(value, BuiltinFunctionType):  # or a method, such as ``config.get``
        parts = [p for p in (value.__self__,) if not is_a(p, ModuleType)]
    elif is_a(value, nn.Module) or is_of_the_user(value):
        parts = _kind(type(value)).methods
    elif is_a(value, type):
        parts = [m for k in (value, type(value)) if is_written(k) for m in _kind(k).methods]
    else:
        names = ("wrapped", "defaults", "kwdefaults")
        parts = [attribute(value, f"__{n}__", None) for n in names]
    yield from ((part, name) for part in parts if part is not None)


class _Kind(NamedTuple):
    """
    What a search has found of a class.

    :ivar methods: its functions, including those behind properties and class methods.
    :ivar written: the classes among its bases and itself that are the user's.
    :ivar own: whether one of them is a class of this package.
    """

    methods: list[FunctionType]
    written: list[type]
    own: bool


# By class. Classes may change until the next search.
_KINDS: dict[type, _Kind] = {}


def _kind(kind: type) -> _Kind:
    found = _KINDS.get(kind)
    if found is None:
        methods = [function for part in kind.__mro__ for function in _own_methods(part)]
        own = any(str(part.__module__).startswith("pyro_mcvae.") for part in kind.__mro__)
        found = _KINDS[kind] = _Kind(methods, [*filter(is_written, kind.__mro__)], own)
    return found


# By class: its members, and the functions among them. Members may be replaced.
_OWN_METHODS: WeakKeyDictionary[type, tuple[list[object], list[FunctionType]]]
_OWN_METHODS = WeakKeyDictionary()


def _own_methods(kind: type) -> list[FunctionType]:
    members: list[object] = list(vars(kind).values())
    known, result = _OWN_METHODS.get(kind, ([], []))
    if len(known) != len(members) or not all(map(operator.is_, known, members)):
        behind = [getattr(m, n, None) for m in members for n in ("fget", "__func__", "func")]
        functions = [f for f in (*members, *behind) if is_a(f, FunctionType)]
        result = [f for f in functions if not is_core(f.__code__)]
        _OWN_METHODS[kind] = members, result
    return result


def is_of_the_user(value: object) -> bool:
    """Return whether an object's class, or a base, is the user's, or keeps state in attributes."""
    if is_a(value, _WITH_ATTRIBUTES):
        return True
    if is_a(value, type | ModuleType | FunctionType | Number | numpy.ndarray | Enum):
        return False
    kind = _kind(type(value))
    return bool(kind.methods or kind.written)


def is_written(kind: type) -> bool:
    """Return whether a class is defined in a file or notebook outside Python and PyTorch."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or (module is not None and is_written_in(module))


def is_written_in(module: ModuleType) -> bool:
    """Return whether a Python module, or a folder of modules, is outside Python and PyTorch."""
    package, _, inner = module.__name__.partition(".")
    space = vars(module)
    path = space.get("__file__") or next(iter(space.get("__path__") or ()), None)  # of a folder
    if path is None:  # it is built in, or was made without a file
        outer = sys.modules.get(package) if inner else None
        is_made = getattr(space.get("__spec__"), "origin", None) is None
        return is_made and (outer is None or is_written_in(outer))
    return package != "numpy" and not is_core_file(str(path))


def can_be_split(value: object) -> bool:
    """Return whether :func:`itertools.tee` may take the place of an iterator, unlike of a file."""
    kind = type(value)
    is_plain_one = kind.__module__ in ("builtins", "itertools") or is_a(value, LoaderIterator)
    return is_plain_one and is_a(value, Iterator)


def _requires_grad(value: Any) -> object:
    return value.requires_grad


def _of_context(variable: ContextVar[Any]) -> object:
    return variable.get(MISSING)


def _of_processes(value: Any) -> object:
    return value.value


# Getters of a whole container or array; its items have separate entries.
_SUMMARIES = (len, tuple, frozenset, flat_items, array_content)


def _itself(value: object) -> object:
    return value


def attribute(value: object, key: str, default: object = MISSING) -> Any:
    try:
        return getattr(value, key, default)
    except Exception:  # of an object that computes its attributes, such as a dict of settings
        return default


def scripted_value(module: nn.Module, key: str) -> Any:
    """Return a value that a scripted module stores outside Python."""
    return attribute(module, key)


def space_of(value: object) -> dict[str, Any] | None:
    """Return the attributes that an object stores, or None if it has no place for them."""
    space = attribute(value, "__dict__", None)
    if space is None:
        with suppress(Exception):  # that of the class may raise
            space = object.__getattribute__(value, "__dict__")
    return space if is_a(space, dict) else None


def pairs_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a dict in its order, whatever its class overrides."""
    return (OrderedDict if is_a(container, OrderedDict) else dict).items(container)


def items_of(container: Any) -> Iterable[object]:
    """Return the items of a container, or the values of a dict, whatever its class overrides."""
    kind: Any = next(k for k in CONTAINERS if is_a(container, k))
    return dict.values(container) if kind is dict else kind.__iter__(container)


def item(container: Any, key: object) -> object:
    try:
        return container[key]
    except Exception:  # it is gone, or the container's class raises another error
        return MISSING


def contents(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING  # the variable has no value yet
