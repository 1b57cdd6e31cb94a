"""Record the operations of a function as a graph."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.fx import Graph, Node

from pyro_mcvae.ops.compat import READ_NUMBER, TorchDispatchMode, schema_of
from pyro_mcvae.ops.tensors import add_guard
from pyro_mcvae.programs.source_lines import program_line

_aten = torch.ops.aten


class NotRecordable(BaseException):
    """
    A step has an effect that a recording cannot repeat.

    It is not an ``Exception``, because programs and their checks catch exceptions and continue.
    The values read until then would be recorded as constants.
    """


def said_by(error: BaseException) -> str:
    """Return an error in one line, with the line of the program that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    lines = str(error).strip().splitlines() or [""]
    at = f" at {program_line(trace.tb_frame)}" if trace is not None else ""
    return f"{type(error).__name__}: {lines[0]}{at}"


def unsupported_op(why: str) -> NoReturn:
    raise NotRecordable(f"{why} at {program_line()}")


# Recording ----------------------------------------------------------------------------------------


class TensorLayout(NamedTuple):
    """The shape, strides, dtype and device of a tensor in a graph."""

    shape: torch.Size
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Return the layout of a tensor; sparse tensors have no strides."""
        stride = tensor.stride() if tensor.layout is torch.strided else None
        return cls(tensor.shape, stride, tensor.dtype, tensor.device)


def trace(
    function: Callable[..., list[Tensor]], inputs: list[Tensor]
) -> tuple[Graph, list[Tensor]]:
    """
    Call a function, and record the operations that it computes.

    :returns: the graph ``(*constants, *inputs) -> outputs``, whose nodes have a ``layout``, and the
        constants: the tensors that the function reads and does not compute.
    """
    tracer, caches = _Tracer(inputs), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cast made before would be a constant
    _tracers.append(tracer)
    try:
        with tracer:
            outputs = function(*inputs)
    finally:
        _tracers.pop()
        torch.set_autocast_cache_enabled(caches)
    tracer.graph.output(tuple(tracer.argument(outputs)))
    return tracer.graph, tracer.constants


def is_recorded(tensor: Tensor) -> bool:
    """Return whether a tensor is computed by the function that is being recorded."""
    return bool(_tracers) and _tracers[-1].result_of(tensor) is not None


@contextmanager
def unrecorded() -> Iterator[None]:
    """Compute without recording."""
    stopped = [tracer for tracer in _tracers if not tracer.paused]
    for tracer in stopped:
        tracer.paused = True
    try:
        yield
    finally:
        for tracer in stopped:
            tracer.paused = False


# The recordings that are being made, the innermost last.
_tracers: list[_Tracer] = []


class _Tracer(TorchDispatchMode):
    """
    Makes each operation a node of a graph, and detects values that the host reads, in any function:
    ``torch.full(shape, buffer)`` and ``table[buffer]`` read the buffer, and the shape of
    ``torch.where(mask)`` depends on the mask.

    Reading a computed value or shape raises an error. What is computed from stored tensors alone,
    such as buffers, may be read; every replay checks that it has not changed.

    PyTorch's ``make_fx`` records the same operations, and takes five times as long.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.graph, self.paused = Graph(), False
        self.constants: list[Tensor] = []
        self._constant_nodes: dict[int, Node] = {}
        # Results by the identity of their tensor, which may end while the function runs.
        self._results: dict[int, tuple[weakref.ref[Tensor], Node]] = {}
        for i, tensor in enumerate(inputs):
            self._add_result(tensor, self.graph.placeholder(f"input_{i}"))

    def result_of(self, tensor: Tensor) -> Node | None:
        """Return the node that computes a tensor, if any."""
        known = self._results.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def argument(self, value: Any) -> Any:
        """Return an argument of a node, with nodes instead of tensors."""
        if isinstance(value, Tensor):
            return self.result_of(value) or self._constant(value)
        if isinstance(value, list | tuple):
            return [self.argument(v) for v in value]
        return value

    def _constant(self, tensor: Tensor) -> Node:
        if (node := self._constant_nodes.get(id(tensor))) is None:
            last = next(reversed(self._constant_nodes.values()), None)
            with self.graph.inserting_after(last) if last else self.graph.inserting_before(None):
                node = self.graph.placeholder(f"constant_{len(self.constants)}")
            node.meta |= {"layout": TensorLayout.of(tensor), "stored": not tensor.requires_grad}
            self._constant_nodes[id(tensor)] = node
            self.constants.append(tensor)
        return node

    def _add_result(self, result: object, node: Node) -> None:
        if isinstance(result, Tensor):
            node.meta["layout"] = TensorLayout.of(result)
            self._results[id(result)] = weakref.ref(result), node
        elif isinstance(result, list | tuple):
            for i, part in enumerate(result):
                self._add_result(part, self.graph.call_function(operator.getitem, (node, i)))

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            return self._read(func, args, kwargs)
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            unsupported_op(
                f"draws from a generator of its own ({func.overloadpacket.__name__}), which "
                f"comparisons would turn on,"
            )
        if torch.Tag.dynamic_output_shape in func.tags:
            args = self._with_fixed_masks(func, args)
        if func is _aten.lift_fresh.default:
            func = _aten.lift_fresh_copy.default  # a program may write to the tensor
        result = func(*args, **kwargs)
        named = {name: self.argument(value) for name, value in kwargs.items()}
        node = self.graph.call_function(func, tuple(self.argument(args)), named)
        self._add_result(result, node)
        return result

    def _with_fixed_masks(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of an index with numbers instead of masks that never change."""
        value, indices = args if func is _aten.index.Tensor else (None, [])
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        fixed = (m.dim() > 0 and _is_fixed(self.result_of(m), stored=False) for m in masks)
        if value is None or not all(fixed):
            name = func.overloadpacket.__name__
            unsupported_op(f"has a shape that depends on values ({name})")
        numbers: list[Any] = []
        for i in indices:
            with unrecorded():
                numbers += i.nonzero().unbind(1) if any(i is m for m in masks) else [i]
        return value, numbers

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        nodes = [self.result_of(a) for a in args if isinstance(a, Tensor)]
        if func is not READ_NUMBER or not all(map(_is_fixed, nodes)):
            unsupported_op("reads a tensor's value")
        value = func(*args, **kwargs)
        if value != value:
            unsupported_op("reads a tensor's value")
        with self:
            add_guard(torch.eq(args[0], value))
        return value


def _is_fixed(node: Node | None, stored: bool = True) -> bool:
    """
    Return whether a tensor is computed from numbers in the code and stored tensors alone.

    :param stored: the answer for tensors that are stored.
    """
    if node is None or node.op == "placeholder":
        return stored and (node is None or node.meta.get("stored", False))
    if node.target is operator.getitem:
        return _is_fixed(node.all_input_nodes[0], stored) and not _is_written(node)
    if node.target is not _aten.lift_fresh_copy.default:
        schema, tags = schema_of(node.target), getattr(node.target, "tags", ())
        if schema is None or schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
            return False
        if not all(_is_fixed(n, stored) for n in node.all_input_nodes):
            return False
    return not _is_written(node)


def _is_written(node: Node) -> bool:
    """Return whether the memory of a result is written to later."""
    for user in node.users:
        if user.target is operator.getitem and _is_written(user):
            return True
        for alias, value in aliased_arguments(user):
            if (value is node or (isinstance(value, list) and node in value)) and (
                alias.is_write or _is_written(user)
            ):
                return True
    return False


def aliased_arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    """Yield the tensor arguments of a node that have alias information in its schema."""
    for i, name, alias in _aliased(node.target):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        if value is not None:
            yield alias, value


@cache
def _aliased(operation: Any) -> list[tuple[int, str, Any]]:
    """Return the index and name of each argument of an operation that has alias information."""
    schema = schema_of(operation)
    arguments = enumerate(schema.arguments if schema is not None else ())
    return [(i, a.name, a.alias_info) for i, a in arguments if a.alias_info is not None]
