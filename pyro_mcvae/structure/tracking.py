"""Draws that are marked, so that what was computed from them can be told."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pyro.ops.provenance import ProvenanceTensor, extract_provenance
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from pyro_mcvae.programs.types import Message, TorchFunction

_NONE: frozenset[str] = frozenset()


class _Marked(ProvenanceTensor):
    """Pyro's tensor, which takes each argument for a tree: most are tensors and numbers."""

    @classmethod
    def __torch_function__(
        cls,
        func: TorchFunction,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        inputs, marks = _parted(args)
        options, more = _parted(kwargs or {})
        result = func(*inputs, **options)
        if func is torch.broadcast_tensors:
            # As all distributions broadcast their parameters: each tells nothing of the others.
            parts = zip(result, map(marks_of, args), strict=True)
            return tuple(_mark(wide, own) if own else wide for wide, own in parts)
        return _mark(result, marks | more)


def _mark(value: Any, marks: frozenset[str]) -> Any:
    """A value whose tensors have these marks too."""
    if not isinstance(value, Tensor):
        return tree_map_only(Tensor, partial(_mark, marks=marks), value)
    bare, own = _parted(value)
    # Before torch 2.6, what a dispatch mode of the caller's returned is refused as a subclass.
    with torch._C._DisableTorchDispatch():
        return _Marked(bare, marks | own)


def _parted(value: Any) -> tuple[Any, frozenset[str]]:
    """A value without its marks, and these."""
    if isinstance(value, ProvenanceTensor):
        return value._t, value._provenance
    if type(value) in (tuple, list):
        parts = [_parted(v) for v in value]
        return type(value)([v for v, _ in parts]), _NONE.union(*[m for _, m in parts])
    if type(value) is dict:
        values, marks = _parted(tuple(value.values()))
        return dict(zip(value, values, strict=True)), marks
    if isinstance(value, tuple | list | dict | set | frozenset) and type(value) is not torch.Size:
        return extract_provenance(value)
    return value, _NONE


def marks_of(value: object) -> frozenset[str]:
    """The names of the marked draws behind a structure of tensors."""
    return _parted(value)[1]


def unmarked(value: Any) -> Any:
    """The same without marks."""
    return _parted(value)[0]


class TrackDraws(Messenger):
    """
    Marks the tracked draws of the guide, and records what each was computed from.

    :param given: the sites whose values were given, not drawn.
    """

    def __init__(self, tracked: frozenset[str], given: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.tracked = tracked
        self._given = given
        self.leaves: dict[str, Tensor] = {}
        self.name_of: dict[int, str] = {}
        self.upstream: dict[str, frozenset[str]] = {}

    def _pyro_post_sample(self, msg: Message) -> None:
        if msg["name"] not in self.tracked or msg["name"] in self.leaves:
            return
        drawn = msg["value"]
        if msg["name"] in self._given:
            # What it would have been computed from is what its density is computed from.
            drawn = msg["fn"].log_prob(msg["value"])
        self.upstream[msg["name"]] = marks_of(drawn)
        with torch._C.DisableTorchFunction():  # no longer in what earlier draws were written into
            leaf = unmarked(msg["value"]).detach().clone()
        # Two trackers, because each is blind somewhere: provenance in custom autograd functions,
        # autograd at discrete values.
        if leaf.is_floating_point():
            leaf.requires_grad_()
        self.leaves[msg["name"]] = leaf
        self.name_of[id(leaf)] = msg["name"]
        msg["value"] = _mark(leaf, frozenset({msg["name"]}))


def _as_function_and_method(*names: str) -> set[object]:
    return {getattr(module, name) for module in (torch, torch.Tensor) for name in names}


# Through these the values of a tensor become a Python number.
READS: frozenset[object] = frozenset(
    {
        torch.Tensor.__bool__,
        torch.Tensor.__complex__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.Tensor.__int__,
        torch.Tensor.item,
        torch.Tensor.tolist,
        *_as_function_and_method("allclose", "equal", "is_nonzero"),
    }
)
_SHAPED_BY_VALUES = (
    "argwhere",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique",
    "unique_consecutive",
)
# Through these a draw's value leaves the tensors that are tracked: as a Python number or a string,
# as a shape, or copied into a new tensor.
_WAYS_OUT: set[object] = {
    *READS,
    torch.Tensor.__array__,
    torch.Tensor.__contains__,
    torch.Tensor.__format__,
    torch.Tensor.numpy,
    torch.tensor,
    *_as_function_and_method(*_SHAPED_BY_VALUES),
}
_OPTIONS_ONLY: set[object] = {
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
    torch.Tensor.new_full,
    torch.Tensor.new_empty,
    torch.Tensor.new_tensor,
    *(getattr(torch, f"{kind}_like") for kind in ("zeros", "ones", "full", "empty")),
    *(getattr(torch, f"{kind}_like") for kind in ("rand", "randn")),
}
# The second argument only says the dtype and the device, or the shape.
_CONVERSIONS: set[object] = {
    torch.Tensor.type_as,
    torch.Tensor.to,
    torch.Tensor.expand_as,
    torch.Tensor.reshape_as,
    torch.Tensor.view_as,
}


def _selects(func: TorchFunction, args: tuple[object, ...]) -> bool:
    """Whether a boolean mask selects entries, whose number then tells of the mask."""
    if func in (torch.where, torch.Tensor.where):
        return len(args) == 1
    if func is not torch.Tensor.__getitem__:
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, Tensor) and unmarked(i).dtype is torch.bool for i in index)


class Escapes(TorchFunctionMode):
    """
    Records draws that become Python numbers, and marks tensors that draws are written into.

    :ivar names: the draws of which it is not known what became of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: frozenset[str] = frozenset()
        # By storage, which is kept alive so that no other tensor has its place.
        self._written: dict[int, tuple[Any, frozenset[str]]] = {}

    def _write(self, target: object, marks: frozenset[str]) -> None:
        if marks and isinstance(target, Tensor):
            storage = unmarked(target).untyped_storage()
            _, before = self._written.get(storage._cdata, (None, _NONE))
            self._written[storage._cdata] = storage, before | marks

    def _recalled(self, value: Tensor) -> Tensor:
        """A tensor with the marks of what was written into it, or into a view of it."""
        with torch._C.DisableTorchFunction():
            storage = unmarked(value).untyped_storage()
        found = self._written.get(storage._cdata)
        return value if found is None else _mark(value, found[1])

    def __torch_function__(
        self,
        func: TorchFunction,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if self._written:
            args, kwargs = tree_map_only(Tensor, self._recalled, (args, kwargs or {}))
        name = getattr(func, "__name__", "")
        if func in _WAYS_OUT or _selects(func, args):
            self.names |= marks_of([args, kwargs or {}])
        elif func is torch.Tensor.new_tensor:
            # As torch.tensor, but for the first argument, of which only the dtype is taken.
            self.names |= marks_of([args[1:], kwargs or {}])
        elif func is torch.Tensor.__setitem__ or (name[-1:] == "_" and name[-2:] != "__"):
            # Where there is no gradient, autograd does not record what is written into a tensor.
            self._write(args[0], marks_of([args[1:], kwargs or {}]))
        if func in _OPTIONS_ONLY:
            # The draw only says the dtype and the device.
            args = (unmarked(args[0]), *args[1:])
        elif func in _CONVERSIONS and len(args) > 1 and isinstance(args[1], Tensor):
            args = (args[0], unmarked(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))
