"""A guide that never ran has learned nothing: evaluation refuses to judge where it begins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pyro
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.trace_struct import Trace
from torch import nn

from pyro_mcvae.programs.modules import find_modules
from pyro_mcvae.programs.types import Program, Site

__all__ = ["UntrainedGuide", "untrained_guide"]

_logger = logging.getLogger(__name__)


class UntrainedGuide:
    """
    What a guide consists of before a run, to tell which parameters the run made.

    Parameters of modules that were there before are those of a trained module, or of a loaded one,
    whether or not Pyro's store knows them. Those that an AutoGuide makes at its first call have
    initial values that nobody chose, unless the store has saved ones: they are refused. Those of
    ``pyro.param(name, init)`` have values that the program says, which may be meant: they are
    logged.
    """

    def __init__(self, guide: Program) -> None:
        self._guide = poutine.unwrap(guide)
        self._known = frozenset(pyro.get_param_store().keys())
        roots = find_modules(guide)
        self._modules = {id(m): m for root in roots for m in root.modules()}
        self._parts = {i: _copy(vars(m)) for i, m in self._modules.items()}
        self._parameters = {id(p) for m in self._modules.values() for p in m.parameters(False)}
        self._unset = [m for m in self._modules.values() if _is_unset(m)]

    def check(self, guide_trace: Trace) -> None:
        """
        :raises ValueError: naming the parameters of modules that the run made.
        """
        parameters, born = dict(pyro.get_param_store().named_parameters()), self._born()
        names = [n for n in self._new() if id(parameters[n]) in born]
        if pyro.settings.get("module_local_params"):
            # The store knows of no module then, and no saved parameters wait there.
            set_up = [m for m in self._unset if not _is_unset(m)]
            names += [f"{type(m).__name__}.{n}" for m in set_up for n, _ in m.named_parameters()]
        if names:
            raise ValueError(
                f"{self._name()} never ran: its parameters ({_some(names)}) would be made by this "
                f"evaluation, and their initial values judged. Train it first, or load its "
                f"parameters (into Pyro's store, or into the guide after a first call of it); call "
                f"guide(*args) once, if its initial values are what you want to judge"
            )
        sites = guide_trace.nodes
        begun = [n for n in self._new() if n in sites and _begins(sites[n])]
        if begun:
            _logger.warning(
                "%s never ran, so that the initial values of its parameters (%s) are judged: train "
                "it, or load Pyro's parameter store, unless they are meant",
                self._name(),
                _some(begun),
            )

    def undo(self) -> None:
        """Let the guide's modules consist of what they did, so that the next call says the same."""
        for i, module in self._modules.items():
            now = vars(module)
            for name, part in self._parts[i].items():
                if isinstance(part, dict) and isinstance(now.get(name), dict):
                    now[name].clear()
                    now[name].update(part)
                else:
                    now[name] = part
            for name in now.keys() - self._parts[i].keys():
                del now[name]

    def _new(self) -> list[str]:
        return [n for n in pyro.get_param_store() if n not in self._known]

    def _born(self) -> set[int]:
        now = {id(p) for m in self._modules.values() for p in m.parameters()}
        return now - self._parameters

    def _name(self) -> str:
        kind = type(self._guide)
        name = kind.__name__ if isinstance(self._guide, nn.Module) else None
        return f"the guide {name or getattr(self._guide, '__qualname__', kind.__name__)}"


@contextmanager
def untrained_guide(guide: Program) -> Iterator[UntrainedGuide]:
    """Around the first run of a guide that is judged; an error leaves its modules as they were."""
    before = UntrainedGuide(guide)
    try:
        yield before
    except BaseException:
        before.undo()
        raise


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
