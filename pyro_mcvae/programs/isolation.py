"""Find the modules of model and guide, and restore their state after an extra run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from types import CodeType
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
    Dependencies,
    attribute,
    is_a,
    items_of,
    space_of,
)
from pyro_mcvae.programs.types import LeadingDimsError, Program, TorchFunction

# The modules of programs.

# The depth to which a program's closures, attributes and lists are searched for modules.
_DEPTH = 4
_OTHERS = ("torch.", "pyro.", "pyro_mcvae.", "builtins")
_LEAVES = (torch.Tensor, type, str, bytes, int, float, complex, type(None), type(torch), Trace)


def find_modules(*programs: Program) -> list[nn.Module]:
    """Find modules among programs, their closures, named globals, bound objects, attributes and
    containers."""
    seen: dict[int, object] = {}

    def visit(value: object, depth: int) -> None:
        if depth > _DEPTH or is_a(value, _LEAVES) or id(value) in seen:
            return
        seen[id(value)] = value
        for part in _parts(value):
            visit(part, depth + 1)

    for program in (*programs, *map(poutine.unwrap, programs)):
        visit(program, 0)
    return [value for value in seen.values() if is_a(value, nn.Module)]


def _parts(value: object) -> Iterator[object]:
    # This runs in every step, so the attributes of each nn.Module are left out.
    if is_a(value, nn.Module):
        yield from value.children()
        yield from (v for name, v in vars(value).items() if name not in OF_MODULES)
        return
    if is_a(value, list | tuple | dict):
        yield from items_of(value)
        return  # a mapping whose items are attributes may raise KeyError for others
    if is_a(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    is_own = not str(attribute(value, "__module__", "")).startswith(_OTHERS)
    yield from {**(globals_of(value) if is_own else {}), **closure_of(value)}.values()
    yield from (attribute(value, name, None) for name in ("__self__", "__func__", "__wrapped__"))
    yield from (space_of(value) or {}).values()


def globals_of(function: object) -> dict[str, object]:
    """Return the globals that a function refers to."""
    code, scope = attribute(function, "__code__"), attribute(function, "__globals__")
    if not (is_a(code, CodeType) and is_a(scope, dict)):
        return {}
    return {name: scope[name] for name in code.co_names if name in scope}


def closure_of(function: object) -> dict[str, object]:
    """Return the variables that a function closes over."""
    code, cells = attribute(function, "__code__"), attribute(function, "__closure__")
    variables: dict[str, object] = {}
    if not (is_a(code, CodeType) and is_a(cells, tuple)):
        return variables
    for name, cell in zip(code.co_freevars, cells, strict=False):
        with suppress(ValueError):  # the variable has no value yet
            variables[name] = cell.cell_contents
    return variables


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
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
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
