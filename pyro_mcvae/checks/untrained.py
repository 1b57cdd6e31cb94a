"""A guide that never ran has learned nothing: evaluation refuses to judge where it begins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyro
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.trace_struct import Trace
from torch import nn

from pyro_mcvae.programs.modules import find_modules
from pyro_mcvae.programs.types import Program, Site

_logger = logging.getLogger(__name__)


@contextmanager
def untrained_guide(guide: Program) -> Iterator[Callable[[Trace], None]]:
    """
    Around the first run of a guide that is judged; an error leaves its modules as they were.

    Parameters of modules that were there before are those of a trained module, or of a loaded one,
    whether or not Pyro's store knows them. Those that an AutoGuide makes at its first call have
    initial values that nobody chose, unless the store has saved ones: they are refused. Those of
    ``pyro.param(name, init)`` have values that the program says, which may be meant: they are
    logged.

    :returns: a check of the run's trace.
    :raises ValueError: naming the parameters of modules that the run made.
    """
    known = frozenset(pyro.get_param_store().keys())
    modules = [m for root in find_modules(guide) for m in root.modules()]
    before = [(m, _copy(vars(m))) for m in modules]
    parameters = {id(p) for m in modules for p in m.parameters(False)}
    unset = [m for m in modules if _is_unset(m)]

    def check(guide_trace: Trace) -> None:
        held = dict(pyro.get_param_store().named_parameters())
        new, sites = [n for n in pyro.get_param_store() if n not in known], guide_trace.nodes
        born = {id(p) for m in modules for p in m.parameters()} - parameters
        names = [n for n in new if id(held[n]) in born]
        if pyro.settings.get("module_local_params"):
            # The store knows of no module then, and no saved parameters wait there.
            set_up = [m for m in unset if not _is_unset(m)]
            names += [f"{type(m).__name__}.{n}" for m in set_up for n, _ in m.named_parameters()]
        if names:
            raise ValueError(
                f"{_name(guide)} never ran: its parameters ({_some(names)}) would be made by this "
                f"evaluation, and their initial values judged. Train it first, or load its "
                f"parameters (into Pyro's store, or into the guide after a first call of it); call "
                f"guide(*args) once, if its initial values are what you want to judge"
            )
        begun = [n for n in new if n in sites and _begins(sites[n])]
        if begun:
            _logger.warning(
                "%s never ran, so that the initial values of its parameters (%s) are judged: train "
                "it, or load Pyro's parameter store, unless they are meant",
                _name(guide),
                _some(begun),
            )

    try:
        yield check
    except BaseException:
        for module, parts in before:
            for name, part in parts.items():
                now = vars(module).get(name)
                if isinstance(part, dict) and isinstance(now, dict):
                    now.clear()
                    now.update(part)
                    parts[name] = now
            vars(module).clear()
            vars(module).update(parts)
        raise


def _name(guide: Program) -> str:
    inner = poutine.unwrap(guide)
    name = None if isinstance(inner, nn.Module) else getattr(inner, "__qualname__", None)
    return f"the guide {name or type(inner).__name__}"


def _is_unset(module: nn.Module) -> bool:
    return isinstance(module, AutoGuide) and module.prototype_trace is None


def _begins(site: Site) -> bool:
    """Whether ``pyro.param`` was given an initial value that is no parameter of a module."""
    given = [*site["args"][1:2], site["kwargs"].get("init_tensor")]
    return any(v is not None and not isinstance(v, nn.Parameter) for v in given)


def _some(names: list[str]) -> str:
    return ", ".join(f"'{n}'" for n in names[:3]) + (", ..." if len(names) > 3 else "")


def _copy(parts: dict[str, object]) -> dict[str, object]:
    return {n: v.copy() if isinstance(v, dict) else v for n, v in parts.items()}
