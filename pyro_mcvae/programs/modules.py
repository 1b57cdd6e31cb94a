"""The modules that programs are made of."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from pyro import poutine
from torch import nn

from pyro_mcvae.programs.types import Program

# How far a program's closures, attributes and lists are followed to the modules that it uses.
_DEPTH = 4
_LEAVES = (torch.Tensor, type, str, bytes, int, float, complex, type(None), type(torch))


def find_modules(*programs: Program) -> list[nn.Module]:
    """The modules that programs are, or reach through closures, globals that they name, bound
    objects, attributes and containers."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()

    def visit(value: object, depth: int) -> None:
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


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, list | tuple):
        yield from (item for item in value if not isinstance(item, _LEAVES))
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, _LEAVES):
        return
    yield from (*globals_of(value).values(), *closure_of(value).values())
    yield from (getattr(value, name, None) for name in ("__self__", "__func__", "__wrapped__"))
    if type(value).__module__ not in ("builtins", "types"):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()


def globals_of(function: object) -> dict[str, object]:
    """The globals that a function names."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    scope = getattr(function, "__globals__", {})
    return {name: scope[name] for name in names if name in scope}


def closure_of(function: object) -> dict[str, object]:
    """The variables that a function closes over."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    found = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with suppress(ValueError):  # not filled yet
            found[name] = cell.cell_contents
    return found


@contextmanager
def evaluation_modules(roots: list[nn.Module]) -> Iterator[None]:
    """Modules in evaluation mode inside, and as they were afterwards."""
    modes = [(m, m.training) for root in roots for m in root.modules()]
    try:
        for root in roots:
            root.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
