"""The modules that programs are made of."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pyro import poutine
from torch import nn

from pyro_mcvae.programs.types import Program

__all__ = ["evaluation_modules", "find_modules"]

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
