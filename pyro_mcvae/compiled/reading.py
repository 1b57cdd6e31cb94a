"""Numbers that a loss makes of tensors, while it is recorded."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.subsample_messenger import SubsampleMessenger
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_mcvae.compiled.refusal import NotRecordable
from pyro_mcvae.ops.gumbel import one_hot
from pyro_mcvae.ops.recording import assume
from pyro_mcvae.programs.messengers import Recorder, is_param_tracer
from pyro_mcvae.programs.source_lines import is_library, program_line
from pyro_mcvae.programs.types import TorchFunction

__all__ = ["Reading", "ReadingMode"]

Function = Callable[..., object]
_TORCH = os.path.dirname(torch.__file__) + os.sep


class Reading(float):
    """
    What ``tensor.item()`` returns in a recorded loss: a number that knows its tensor.

    Sums and multiples of it are recorded; a decision by its value is refused, but for the question
    whether it is NaN, which is asked of the recorded step alone.
    """

    tensor: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Reading:
        with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing():
            found = cls(tensor.detach().item())
        # A Python number has double precision.
        found.tensor = tensor.detach().double() if tensor.dtype.is_floating_point else tensor
        return found

    def __neg__(self) -> Reading:
        return Reading.of(-self.tensor)

    def __eq__(self, other: object) -> bool:
        return _same(self, other)

    def __ne__(self, other: object) -> bool:
        return not _same(self, other)

    __hash__ = None  # type: ignore[assignment]


def _same(number: Reading, other: object) -> bool:
    if other is not number:
        _refuse_comparison(number)
    return float.__eq__(number, number)


def _refuse_comparison(*_: object) -> object:
    raise NotRecordable(f"decides by a tensor's value at {program_line()}")


def _arithmetic(name: str) -> Function:
    def combine(self: Reading, other: object) -> object:
        if isinstance(other, Tensor):
            return NotImplemented
        other = other.tensor if isinstance(other, Reading) else other
        return Reading.of(getattr(self.tensor, name)(other))

    return combine


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow"):
    setattr(Reading, f"__{_name}__", _arithmetic(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "bool", "int", "float", "trunc", "floor", "ceil", "round"):
    setattr(Reading, f"__{_name}__", _refuse_comparison)


class ReadingMode(TorchFunctionMode):
    """
    Watches a step that is being recorded for tensors whose values it looks at.

    :param backward: what ``loss.backward()`` does, with its arguments.
    :param numbers: tensors that stand for floats: beside a tensor they take its type, as floats do.
    """

    def __init__(self, backward: Callable[..., None], numbers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._backward = backward
        self._numbers = {id(number): number for number in numbers}
        self.refused: NotRecordable | None = None

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is Tensor.backward:
            return self._backward(*args, **(kwargs or {}))
        if func is Tensor.register_hook:
            return func(args[0], self._watched(args[1]))
        if func is Tensor.item and _is_of_torch(sys._getframe(1).f_code):
            return _index(args[0])
        if func is Tensor.item and not _in_a_program():
            return Reading.of(args[0])
        if func is Tensor.item and _is_whole_plate(sys._getframe(1).f_locals.get("self")):
            return _index(args[0])
        if func is Tensor.__bool__ and is_library(sys._getframe(1).f_code):
            return _branch(args[0])
        if func in _COMPARISONS and is_library(sys._getframe(1).f_code):
            return _compared(_COMPARISONS[func], *args, **(kwargs or {}))
        if func is torch.nn.functional.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        drawn = _OWN_GENERATOR if (kwargs or {}).get("generator") is not None else ""
        if drawn or func in _READS or (func in _PICKS and _picks_by_value(func, args)):
            why = drawn or _READS.get(func) or _PICKS[func]
            self.refused = NotRecordable(f"{why} at {program_line()}")
            raise self.refused
        args, kwargs = _as_tensors(args), kwargs or {}
        return self._with_numbers(func, args, kwargs) if self._numbers else func(*args, **kwargs)

    def _with_numbers(
        self, func: TorchFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        others = [t for t in tensors if id(t) not in self._numbers]
        if len(others) == len(tensors):
            return func(*args, **kwargs)
        if func is Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return torch.get_default_dtype()
        if not others and getattr(func, "__name__", "").strip("_") in _ARITHMETIC:
            found = func(*args, **kwargs)
            assert isinstance(found, Tensor)
            self._numbers[id(found)] = found
            return found
        types = [torch.result_type(t, 0.5) for t in others] or [torch.get_default_dtype()]
        dtype = functools.reduce(torch.promote_types, types)

        def cast(t: Tensor) -> Tensor:
            return t.to(dtype) if id(t) in self._numbers else t

        args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        return func(*args, **kwargs)

    def _watched(self, hook: Function) -> Function:
        """A hook on gradients, such as Pyro's warnings; the backward pass runs without modes."""

        def watched(gradient: Tensor) -> object:
            with self:
                return hook(gradient)

        return watched


