"""Evaluation leaves no trace: modes, parameters, buffers and random streams stay as they are."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.modules import evaluation_modules, find_modules
from pyro_mcvae.programs.types import Program
from pyro_mcvae.training.generators import rng_state, set_rng_state

# What Pyro's parameter store consists of.
_TABLES = "_params", "_param_to_name", "_constraints"
# By parameter, the modules that hold it, each with the parameter's name.
_HOLDERS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_REMEDY = "call pyro.clear_param_store() before each of them is made and trained"


@contextmanager
def evaluation_mode(*programs: Program, seed: int | None = None) -> Iterator[None]:
    """
    Evaluate programs without changing them.

    Modules that the programs are, hold or refer to are in evaluation mode inside: dropout and batch
    statistics would make another density of each run. They have their own parameters, where the
    parameter store has those of another module by the same name. Parameters that were not in the
    store before are removed from it.

    :param seed: seeds the generators inside and sets them back afterwards; None uses the present
        random stream.
    :raises ValueError: for modules with lazy parameters that have no shape yet.
    """
    _check_seed(seed)
    roots = find_modules(*programs)
    _refuse_lazy(roots)
    store = pyro.get_param_store()
    # Not by deleting names afterwards: two of them may be of one parameter, which the store forgets
    # at the first.
    tables = [getattr(store, name) for name in _TABLES]
    before = [dict(table) for table in tables]
    generators = rng_state() if seed is not None else None
    try:
        for name, own in _own_parameters(*programs).items():
            if name in store and store._params[name] is not own.value:
                del store[name]  # another module's
            _warn_of_shared(name, own)
        with evaluation_modules(roots):
            if seed is not None:
                pyro.set_rng_seed(seed)
            yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)
        if generators is not None:
            set_rng_state(generators)


def check_own_parameters(pairs: Mapping[str, Programs]) -> None:
    """
    :raises ValueError: where two modules of different pairs hold the same tensor by the same name:
        the later one has taken it out of the store, and trained it.
    """
    own = {name: _own_parameters(*programs.pair) for name, programs in pairs.items()}
    for (one, mine), (two, theirs) in itertools.combinations(own.items(), 2):
        for name in sorted(mine.keys() & theirs.keys()):
            a, b = mine[name], theirs[name]
            if a.module is not b.module and a.value is b.value:
                raise ValueError(
                    f"parameter '{name}' is one and the same in modules of {one!r} and of {two!r}: "
                    f"Pyro's parameter store knows parameters by name, and gave those of the first "
                    f"to the second: {_REMEDY}"
                )


class _Own(NamedTuple):
    """A parameter that a module holds itself."""

    module: PyroModule
    value: Tensor


def _own_parameters(*programs: Program) -> dict[str, _Own]:
    """By the name in the store: what PyroModules take from there, rather than their own."""
    found = {}
    for module in (m for root in find_modules(*programs) for m in root.modules()):
        if isinstance(module, PyroModule) and module._pyro_context.used:
            for parameter in module._pyro_params:
                name = module._pyro_get_fullname(parameter)
                own = found[name] = _Own(module, getattr(module, f"{parameter}_unconstrained"))
                _HOLDERS.setdefault(own.value, weakref.WeakKeyDictionary())[module] = name
    return found


def _warn_of_shared(name: str, own: _Own) -> None:
    """Warn of a parameter that another module, seen before, has by the same name."""
    holders = _HOLDERS.get(own.value, {})
    if any(known == name and module is not own.module for module, known in holders.items()):
        warnings.warn(
            f"parameter '{name}' of {type(own.module).__name__} is one and the same in another "
            f"module: Pyro's parameter store knows parameters by name, and gave those of the first "
            f"to the second. What is evaluated is what was trained last: {_REMEDY}",
            stacklevel=7,
        )


def _check_seed(seed: int | None) -> None:
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
