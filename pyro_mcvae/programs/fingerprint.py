"""What a run of model and guide executes, as one number."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral
from types import FrameType
from typing import Any, NamedTuple

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Distribution, Transform
from torch.overrides import TorchFunctionMode

from pyro_mcvae.ops.compat import is_mapped, state_of
from pyro_mcvae.ops.tensors import tensors_in
from pyro_mcvae.programs.distributions import may_cache
from pyro_mcvae.programs.outside_values import is_plain, is_written
from pyro_mcvae.programs.source_lines import in_assertion, is_core
from pyro_mcvae.programs.types import Message, TorchFunction

# Functions that return a tensor's value, or a size that depends on it, to Python.
_READS = {
    *("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
    *("tolist", "numpy", "__array__", "equal", "allclose", "is_nonzero"),
    *("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select"),
}
# Functions whose numbers are values, such as the coefficient of a schedule, and move nothing.
_POINTWISE = {
    *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "subtract", "multiply"),
    *("radd", "rsub", "rmul", "rdiv", "rtruediv", "rfloordiv", "rmod", "rpow", "iadd", "isub"),
    *("imul", "idiv", "itruediv", "ipow", "divide", "true_divide", "floor_divide", "remainder"),
    *("fmod", "float_power", "lt", "le", "gt", "ge", "eq", "ne", "less", "greater", "clamp"),
    *("clip", "clamp_min", "clamp_max", "fill", "full_like", "new_full", "where", "masked_fill"),
    *("expand", "broadcast_to"),  # their sizes are those of plates and particles
}
# Functions with index tensors: in brackets, and along a dim.
_INDEXED = {"getitem", "setitem", "index_put"}
_ALONG = {
    *("gather", "scatter", "scatter_add", "scatter_reduce", "take_along_dim", "index_select"),
    *("index_add", "index_copy", "index_fill", "index_reduce", "repeat_interleave"),
}
_MASKS = (torch.bool, torch.uint8)
# PyTorch's Python functions around an operator.
_AROUND = ("overrides.py", "_tensor.py", "functional.py")


class _Operation(NamedTuple):
    """
    One operation; tensors have numbers in the order in which they are met.

    :ivar what: the function, or the distribution of a site, and the positions that it reads.
    :ivar decides: whether Python reads the value.
    :ivar in_place: for each index tensor, its number, and whether all entries stay in place.
    """

    what: tuple[object, ...]
    inputs: list[int]
    outputs: list[int]
    decides: bool = False
    in_place: Sequence[tuple[int, Tensor]] = ()


# The fingerprint of the run that is being executed, if any.
_active: list[Fingerprint] = []


def observer() -> Fingerprint | None:
    """Return the innermost handler of a program whose fingerprint is taken, unless it runs."""
    return _active[-1] if _active and not _active[-1].is_entered else None


class Fingerprint(Messenger):
    """
    The operations that model and guide execute on values that depend on draws.

    A fingerprint has the sites, the operators between them, the tensors that each of them takes,
    and the positions that it moves. For each index tensor it has whether all entries stay in place.
    It has no other numbers, because the coefficient of a schedule or the row of a data set may
    change at each step. It ends where Python reads a value that depends on a draw: an analysis
    treats everything after that as depending on the draw.

    :ivar reads: whether Python reads values of other tensors, or operators have index tensors,
        whose values may change unnoticed.
    :ivar in_place: for each index tensor in the fingerprint, whether all entries stay in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.is_entered = self._has_run = False
        self.in_place: list[Tensor] = []
        self._mode = _Operators(self)
        self._operations: list[_Operation] = []
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._outside: list[Tensor] = []  # number -1 - i, for tensors that no operation returned
        self._constants: set[int] = set()
        self._draws: set[int] = set()
        self._count = 0
        self._handling = 0

    @contextmanager
    def of_run(self) -> Iterator[Fingerprint]:
        """Return a context for one run of both programs."""
        _active.append(self)
        try:
            yield self
        finally:
            _active.pop()

    def value(self, constants: Iterable[object]) -> int:
        """Return the fingerprint of the run; the constants are as in :meth:`finish`."""
        trail = self.finish(constants)
        return hash((*trail, *self.positions()))

    def finish(self, constants: Iterable[object]) -> list[object]:
        """
        Return the operations on values that depend on draws, and keep what these move.

        :param constants: arguments and everything that the programs read, which depends on no draw.
        """
        # Without it, all programs would have the same empty fingerprint.
        assert self._has_run, "the programs ran without the observer of their operations"
        known = self._constants.union(map(id, constants))
        fixed = {-1 - i for i, tensor in enumerate(self._outside) if id(tensor) in known}
        drawn = {-1 - i for i, tensor in enumerate(self._outside) if id(tensor) in self._draws}
        trail: list[object] = []
        for what, inputs, outputs, decides, in_place in self._operations:
            if not drawn.isdisjoint(inputs):
                drawn.update(outputs)
                if decides:
                    break
            self.reads |= decides
            if inputs == [n for n in inputs if n in fixed] and what[0] != "site":
                fixed.update(outputs)
            elif not decides:
                trail.append((what, *(None if n in fixed else n for n in inputs)))
                self.in_place += [t for number, t in in_place if number not in drawn]
        self.reads |= bool(self.in_place)
        return trail

    def positions(self) -> list[bool]:
        """Return, for each index tensor, whether all entries stay in place."""
        return torch.stack(self.in_place).tolist() if self.in_place else []

    def __enter__(self) -> Fingerprint:
        super().__enter__()
        self._mode.__enter__()
        self.is_entered = self._has_run = True
        return self

    def __exit__(self, *error: Any) -> None:
        self.is_entered = False
        self._mode.__exit__(*error)
        super().__exit__(*error)

    def _process_message(self, msg: Message) -> None:
        # This handler is the innermost one: outer ones have not yet expanded the distribution.
        if msg["type"] == "sample" and isinstance(msg["fn"], Distribution):
            about: list[object] = ["site"]  # names may be those of a minibatch
            observed = msg["value"] if msg["is_observed"] else ()
            tensors = _describe(msg["fn"], about) + tensors_in(observed)
            self._operations.append(_Operation(tuple(about), self._numbers_of(tensors), []))
        self._handling += 1

    def _postprocess_message(self, msg: Message) -> None:
        self._handling -= 1
        if msg["type"] == "param":
            self._constants.update(id(t) for t in tensors_in(msg["value"]))
            self._outside += tensors_in(msg["value"])
            return
        if not msg["is_observed"] and isinstance(msg["fn"], Distribution):  # not a minibatch
            self._draws.update(id(t) for t in tensors_in(msg["value"]))
        fn, value = msg["fn"], msg["value"]
        # The operations of a user's density are those of the program; a flow's were in its draw.
        if is_written(type(fn)) and isinstance(value, Tensor) and not may_cache(fn):
            with suppress(NotImplementedError):
                fn.log_prob(value)

    def add(self, func: TorchFunction, args: Any, result: Any, caller: FrameType) -> None:
        """Add an operation of the program."""
        if self._handling:
            return
        name = getattr(func, "__name__", "")
        tensors = tensors_in(args)
        inputs = self._numbers_of(tensors)
        if name in _READS and _decides(caller):
            self._operations.append(_Operation((func,), inputs, [], True))
        changed = tensors_in(args[0] if name == "__setitem__" else result)
        if changed:
            short = name.strip("_")
            positions = () if short in _POINTWISE else tuple(_positions(args))
            indices = _index_tensors(short, args)
            moves = [(self._number(i), _in_place(p, dim)) for i, p, dim in indices]
            outputs = [self._number(t, new=True) for t in changed]
            self._operations.append(_Operation((func, *positions), inputs, outputs, False, moves))

    def _numbers_of(self, tensors: list[Tensor]) -> list[int]:
        return [self._number(t) for t in tensors]

    def _number(self, tensor: Tensor, new: bool = False) -> int:
        known = self._numbers.get(id(tensor))
        if not new and known is not None and known[0]() is tensor:
            return known[1]
        if new:
            self._count += 1
            number = self._count
        else:
            self._outside.append(tensor)
            number = -len(self._outside)
        self._numbers[id(tensor)] = weakref.ref(tensor), number
        return number


