"""Evaluation leaves no trace: modes, parameters, buffers and random streams stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["find_modules", "untouched"]

# How far a program's closures, attributes and lists are followed to the modules that it uses.
_DEPTH = 4
# What Pyro's parameter store consists of.
_TABLES = "_params", "_param_to_name", "_constraints"


@contextmanager
def untouched(*programs: Callable[..., Any], seed: int | None = None) -> Iterator[None]:
    """
    Evaluate programs without changing them.

    Modules that the programs are, hold or refer to are in evaluation mode inside: dropout and batch
    statistics would make another density of each run. Parameters that were not in the parameter
    store before are removed from it.

    :param seed: seeds the generators inside and sets them back afterwards; None uses the present
        random stream.
    :raises ValueError: for modules with lazy parameters that have no shape yet.
    """
    _check_seed(seed)
    roots = find_modules(*programs)
    _refuse_lazy(roots)
    modes = [(m, m.training) for root in roots for m in root.modules()]
    store = pyro.get_param_store()
    # Not by deleting names afterwards: two of them may be of one parameter, which the store forgets
    # at the first.
    tables = [getattr(store, name) for name in _TABLES]
    before = [dict(table) for table in tables]
    generators = _generators() if seed is not None else None
    try:
        for root in roots:
            root.eval()
        if seed is not None:
            pyro.set_rng_seed(seed)
        yield
    finally:
        for module, training in modes:
            module.training = training
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)
        if generators is not None:
            _set_generators(generators)


def find_modules(*programs: Callable[..., Any]) -> list[nn.Module]:
    """The modules that programs are, or reach through closures, globals that they name, bound
    objects, attributes and containers."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()

    def visit(value: Any, depth: int) -> None:
        if id(value) in seen or depth > _DEPTH:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found[id(value)] = value
        for part in _parts(value):
            visit(part, depth + 1)

    for program in programs:
        visit(program, 0)
        visit(poutine.unwrap(program), 0)
    return list(found.values())


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, _LEAVES):
        return
    code = getattr(value, "__code__", None)
    if code is not None:
        scope = getattr(value, "__globals__", {})
        yield from (scope[name] for name in code.co_names if name in scope)
    for cell in getattr(value, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not filled yet
    yield from (getattr(value, name, None) for name in ("__self__", "__func__", "__wrapped__"))
    if type(value).__module__ not in ("builtins", "types"):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()


_LEAVES = (torch.Tensor, type, str, bytes, int, float, complex, type(None), type(torch))


def _check_seed(seed: Any) -> None:
    whole = hasattr(seed, "__index__") and not isinstance(seed, bool | torch.Tensor)
    # NumPy's generator, which Pyro seeds too, takes no other.
    if seed is not None and not (whole and 0 <= seed < 1 << 32):
        raise ValueError(f"seed must be an int from 0 to 2**32 - 1, or None, got {seed!r}")


def _refuse_lazy(roots: list[nn.Module]) -> None:
    for root in roots:
        for name, parameter in root.named_parameters():
            if is_lazy(parameter):
                raise ValueError(
                    f"parameter '{name}' of {type(root).__name__} has no shape yet: the module "
                    f"never ran. Run it once on data (as training does) before it is evaluated"
                )


def _generators() -> tuple[Any, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return pyro.util.get_rng_state(), cuda


def _set_generators(state: tuple[Any, Any]) -> None:
    pyro.util.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])
