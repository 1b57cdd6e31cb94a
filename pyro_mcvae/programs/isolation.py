"""Runs of a model and guide beside a step, which leave nothing behind."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_mcvae.ops.generators import Generators
from pyro_mcvae.ops.lanes import is_mapped
from pyro_mcvae.programs.batch_norm import FixedStatistics
from pyro_mcvae.programs.modules import closure_of, find_modules
from pyro_mcvae.programs.types import Program

# Larger tensors that a program keeps as plain attributes are data, and are not copied.
_MAX_COPIED = 2**22
_CONTAINERS = (list, dict, set, collections.deque)
# What torch.nn and Pyro keep in their own objects is set up once, not updated by a run.
LIBRARIES = ("torch.", "pyro.", "pyro_mcvae.", "builtins")


@contextmanager
def isolated(owners: Iterable[object] = ()) -> Iterator[None]:
    """
    Hide runs of programs from outer handlers, and put back what they change.

    Random number generators, buffers, attributes and the parameter store are afterwards as they
    were. What a run sets up for the first time (a parameter, an AutoGuide's prototype) stays.

    :param owners: by :func:`owners_of`.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    state = pyro.util.get_rng_state()
    with (
        torch.random.fork_rng(devices),
        poutine.block(),
        FixedStatistics(),
        _state_kept(owners),
    ):
        try:
            yield
        finally:
            pyro.util.set_rng_state(state)


@contextmanager
def _state_kept(owners: Iterable[object]) -> Iterator[None]:
    """
    Let runs work on copies of buffers and attributes, and put the originals back.

    Nothing is overwritten, so autograd does not take it for a change of a saved tensor.
    """
    with ExitStack() as stack:
        for owner in owners:
            stack.enter_context(
                _container_kept(owner) if isinstance(owner, list | dict) else _owner_kept(owner)
            )
        stack.enter_context(_store_kept())
        yield


def owners_of(*programs: Program) -> list[object]:
    """The modules that programs use, and the objects that programs are methods of."""
    modules = [m for root in find_modules(*programs) for m in root.modules()]
    plain = [getattr(f, "__self__", f) for f in map(poutine.unwrap, programs)]
    found = {id(owner): owner for owner in (*modules, *plain) if hasattr(owner, "__dict__")}
    owners = [o for o in found.values() if not (isinstance(o, type) or hasattr(o, "__code__"))]
    held = [v for f in map(poutine.unwrap, programs) for v in closure_of(f).values()]
    return owners + [v for v in held if type(v) in (list, dict)]


@contextmanager
def _container_kept(container: Any) -> Iterator[None]:
    """Put back what a closure's container held, if tensors under vmap were left in it."""
    before = container.copy()
    try:
        yield
    finally:
        values = container.values() if isinstance(container, dict) else container
        if any(isinstance(v, Tensor) and is_mapped(v) for v in values):
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(before)


@contextmanager
def _owner_kept(owner: Any) -> Iterator[None]:
    parts: list[dict[str, Any]] = []
    if isinstance(owner, nn.Module):
        parts = [owner._buffers, owner._parameters]
    if not type(owner).__module__.startswith(LIBRARIES):
        parts.append(vars(owner))
    before = [{name: v for name, v in part.items() if v is not None} for part in parts]
    for part, own in zip(parts, before, strict=True):
        part.update({name: _copy(v) for name, v in own.items() if _is_copied(name, v)})
    try:
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            part.update(own)


_OF_MODULES = frozenset(vars(nn.Module()))


def _is_copied(name: str, value: object) -> bool:
    if isinstance(value, Tensor):
        return not value.requires_grad and value.numel() <= _MAX_COPIED
    return type(value) in _CONTAINERS and name not in _OF_MODULES and not name.startswith("_pyro")


def _copy(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().clone(), requires_grad=False)
    return value.clone() if isinstance(value, Tensor) else value.copy()


@contextmanager
def _store_kept() -> Iterator[None]:
    store = pyro.get_param_store()
    before: Mapping[str, Tensor] = dict(store._params)
    try:
        yield
    finally:
        for name, value in before.items():
            if store._params.get(name) is not value:
                store._params[name] = value
                store._param_to_name[value] = name


@contextmanager
def rewindable(active: bool) -> Iterator[Callable[[], bool]]:
    """
    A function that sets the random number generators back to where an active block began, and says
    whether it did.
    """
    # Of Python and NumPy, too.
    before = (pyro.util.get_rng_state(), Generators()) if active else None

    def rewind() -> bool:
        if before is not None:
            pyro.util.set_rng_state(before[0])
            before[1].put_back()
        return active

    yield rewind