class _Operators(TorchFunctionMode):
    """Passes every operation to a fingerprint."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        super().__init__()
        self._fingerprint = fingerprint

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self._fingerprint.add(func, (*args, kwargs or {}), result, sys._getframe(1))
        return result


def _decides(frame: FrameType | None) -> bool:
    """Return whether the program reads a value, and not PyTorch, Pyro or an assertion."""
    while frame is not None and frame.f_code.co_filename.endswith(_AROUND):
        if not is_core(frame.f_code):
            break
        frame = frame.f_back
    return frame is not None and not is_core(frame.f_code) and not in_assertion(frame)


def _positions(value: Any) -> Iterator[object]:
    """Yield the dims, sizes, indices and options of an operation."""
    if isinstance(value, list | tuple):
        yield len(value)
        for part in value:
            yield from _positions(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _positions(part)
    elif isinstance(value, slice):
        yield from _positions((value.start, value.stop, value.step))
    elif isinstance(value, Integral | str | torch.dtype | type(None) | type(...)):
        yield value


def _index_tensors(name: str, args: tuple[Any, ...]) -> Iterator[tuple[Tensor, Tensor, int]]:
    """
    Yield the index tensors with a dim that has as many positions as the indexed dim has entries.

    Others change the size of the result, and with it the shapes of the run.

    :returns: each with its positions, and the dim along which these are compared with those of the
        entries.
    """
    *given, options = args
    values = [options["input"], *given] if "input" in options else given
    values += [value for key, value in options.items() if key != "input"]
    source, *others = values
    if not isinstance(source, Tensor):
        return
    if name in _INDEXED:
        index = others[0] if isinstance(others[0], tuple) else (others[0],)
        taken = [_dims_of(part) for part in index]
        for i, part in enumerate(index):
            after_all = any(p is ... for p in index[:i])
            dim = -sum(taken[i:]) if after_all else sum(taken[:i])
            if _are_positions(part):
                yield from _dims_for(part, source.shape[dim])
    elif name in ("embedding", "take"):
        for part, table in (values[:2], values[1::-1]):
            if _are_positions(part):
                yield from _dims_for(part, table.numel() if name == "take" else len(table))
    elif name in _ALONG:
        dim = int(next((v for v in others if isinstance(v, Integral)), 0))
        for part in filter(_are_positions, others):
            if name == "repeat_interleave":
                yield part, part.cumsum(0) - 1, 0
            elif part.dim() == 1:
                yield part, part, 0
            elif part.shape[dim] == source.shape[dim]:
                yield part, part, dim


def _dims_for(index: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield an index tensor with each of its dims that has this size."""
    if index.numel() == size > 1:
        yield index, index.reshape(-1), 0
    elif size > 1:  # as neighbors of each entry
        yield from ((index, index, i) for i, n in enumerate(index.shape) if n == size)


