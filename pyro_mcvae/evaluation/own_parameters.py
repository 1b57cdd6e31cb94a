"""Parameters of modules that Pyro's store knows by one name, as those of two AutoNormal guides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import pyro
from pyro.nn import PyroModule
from torch import Tensor

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.modules import find_modules

__all__ = ["check_own_parameters", "own_parameters"]


class _Held(NamedTuple):
    """A parameter, and the module that holds it."""

    module: PyroModule
    value: Tensor


def _held(programs: Programs) -> dict[str, _Held]:
    """By the name in the store: what PyroModules take from there, rather than their own."""
    found = {}
    for root in find_modules(*programs.pair):
        for module in root.modules():
            if isinstance(module, PyroModule) and module._pyro_context.used:
                for name in module._pyro_params:
                    value = getattr(module, f"{name}_unconstrained")
                    found[module._pyro_get_fullname(name)] = _Held(module, value)
    return found


@contextmanager
def own_parameters(programs: Programs) -> Iterator[None]:
    """
    The programs' modules have their own parameters inside, where the store has another module's by
    the same name, which it has again afterwards.
    """
    store = pyro.get_param_store()
    others = [n for n, held in _held(programs).items() if store._params.get(n) is not held.value]
    tables = store._params, store._constraints, store._param_to_name
    before = [dict(table) for table in tables]
    for name in others:
        if name in store:
            del store[name]
    try:
        yield
    finally:
        if others:
            for table, kept in zip(tables, before, strict=True):
                table.clear()
                table.update(kept)


def check_own_parameters(pairs: Mapping[str, Programs]) -> None:
    """
    :raises ValueError: where two modules of different pairs hold the same tensor by the same name:
        the later one has taken it out of the store, and trained it.
    """
    held = {name: _held(programs) for name, programs in pairs.items()}
    for (one, mine), (two, theirs) in itertools.combinations(held.items(), 2):
        for name in sorted(mine.keys() & theirs.keys()):
            a, b = mine[name], theirs[name]
            if a.module is not b.module and a.value is b.value:
                raise ValueError(
                    f"parameter '{name}' is one and the same in modules of {one!r} and of {two!r}: "
                    f"Pyro's parameter store knows parameters by name, and gave those of the first "
                    f"to the second. Call pyro.clear_param_store() before each of them is made and "
                    f"trained"
                )
