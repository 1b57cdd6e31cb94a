"""Values of tensors that PyTorch's operations read by themselves while a step is recorded."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_mcvae.compiled.refusal import NotRecordable
from pyro_mcvae.ops.recording import assume
from pyro_mcvae.programs.source_lines import program_line

__all__ = ["HostReads"]

_aten = torch.ops.aten
_TRUTH_VALUES = (torch.bool, torch.uint8)


class HostReads(TorchDispatchMode):
    """
    Watches for values that no function of Python asks for: ``torch.full(shape, buffer)`` and
    ``table[buffer]`` read the buffer, and the shape of ``torch.where(mask)`` depends on the mask.

    A value that the step computes is refused, and so is a shape. Of a tensor that is held, as a
    buffer is, it is assumed that it stays: every replay checks it.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if get_proxy_mode() is None:
            return func(*args, **(kwargs or {}))
        if torch.Tag.dynamic_output_shape in func.tags and not _picks_by_numbers(func, args):
            name = func.overloadpacket.__name__
            _refuse(f"has a shape that depends on values ({name})")
        if func is not _aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        try:
            value = func(*args)
        except RuntimeError:
            _refuse("reads a tensor's value")
        if value != value:
            _refuse("reads a tensor's value, which is not a number,")
        assume(torch.eq(args[0], value))
        return value


def _picks_by_numbers(func: object, args: tuple[Any, ...]) -> bool:
    if func is not _aten.index.Tensor:
        return False
    return not any(isinstance(i, Tensor) and i.dtype in _TRUTH_VALUES for i in args[1])


def _refuse(why: str) -> NoReturn:
    raise NotRecordable(f"{why} at {program_line()}")