def _dims_of(part: object) -> int:
    """Return the number of dims that a part of an index takes; 0 for an ellipsis."""
    if isinstance(part, Tensor) and part.dtype in _MASKS:
        return part.dim()
    return int(part is not None and part is not ...)


def _are_positions(part: object) -> bool:
    if not isinstance(part, Tensor) or is_mapped(part) or not part.dim():
        return False
    return not (part.is_floating_point() or part.is_complex() or part.dtype in _MASKS)


def _in_place(positions: Tensor, dim: int) -> Tensor:
    """Return whether the positions along a dim count up from 0, so that entries stay in place."""
    size = positions.shape[dim]
    entries = torch.arange(size, device=positions.device)
    entries = entries.reshape(-1, *[1] * (positions.dim() - 1 - dim % positions.dim()))
    return (positions == entries).all()


def _describe(part: Any, about: list[object]) -> list[Tensor]:
    """Return the parameters of a distribution, and add its types and options to ``about``."""
    if isinstance(part, list | tuple):
        return [tensor for item in part for tensor in _describe(item, about)]
    if isinstance(part, Tensor):
        return [part]
    if not isinstance(part, Distribution | Transform):
        return []
    about.append(type(part))
    tensors: list[Tensor] = []
    is_own = is_written(type(part))
    parameters = _parameters(part)
    for name, value in sorted(state_of(part).items()):
        # A distribution may compute the tensors of other attributes at their first use.
        is_lazy = isinstance(part, Distribution) and name not in parameters
        if is_own or not (is_lazy and isinstance(value, Tensor)):
            about.append(name)
            tensors += _describe(value, about)
        if is_own and is_plain(value) and not isinstance(value, float):
            about.append(value)
    return tensors


def _parameters(part: Distribution | Transform) -> Collection[str]:
    """Return the names of a distribution's parameters, which a user's class may not declare."""
    try:
        return part.arg_constraints if isinstance(part, Distribution) else ()
    except NotImplementedError:
        return ()
