"""What Pyro keeps by itself: the parameter store, and one optimizer for each parameter in it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pyro
import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn

Undo: TypeAlias = Callable[[], object]
# What an object's own ``state_dict`` returns: tensors and plain values, however it has them.
Saved: TypeAlias = Any


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

    def undo(self) -> Undo:
        """Remember the present state, and return what sets it again."""
        before = copy.deepcopy(self.save())
        return lambda: self.load(before)


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

    def save(self) -> dict[str, dict[str, Any]]:
        """
        Return everything by its name in the store: values, constraints, the part and the name there
        of parameters that modules among the parts hold (``owners``), and which ones other modules
        hold (``of_modules``). These do not look for their values in the store: what is put there
        would be trained by the optimizer and used by nobody.
        """
        keys: dict[int, str] = {}
        for key, value in self._owned().items():
            keys.setdefault(id(value), key)
        state = self._store.get_state()
        others = {n: p for n, p in state["params"].items() if id(p) not in keys}
        return {
            "owners": {n: keys[id(p)] for n, p in state["params"].items() if id(p) in keys},
            "of_modules": {n: True for n, p in others.items() if isinstance(p, nn.Parameter)},
            "params": {n: p.detach() for n, p in state["params"].items()},
            "constraints": state["constraints"],
        }

    def load(self, state: Mapping[str, dict[str, Any]]) -> None:
        owned, params = self._owned(), self._store._params
        for name in list(params):
            if name not in state["params"]:
                del self._store[name]
        for name, saved in state["params"].items():
            live = params.get(name)
            owner = owned.get(state["owners"].get(name, ""))
            if live is not None and live.shape == saved.shape and live.dtype == saved.dtype:
                if owner is None:
                    with torch.no_grad():
                        live.copy_(saved)
                    continue
            elif owner is None and name in state["of_modules"]:
                raise ValueError(
                    f"parameter '{name}' of shape {tuple(saved.shape)} belongs to a module that is "
                    f"not among the parts, and the store does not know one of this shape: pass the "
                    f"module to save_checkpoint and load_checkpoint too, or call the model and the "
                    f"guide once before loading"
                )
            # A module's next call puts its own tensor there.
            if live is not None and live is not owner:
                del self._store[name]
            if owner is None:
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
