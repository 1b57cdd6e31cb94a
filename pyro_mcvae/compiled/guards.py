"""Reject steps that replays would not repeat, and check the assumptions of a recording."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NoReturn

import torch
from pyro.poutine.subsample_messenger import SubsampleMessenger
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_mcvae.compiled.tracer import is_recorded, unrecorded, unsupported_op
from pyro_mcvae.ops.compat import HANDLERS, tree_leaves, tree_map_only, without_torch_function
from pyro_mcvae.ops.slots import one_hot
from pyro_mcvae.ops.tensors import add_guard
from pyro_mcvae.programs.messengers import Recorder, is_param_tracer
from pyro_mcvae.programs.source_lines import is_library
from pyro_mcvae.programs.types import TorchFunction

Function = Callable[..., object]
_TORCH = os.path.dirname(inspect.getfile(torch)) + os.sep


# Numbers that a loss reads from tensors -----------------------------------------------------------


class Reading(float):
    """
    The result of ``tensor.item()`` in a recorded loss: a number with its tensor.

    Sums and multiples of it are recorded. A branch on its value raises an error, except for a check
    for NaN, which only the recorded step makes.
    """

    tensor: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Reading:
        """Read a tensor."""
        with without_torch_function(), unrecorded():
            reading = cls(tensor.detach().item())
        # A Python number has double precision.
        reading.tensor = tensor.detach().double() if tensor.dtype.is_floating_point else tensor
        return reading

    def __neg__(self) -> Reading:
        return Reading.of(-self.tensor)

    def __eq__(self, other: object) -> bool:
        if other is not self:
            _decides(self)
        return float.__eq__(self, self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


def _decides(*_: object) -> NoReturn:
    unsupported_op("decides by a tensor's value")


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
    setattr(Reading, f"__{_name}__", _decides)


# Conversions of tensors to Python values ----------------------------------------------------------

# With only floats as arguments these return a float.
_ARITHMETIC = {
    *("add", "radd", "sub", "rsub", "mul", "rmul", "div", "rdiv", "truediv", "rtruediv"),
    *("true_divide", "pow", "rpow", "neg", "abs"),
}
_COMPARISONS: dict[object, Callable[..., Tensor]] = {
    **dict.fromkeys((torch.equal, Tensor.equal), torch.eq),
    **dict.fromkeys((torch.allclose, Tensor.allclose), torch.isclose),
}
# These read memory without an operation.
_UNRECORDED = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_SPLITS = (torch.tensor_split, Tensor.tensor_split)


class ReadingMode(TorchFunctionMode):
    """
    Detects numbers that Python reads from tensors in a step that is being recorded.

    :param backward: replaces ``loss.backward()``, with its arguments.
    :param numbers: tensors that represent floats; combined with a tensor they take its type.
    """

    def __init__(self, backward: Callable[..., None], numbers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._backward = backward
        self._numbers = {id(number): number for number in numbers}

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if func is Tensor.register_hook:
            return func(args[0], self._watched(args[1]))
        if func is Tensor.item:
            caller = sys._getframe(1)
            if _stays(caller.f_code, caller.f_locals.get("self")):
                return _fixed(args[0])
            if not _in_a_program():
                return Reading.of(args[0])
        if func is Tensor.__bool__ and is_library(sys._getframe(1).f_code):
            return _fixed(args[0].bool())
        if func in _COMPARISONS and is_library(sys._getframe(1).f_code):
            same = args[0].shape == args[1].shape
            return same and _fixed(_COMPARISONS[func](*args, **kwargs).all())
        if func is torch.nn.functional.one_hot:
            return _one_hot(*args, **kwargs)
        if func in _UNRECORDED:
            return _stored_values(func, *args, **kwargs)
        if func in _SPLITS and isinstance(args[1], Tensor):
            unsupported_op(f"reads a tensor's value (.{func.__name__})")
        if any(isinstance(a, Reading) for a in args):
            args = tree_map_only(Reading, lambda reading: reading.tensor, args)
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
            result = func(*args, **kwargs)
            assert isinstance(result, Tensor)
            self._numbers[id(result)] = result
            return result
        types = [torch.result_type(t, 0.5) for t in others] or [torch.get_default_dtype()]
        dtype = functools.reduce(torch.promote_types, types)

        def cast(t: Tensor) -> Tensor:
            return t.to(dtype) if id(t) in self._numbers else t

        args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        return func(*args, **kwargs)

    def _watched(self, hook: Function) -> Function:
        """Wrap a gradient hook, such as Pyro's warnings; the backward pass runs without modes."""

        def watched(gradient: Tensor) -> object:
            with self:
                return hook(gradient)

        return watched


def _fixed(value: Tensor) -> Any:
    """
    Return a value that a library reads for a branch or an index; every replay checks it.

    Decisions of the program itself raise an error, because they may differ in the next step.
    """
    with unrecorded():
        number = value.item()
    add_guard(value if number is True else value == number)
    return number


def _stored_values(read: TorchFunction, tensor: Tensor, *args: Any, **kwargs: Any) -> object:
    """Return all values of a tensor, if it is not computed in the step; every replay checks it."""
    with unrecorded():
        known, values = tensor.detach().clone(), read(tensor, *args, **kwargs)
        comparable = not bool((known != known).any())
    if is_recorded(tensor) or not comparable:
        unsupported_op(f"reads a tensor's value (.{read.__name__})")
    add_guard((tensor == known).all())
    return values


def _stays(code: CodeType, caller: object) -> bool:
    """
    Return whether a number that is read cannot change: it compares transforms in PyTorch, or is an
    index of a loop over a plate without a minibatch.
    """
    whole = isinstance(caller, SubsampleMessenger) and caller.subsample_size == caller.size
    return whole or code.co_filename.startswith(_TORCH)


def _in_a_program() -> bool:
    return any(
        isinstance(h, Recorder) or (isinstance(h, TraceMessenger) and not is_param_tracer(h))
        for h in HANDLERS
    )


def _one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """
    Compute ``one_hot``; PyTorch's function reads the categories to reject those out of range.

    Every replay checks that there are none. Otherwise the plain step runs and raises the error.
    """
    if num_classes < 0:
        unsupported_op("has a shape that depends on values (one_hot without num_classes)")
    add_guard(((input >= 0) & (input < num_classes)).all())
    return one_hot(input, num_classes).long()
