"""What Pyro keeps by itself: the parameter store, and one optimizer for each parameter in it."""

from __future__ import annotations

import copy
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import pyro
import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributions.constraints import Constraint

__all__ = ["ParamStorePart", "Part", "PyroOptimPart", "Saved", "StoreState", "Undo", "store_names"]

Undo: TypeAlias = Callable[[], None]
# What an object's own ``state_dict`` returns: tensors and plain values, however it has them.
Saved: TypeAlias = Any


class StoreState(TypedDict):
    """
    What is saved of the parameter store, by names in it.

    :ivar owners: part and name of the parameters that modules among the parts hold.
    :ivar of_modules: those that other modules hold.
    """

    owners: dict[str, str]
    of_modules: dict[str, bool]
    params: dict[str, Tensor]
    constraints: dict[str, Constraint]


class Part(ABC):
    """
    One thing with a state.

    :cvar str kind: its class, so that no other is taken for it.
    :cvar bool by_rank: whether each rank of a distributed run has a state of its own.
    """

    kind: str
    by_rank = False

    @abstractmethod
    def save(self) -> Saved:
        """The state, of tensors and plain values; tensors may be the live ones."""

    @abstractmethod
    def load(self, state: Saved) -> None:
        """Set the state; may fail halfway."""

    @abstractmethod
    def undo(self) -> Undo:
        """Remember the present state, and return what sets it again."""


class PyroOptimPart(Part):
    """Pyro's optimizers: one of PyTorch's for each parameter, by its name in the store."""

    def __init__(self, optim: PyroOptim) -> None:
        self._optim = optim
        made = optim.pt_optim_constructor
        self.kind = f"{type(optim).__name__}({getattr(made, '__name__', made)})"

    def save(self) -> dict[str, Saved]:
        # What was loaded and has not met its parameter yet is part of the state.
        state = {**self._optim._state_waiting_to_be_consumed, **self._optim.get_state()}
        return {name: value for name, value in state.items() if name is not None}

    def load(self, state: Mapping[str, Saved]) -> None:
        # A state is consumed where an optimizer is made, so the present ones have to go.
        self._optim.optim_objs.clear()
        self._optim.grad_clip.clear()
        self._optim._state_waiting_to_be_consumed = copy.deepcopy(dict(state))

    def undo(self) -> Undo:
        optim = self._optim
        names = "optim_objs", "grad_clip", "_state_waiting_to_be_consumed"
        before = {name: dict(getattr(optim, name)) for name in names}

        def restore() -> None:
            for name, value in before.items():
                setattr(optim, name, value)

        return restore


def store_names(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The names in the parameter store of modules that number themselves, by where they are."""
    return {
        f"{part}/{path}": module.param_name
        for part, whole in modules.items()
        for path, module in whole.named_modules()
        if isinstance(getattr(module, "param_name", None), str)
    }


class ParamStorePart(Part):
    """
    Pyro's parameter store.

    Many of its tensors are parameters of modules. These keep the modules' tensors, or a module
    would go on with values that no optimizer sees.
    """

    kind = "ParamStoreDict"

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._store = pyro.get_param_store()
        self._modules = modules

    def _owned(self) -> dict[str, Tensor]:
        return {
            f"{part}/{name}": value
            for part, module in self._modules.items()
            for name, value in module.named_parameters(remove_duplicate=False)
        }

    def save(self) -> StoreState:
        keys: dict[int, str] = {}
        for key, value in self._owned().items():
            keys.setdefault(id(value), key)
        state = self._store.get_state()
        others = {n: p for n, p in state["params"].items() if id(p) not in keys}
        return {
            "owners": {n: keys[id(p)] for n, p in state["params"].items() if id(p) in keys},
            "of_modules": dict.fromkeys(_held_by_modules(others), True),
            "params": {n: p.detach() for n, p in state["params"].items()},
            "constraints": state["constraints"],
        }

    def load(self, state: StoreState) -> None:
        owned, params = self._owned(), self._store._params
        for name in list(params):
            if name not in state["params"]:
                del self._store[name]
        for name, saved in state["params"].items():
            live = params.get(name)
            owner = owned.get(state["owners"].get(name, ""))
            if owner is not None:
                # The module's next call puts its own tensor there.
                if live is not None and live is not owner:
                    del self._store[name]
            elif name in state["of_modules"]:
                _into_module(name, live, saved)
            elif live is not None and live.shape == saved.shape and live.dtype == saved.dtype:
                with torch.no_grad():
                    live.copy_(saved)
            else:
                if live is not None:
                    del self._store[name]
                made = saved.clone().requires_grad_()
                constraint = {name: state["constraints"][name]}
                self._store.set_state({"params": {name: made}, "constraints": constraint})

    def undo(self) -> Undo:
        store = self._store
        names = "_params", "_param_to_name", "_constraints"
        before = {name: dict(getattr(store, name)) for name in names}
        values = {name: p.detach().clone() for name, p in store._params.items()}

        def restore() -> None:
            for name, value in before.items():
                setattr(store, name, value)
            with torch.no_grad():
                for name, value in values.items():
                    before["_params"][name].copy_(value)

        return restore


def _held_by_modules(params: Mapping[str, Tensor]) -> list[str]:
    """
    The names of what modules hold as plain parameters. These do not look for their values in the
    parameter store, as a PyroParam does: what is put there in their place would be trained by the
    optimizer and used by nobody.
    """
    unknown = {id(p): n for n, p in params.items() if isinstance(p, nn.Parameter)}
    if not unknown:
        return []
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    held = [
        unknown[id(p)]
        for module in modules
        for name, p in module._parameters.items()
        if id(p) in unknown and not name.endswith("_unconstrained")
    ]
    return sorted(set(held))


def _into_module(name: str, live: Tensor | None, saved: Tensor) -> None:
    """
    Set a parameter of a module that is known by its name in the store only.

    :raises ValueError: if the module has not been called yet, or has another shape.
    """
    if live is None:
        raise ValueError(
            f"parameter '{name}' belongs to a module that is not among the parts, and which the "
            f"store does not know yet: pass the module to save_checkpoint and load_checkpoint "
            f"too, or call the model and the guide once before loading"
        )
    if live.shape != saved.shape:
        raise ValueError(
            f"parameter '{name}' has shape {tuple(live.shape)}, and was saved with "
            f"{tuple(saved.shape)}"
        )
    with torch.no_grad():
        live.copy_(saved)
