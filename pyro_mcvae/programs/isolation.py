"""Find the modules of model and guide, and restore their state after an extra run."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor, nn
from torch.nn.functional import batch_norm, instance_norm
from torch.overrides import TorchFunctionMode

from pyro_mcvae.ops.compat import HANDLERS, OF_MODULES
from pyro_mcvae.ops.tensors import Generators
from pyro_mcvae.programs.outside_state import OutsideState
from pyro_mcvae.programs.outside_values import (
    CONTAINERS,
    Dependencies,
    attribute,
    contents,
    is_a,
    is_written_in,
    items_of,
    names_of,
    space_of,
)
from pyro_mcvae.programs.source_lines import is_core, is_library, is_library_file
from pyro_mcvae.programs.types import LeadingDimsError, Program, TorchFunction

# The modules of programs.


# How many objects of libraries a search passes through in a row.
_DEPTH = 4
_PASSED = (nn.Module, FunctionType, MethodType, functools.partial, *CONTAINERS)
_LEAVES = (Tensor, str, bytes, int, float, complex, type(None), Trace)


def find_modules(*programs: Program) -> list[nn.Module]:
    """Find the modules that programs may use, wherever they hold them, from the outside in."""
    return _Search(*programs, *map(poutine.unwrap, programs)).modules


class _Search:
    """
    A search for modules, in the functions and classes of the program's author.

    Other libraries are not searched, except those that define the programs.
    """

    def __init__(self, *roots: object) -> None:
        self._packages = {_package_of(root) for root in roots}
        self._names: set[str] = set()
        self._taken: set[tuple[int, str]] = set()  # of Python modules, by name
        self._pending = deque((root, 0) for root in roots)
        self._seen: dict[int, object] = {}
        while self._pending:
            self._visit(*self._pending.popleft())
            if not self._pending:
                self._visit_modules()

    @property
    def modules(self) -> list[nn.Module]:
        """Return the modules that were found."""
        return [value for value in self._seen.values() if is_a(value, nn.Module)]

    def _visit(self, value: object, depth: int) -> None:
        if depth > _DEPTH or is_a(value, _LEAVES) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if not is_a(value, _PASSED):
            depth = 0 if self._is_own(value) else depth + 1
        self._pending.extend((part, depth) for part in self._parts(value))

    def _visit_modules(self) -> None:
        """Visit the values of Python modules whose names occur in functions."""
        for module in [v for v in self._seen.values() if is_a(v, ModuleType)]:
            space = vars(module) if self._is_own(module) else {}
            for name in self._names & space.keys():
                if (id(module), name) not in self._taken:
                    self._taken.add((id(module), name))
                    self._pending.append((space[name], 0))

    def _is_own(self, value: Any) -> bool:
        """Return whether the programs' author has written a function, class or module."""
        if is_a(value, FunctionType):
            is_written, is_installed = not is_core(value.__code__), is_library(value.__code__)
        else:
            module = value if is_a(value, ModuleType) else sys.modules.get(_module_of(value))
            is_written = module is not None and is_written_in(module)
            is_installed = is_library_file(str(getattr(module, "__file__", "")))
        return is_written and (not is_installed or _package_of(value) in self._packages)

    def _parts(self, value: Any) -> Iterator[object]:
        is_own = self._is_own(value)
        if is_a(value, FunctionType):
            yield from map(contents, value.__closure__ or ())
            yield from (value.__defaults__, value.__kwdefaults__)
            if is_own:
                names = names_of(value.__code__)
                self._names |= names.keys()
                yield from (sys.modules.get(n) for n in names)
                yield from (value.__globals__.get(n) for n in names)
        elif is_a(value, type):
            yield from (
                v for part in filter(self._is_own, value.__mro__) for v in vars(part).values()
            )
            return
        elif is_a(value, ModuleType):
            return  # visited by names
        elif is_a(value, CONTAINERS):
            yield from items_of(value)
            return
        elif is_a(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif is_a(value, property | functools.cached_property):
            yield from (getattr(value, name, None) for name in ("fget", "func"))
        elif is_a(value, nn.Module):
            yield from value.children()
            yield from (v for name, v in vars(value).items() if name not in OF_MODULES)
            yield type(value)
            return
        yield from (
            attribute(value, name, None) for name in ("__self__", "__func__", "__wrapped__")
        )
        yield from (space_of(value) or {}).values()
        if is_own:
            slots = [vars(part).get("__slots__", ()) for part in type(value).__mro__]
            for names_of_part in ((s,) if is_a(s, str) else s for s in slots):
                yield from (attribute(value, name, None) for name in names_of_part)
            yield type(value)


def _module_of(value: object) -> str:
    """Return the Python module of a function or class, or of an object's class."""
    if is_a(value, ModuleType):
        return value.__name__
    kind = value if is_a(value, type | FunctionType) else type(value)
    return str(attribute(kind, "__module__", ""))


def _package_of(value: object) -> str:
    return _module_of(value).partition(".")[0]


@contextmanager
def evaluation_modules(roots: list[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode inside, and restore their modes afterwards."""
    modes = [(m, m.training) for root in roots for m in root.modules()]
    try:
        for root in roots:
            root.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


# Batch and instance normalization with fixed statistics, for extra runs.


class FixedStatistics(TorchFunctionMode):
    """
    Batch normalization by fixed statistics, which are not updated.

    Each channel has a different mean. So the result changes if a layer takes another dim for the
    channels, even if the layer has its initial statistics.
    """

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func not in (batch_norm, instance_norm):
            return func(*args, **(kwargs or {}))
        call = _bound(func, args, kwargs or {})
        if func is instance_norm:
            if call["use_input_stats"]:
                # Normalize by the statistics of each instance, not by running statistics.
                call |= {"running_mean": None, "running_var": None}
            return func(**call)
        call["training"] = False
        x = call["input"]
        mean, variance = call["running_mean"], call["running_var"]
        like = x if mean is None else mean
        shift = torch.linspace(-0.5, 0.5, x.shape[1], dtype=like.dtype, device=like.device)
        call["running_mean"] = shift if mean is None else mean + shift
        call["running_var"] = like.new_ones(x.shape[1]) if variance is None else variance
        return func(**call)


def _bound(func: TorchFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


# Extra runs of a model and guide, after which all state is restored.


@contextmanager
def isolated(read: Dependencies | None = None) -> Iterator[None]:
    """Return the context of :func:`restored`, in which batch normalization has fixed statistics."""
    with restored(read), FixedStatistics():
        yield


class Isolation(BlockMessenger):
    """Hides every site from all outer handlers."""


def visible_handlers() -> list[object]:
    """Return the active handlers that see the sites of a run: those inside the last isolation."""
    isolated = [i for i, handler in enumerate(HANDLERS) if isinstance(handler, Isolation)]
    return HANDLERS[isolated[-1] + 1 :] if isolated else list(HANDLERS)


@contextmanager
def restored(read: Dependencies | None = None) -> Iterator[None]:
    """
    Hide runs of programs from outer handlers, and restore the state that they change.

    This restores random number generators, buffers, attributes, the parameter store, and the values
    in globals, closures and containers. State that a run creates (a parameter, an AutoGuide's
    prototype) is kept.

    :param read: the values outside the programs that they may read.
    :raises LeadingDimsError: if the run has stored tensors of a run under vmap.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    state = pyro.util.get_rng_state()
    with (
        torch.random.fork_rng(devices),
        Isolation(),
        _saved_outside(read),
        _saved_store(),
    ):
        try:
            yield
        finally:
            pyro.util.set_rng_state(state)


@contextmanager
def _saved_outside(read: Dependencies | None) -> Iterator[None]:
    """Restore the values outside programs; ``None`` restores nothing."""
    outside, stored = None if read is None else OutsideState(read), ""
    try:
        yield
    finally:
        if outside is not None:
            stored = outside.put_back()
    if stored:
        raise LeadingDimsError(
            f"the programs store a tensor of each run ({stored}), which is not possible under "
            f"vmap: pass vectorize_particles=False",
            reason=f"stores a tensor in {stored}",
        )


@contextmanager
def _saved_store() -> Iterator[None]:
    store = pyro.get_param_store()
    before: dict[str, Tensor] = dict(store.named_parameters())
    try:
        yield
    finally:
        now = dict(store.named_parameters())
        replaced = {name: value for name, value in before.items() if now.get(name) is not value}
        store.set_state({"params": replaced, "constraints": {}})


@contextmanager
def rewindable(active: bool, read: Dependencies | None = None) -> Iterator[Callable[[], bool]]:
    """
    Yield a function that resets the random number generators to the start of an active block.

    It returns whether it did so.

    :param read: values outside programs, which it resets too.
    """
    # Python's and NumPy's generators, too.
    before = (pyro.util.get_rng_state(), Generators()) if active else None
    outside = OutsideState(read) if active and read is not None else None

    def rewind() -> bool:
        if before is not None:
            pyro.util.set_rng_state(before[0])
            before[1].put_back()
        if outside is not None:
            outside.put_back()
        return active

    yield rewind
