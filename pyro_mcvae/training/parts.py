"""The parts of a training run: what each saves, checks, loads, and takes back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TypeAlias, cast

import torch
from pyro.infer import SVI
from pyro.infer.elbo import ELBO, ELBOModule
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyro_mcvae.compiled.elbo import CompiledELBO
from pyro_mcvae.ops.ranks import num_ranks, rank
from pyro_mcvae.training.store import Part, PyroOptimPart, Saved, Undo
from pyro_mcvae.truncated.closed_form import ClosedForm

Spaces: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]


def as_parts(parts: Mapping[str, object]) -> dict[str, Part]:
    """
    Parts by name; an :class:`~pyro.infer.SVI` is several.

    :raises ValueError: naming a part that has no state.
    """
    if not isinstance(parts, Mapping):
        raise ValueError(
            f"parts must be a dict of what changes in training, by name, such as {{'svi': svi}}, "
            f"after the path, got {type(parts).__name__}"
        )
    # Modules first: optimizers' states refer to parameters, and the parameter store to modules.
    found = [(name, _as_part(name, value)) for name, value in _flatten(parts)]
    return dict(sorted(found, key=lambda item: not isinstance(item[1], ModulePart)))


def _flatten(parts: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in parts.items():
        if not isinstance(value, SVI):
            yield name, value
            continue
        yield f"{name}.optim", value.optim
        loss = getattr(value.loss, "__self__", value.loss)
        # How a loss is computed is not what it has learned.
        yield f"{name}.loss", loss.plain if isinstance(loss, CompiledELBO) else loss
        seen = None
        for program in ("model", "guide"):
            found = _module_of(getattr(value, program))
            if found is not None and found is not seen:
                yield f"{name}.{program}", found
            seen = found


def _module_of(program: object) -> nn.Module | None:
    """The module that a program is, or is a method of, also where it is wrapped."""
    while not isinstance(program, nn.Module):
        inside = ("func", "__wrapped__", "__self__")  # partial, wraps, a bound method
        found = next((f for n in inside if (f := getattr(program, n, None)) is not None), None)
        if found is None or isinstance(found, ModuleType):  # a builtin's __self__
            return None
        program = found
    return program


def _as_part(name: str, value: object) -> Part:
    if isinstance(value, nn.Module):
        return ModulePart(value)
    if isinstance(value, PyroOptim):
        return PyroOptimPart(value)
    if isinstance(value, ClosedForm):
        return _ClosedFormPart(value)
    for save, load in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if callable(getattr(value, save, None)) and callable(getattr(value, load, None)):
            return _ObjectPart(value, getattr(value, save), getattr(value, load))
    if isinstance(value, ELBO) or name.endswith(".loss"):
        return _ObjectPart(value, lambda: None, lambda _: None)  # without parts of its own
    raise ValueError(
        f"part '{name}' ({type(value).__name__}) has neither state_dict and load_state_dict nor "
        f"get_state and set_state: leave it out, or pass a value by keyword, "
        f"save_checkpoint(path, parts, {name}=...)"
    )


def _kind(value: object) -> str:
    if isinstance(value, ELBOModule):
        return f"ELBOModule({_kind(value.elbo)})"
    return type(value).__name__


class ModulePart(Part):
    """A module, whose tensors are overwritten in place."""

    def __init__(self, module: nn.Module) -> None:
        # The wrapper belongs to the number of processes, not to what was learned.
        wrapped = isinstance(module, DistributedDataParallel)
        self.module = cast("nn.Module", module.module if wrapped else module)
        self.kind = _kind(self.module)

    def save(self) -> dict[str, Saved]:
        return self.module.state_dict()

    def load(self, state: Mapping[str, Saved]) -> None:
        for path, module in self.module.named_modules():
            prefix = f"{path}." if path else ""
            own = [prefix + name for name, b in module._buffers.items() if b is not None]
            if hasattr(module, "forget") and any(name not in state for name in own):
                module.forget()  # saved before its first call
        try:
            self.module.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(
                f"{error} (a module that makes its parameters at its first call, such as an "
                f"AutoGuide, must have been called once before)"
            ) from error

    def undo(self) -> Undo:
        kept = [
            (held, dict(held), {n: t.detach().clone() for n, t in held.items() if t is not None})
            for module in self.module.modules()
            for held in cast("Spaces", (module._parameters, module._buffers))
        ]

        def restore() -> None:
            with torch.no_grad():
                for held, before, values in kept:
                    held.clear()
                    held.update(before)
                    for name, value in values.items():
                        held[name].copy_(value)

        return restore


class _ObjectPart(Part):
    """Anything with a pair of methods: optimizers, schedules, generators, statistics."""

    def __init__(
        self, value: object, get: Callable[[], Saved], set_: Callable[[Saved], object]
    ) -> None:
        self.kind = _kind(value)
        self.by_rank = isinstance(value, torch.Generator)
        self._get, self._set = get, set_

    def save(self) -> Saved:
        return self._get()

    def load(self, state: Saved) -> None:
        # Some keep what they are given, and change it later.
        self._set(copy.deepcopy(state))

    def undo(self) -> Undo:
        before = copy.deepcopy(self._get())
        return lambda: self._set(before)


class _ClosedFormPart(_ObjectPart):
    """Statistics of an epoch, which ranks have gathered apart."""

    def __init__(self, value: ClosedForm) -> None:
        super().__init__(value, value.state_dict, value.load_state_dict)
        self._value = value

    def save(self) -> Saved:
        state = super().save()
        if num_ranks() > 1:
            state["total"], state["count"] = self._value.over_ranks()
        return state

    def load(self, state: Saved) -> None:
        # They are summed over ranks again when they are used.
        super().load(state if rank() == 0 else {**state, "total": 0.0, "count": 0.0})
