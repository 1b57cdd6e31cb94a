"""Parameters of modules that Pyro's store knows by one name, as those of two AutoNormal guides."""

from __future__ import annotations

import gc
import itertools
import sys
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import pyro
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.modules import find_modules
from pyro_mcvae.programs.source_lines import is_library
from pyro_mcvae.programs.types import Program

__all__ = ["check_own_parameters", "leave_out_others", "warn_of_shared"]

_REMEDY = "call pyro.clear_param_store() before each of them is made and trained"


class _Held(NamedTuple):
    """A parameter, the module that holds it, and as what."""

    module: PyroModule
    attribute: str
    value: Tensor


def _held(*programs: Program) -> dict[str, _Held]:
    """By the name in the store: what PyroModules take from there, rather than their own."""
    found = {}
    for root in find_modules(*programs):
        for module in root.modules():
            if isinstance(module, PyroModule) and module._pyro_context.used:
                for name in module._pyro_params:
                    attribute = f"{name}_unconstrained"
                    held = _Held(module, attribute, getattr(module, attribute))
                    found[module._pyro_get_fullname(name)] = held
    return found


def leave_out_others(*programs: Program) -> None:
    """Take out of the store what another module has there by the name of one of the programs'."""
    store = pyro.get_param_store()
    for name, held in _held(*programs).items():
        if name in store and store._params[name] is not held.value:
            del store[name]


def warn_of_shared(*programs: Program) -> None:
    """Warn of parameters that a later module has taken out of the store, and may have trained."""
    held = _held(*programs)
    own = {id(h.module._parameters) for h in held.values()}
    for space in gc.get_referrers(*(h.value for h in held.values())) if held else ():
        if not isinstance(space, dict) or id(space) in own:
            continue
        for name, (module, attribute, value) in held.items():
            if space.get(attribute) is value and _is_of_a_module(space):
                warnings.warn(
                    f"parameter '{name}' of {type(module).__name__} is one and the same in another "
                    f"module: Pyro's parameter store knows parameters by name, and gave those of "
                    f"the first to the second. What is evaluated is what was trained last: "
                    f"{_REMEDY}",
                    stacklevel=_frames_to_the_program(),
                )
                return


def _is_of_a_module(space: dict[object, object]) -> bool:
    """Whether these are the parameters of a module, rather than a copy that is kept."""
    holders = gc.get_referrers(space)
    # A module's attributes may lie in a dict or in itself.
    for holder in [*holders, *gc.get_referrers(*(h for h in holders if isinstance(h, dict)))]:
        # Without the class that a weak reference's proxy would ask for.
        if issubclass(type(holder), nn.Module) and vars(holder).get("_parameters") is space:
            return True
    return False


def _frames_to_the_program() -> int:
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and is_library(frame.f_code):
        frame, count = frame.f_back, count + 1
    return count


def check_own_parameters(pairs: Mapping[str, Programs]) -> None:
    """
    :raises ValueError: where two modules of different pairs hold the same tensor by the same name:
        the later one has taken it out of the store, and trained it.
    """
    held = {name: _held(*programs.pair) for name, programs in pairs.items()}
    for (one, mine), (two, theirs) in itertools.combinations(held.items(), 2):
        for name in sorted(mine.keys() & theirs.keys()):
            a, b = mine[name], theirs[name]
            if a.module is not b.module and a.value is b.value:
                raise ValueError(
                    f"parameter '{name}' is one and the same in modules of {one!r} and of {two!r}: "
                    f"Pyro's parameter store knows parameters by name, and gave those of the first "
                    f"to the second: {_REMEDY}"
                )