def _branch(condition: Tensor) -> bool:
    """
    Which way a library takes, which Pyro asks of masks: every replay checks that it is the same.

    A program's own decisions are refused: they are other ones at the next step.
    """
    with disable_proxy_modes_tracing():
        way = bool(condition)
    assume(condition.bool() if way else ~condition.bool())
    return way


def _is_of_torch(code: CodeType) -> bool:
    """Whether PyTorch itself asks for a number: if two transforms are equal, for a closed form."""
    return code.co_filename.startswith(_TORCH)


def _is_whole_plate(caller: object) -> bool:
    """Whether a plate that has no minibatch is looped over: its indices are always the same."""
    return isinstance(caller, SubsampleMessenger) and caller.subsample_size == caller.size


def _index(index: Tensor) -> int | float:
    """A number that stays, as an element of a plate that is looped over: every replay checks it."""
    with disable_proxy_modes_tracing():
        found: int | float = index.item()
    assume(index == found)
    return found


def _compared(
    same: Callable[..., Tensor], first: Tensor, second: Tensor, **options: object
) -> bool:
    """Whether two tensors are the same, which a library asks: a branch as any other."""
    if first.shape != second.shape:
        return False
    return _branch(same(first, second, **options).all())


def _one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """
    As PyTorch's, which reads the categories to refuse those out of range.

    Every replay checks that there are none; if there are, the plain step is taken, and refuses.
    """
    if num_classes < 0:
        raise NotRecordable(f"{_BY_NUMBER} at {program_line()}")
    assume(((input >= 0) & (input < num_classes)).all())
    return one_hot(input, num_classes).long()


def _in_a_program() -> bool:
    return any(
        isinstance(h, Recorder) or (isinstance(h, TraceMessenger) and not is_param_tracer(h))
        for h in _PYRO_STACK
    )


def _as_tensors(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(isinstance(a, Reading) for a in args):
        found: tuple[Any, ...] = tree_map_only(Reading, lambda reading: reading.tensor, args)
        return found
    return args


def _picks_by_value(func: object, args: tuple[Any, ...]) -> bool:
    index = args[1] if len(args) > 1 else None
    if func is not Tensor.__getitem__:
        return isinstance(index, Tensor)
    parts = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(p, Tensor) and p.dtype in (torch.bool, torch.uint8) for p in parts)


# Of floats alone these make a float.
_ARITHMETIC = {
    *("add", "radd", "sub", "rsub", "mul", "rmul", "div", "rdiv", "truediv", "rtruediv"),
    *("true_divide", "pow", "rpow", "neg", "abs"),
}
_OWN_GENERATOR = "draws from a generator of its own, which comparisons would turn on,"
_BY_VALUE = "indexes by truth values, so that shapes depend on a tensor's value,"
_BY_NUMBER = "has a shape that depends on values (one_hot without num_classes)"
_SPLITS = "splits where a tensor says, so that shapes depend on its value,"
_PICKS: dict[object, str] = {
    Tensor.__getitem__: _BY_VALUE,
    torch.tensor_split: _SPLITS,
    Tensor.tensor_split: _SPLITS,
}
_COMPARISONS: dict[object, Callable[..., Tensor]] = {
    torch.equal: torch.eq,
    Tensor.equal: torch.eq,
    torch.allclose: torch.isclose,
    Tensor.allclose: torch.isclose,
}
_READ = "reads a tensor's value"
_READS: dict[object, str] = {
    Tensor.item: f"{_READ} (.item())",
    Tensor.tolist: f"{_READ} (.tolist())",
    Tensor.numpy: f"{_READ} (.numpy())",
    Tensor.__array__: f"{_READ} (as a NumPy array)",
    Tensor.__bool__: f"{_READ} (as a truth value)",
    Tensor.__int__: f"{_READ} (as an int)",
    Tensor.__float__: f"{_READ} (as a float)",
    Tensor.__index__: f"{_READ} (as an index)",
    Tensor.is_nonzero: f"{_READ} (as a truth value)",
    torch.is_nonzero: f"{_READ} (as a truth value)",
    **dict.fromkeys(_COMPARISONS, f"{_READ} (in a comparison)"),
    Tensor.nonzero: "has a shape that depends on values (nonzero)",
    torch.nonzero: "has a shape that depends on values (nonzero)",
    Tensor.masked_select: "has a shape that depends on values (masked_select)",
    torch.masked_select: "has a shape that depends on values (masked_select)",
    torch.unique: "has a shape that depends on values (unique)",
    Tensor.unique: "has a shape that depends on values (unique)",
}
