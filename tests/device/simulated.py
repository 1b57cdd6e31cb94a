"""
A device without hardware: tensors that say ``sim:0``, compute on the CPU, and refuse to meet CPU
tensors, as those of a GPU do. Each number that the host reads of them is recorded with its place.

Made of PyTorch's Python backend for ``PrivateUse1``, which is of torch 2.9 or later. Modules keep
the identity of their parameters when they move, as on CUDA.
"""

import contextlib
import traceback
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_mcvae.compiled import recording
from pyro_mcvae.ops import smoothing
from pyro_mcvae.programs import run

NAME = "sim"
AVAILABLE = hasattr(getattr(torch._C, "_acc", None), "register_python_privateuseone_hook")
CPU = torch.device("cpu")

# Operators whose result the host needs before it can go on: a number, or a size that depends on
# values.
_READS = {
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "histc",
    "repeat_interleave",
}
# Operators that take CPU tensors of any shape beside those of a device.
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_MASKED = _INDEXED | {"_unsafe_index_put"}


class Reads(list):
    """What the host read: for each read the operator and the lines of the package behind it."""

    @property
    def by_line(self) -> dict[str, int]:
        return {line: self.count(line) for line in dict.fromkeys(self)}


_open: list[Reads] = []


@contextlib.contextmanager
def host_reads() -> Iterator[Reads]:
    """Collect what the host reads of the device."""
    reads = Reads()
    _open.append(reads)
    try:
        yield reads
    finally:
        _open.remove(reads)


def _read(name: str) -> None:
    if not _open:
        return
    stack = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
    own = [f for f in stack if f.filename != __file__]
    where = " <- ".join(f"{f.filename.split('/')[-1]}:{f.lineno}" for f in own[:-6:-1])
    for reads in _open:
        reads.append(f"{name} from {where}")


class SimulatedTensor(Tensor):
    """A tensor of the device, around the CPU tensor that has its values."""

    _raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> "SimulatedTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made._raw = raw.detach()
        return made

    def __repr__(self) -> str:
        return f"sim({self._raw})"

    def tolist(self) -> object:
        _read("tolist")
        return self._raw.tolist()

    def new_tensor(self, data: object, **options: object) -> Tensor:
        return SimulatedTensor(self._raw.new_tensor(data, **options))

    def as_subclass(self, cls: type) -> Tensor:
        return self._raw.as_subclass(cls)  # of Pyro's marks, which keep the tensor that they mark

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._raw.untyped_storage()

    def data_ptr(self) -> int:
        return self._raw.data_ptr()

    def numpy(self, *, force: bool = False) -> object:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu()")

    def __reduce_ex__(self, protocol: int) -> object:
        return _unpickled, (self._raw, self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _unpickled(raw: Tensor, requires_grad: bool) -> Tensor:
    return SimulatedTensor(raw).requires_grad_(requires_grad)


def _is_here(device: object) -> bool:
    return device is not None and torch.device(device).type == NAME


def _raw(value: object) -> object:
    if isinstance(value, SimulatedTensor):
        return value._raw
    return CPU if isinstance(value, torch.device) and value.type == NAME else value


def _tensors(*trees: object) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(trees) if isinstance(t, Tensor)]


def _run(func, args, kwargs):
    """An operator on the values, with the rules of a device."""
    name = func.overloadpacket.__name__
    given = _tensors(args, kwargs)
    here = [t for t in given if isinstance(t, SimulatedTensor)]
    target = kwargs.get("device")
    raw_args, raw_kwargs = pytree.tree_map(_raw, (args, kwargs))
    if name == "copy_":
        if not isinstance(args[0], SimulatedTensor):
            _read(name)
        func(*raw_args, **raw_kwargs)
        return args[0]
    if name == "_to_copy":
        stays = _is_here(target) if target is not None else bool(here)
        if here and not stays:
            _read(name)
        result = func(*raw_args, **raw_kwargs)
        return SimulatedTensor(result) if stays else result
    if here:
        _check(name, given)
        is_mask = name in _MASKED and any(
            t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1])
        )
        if name in _READS or is_mask:
            _read(name)
    result = func(*raw_args, **raw_kwargs)
    if not here and not _is_here(target):
        return result
    known = {id(t._raw): t for t in here}

    def wrapped(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else SimulatedTensor(value)

    return pytree.tree_map(wrapped, result)


def _check(name: str, given: list[Tensor]) -> None:
    for t in given:
        if not isinstance(t, SimulatedTensor) and t.dim() and name not in _INDEXED:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{NAME}:0 and cpu! ({name}, CPU tensor of shape {tuple(t.shape)})"
            )


def _made(factory):
    """A factory that knows the device, for those whose C++ makes a tensor on no other."""

    def made(*args, **kwargs):
        if not _is_here(kwargs.get("device")):
            return factory(*args, **kwargs)
        grad = kwargs.pop("requires_grad", False)
        args, kwargs = pytree.tree_map(_raw, (args, {**kwargs, "device": CPU}))
        return SimulatedTensor(factory(*args, **kwargs)).requires_grad_(grad)

    return made


# Others stay as they are, or a recording would not see them.
_FACTORIES = ("tensor", "as_tensor", "arange", "eye")
_get_data, _set_data = Tensor.data.__get__, Tensor.data.__set__


def _assign_data(old: Tensor, new: Tensor) -> None:
    """``old.data = new``, which may move a parameter to the device and back."""
    if isinstance(old, SimulatedTensor) == isinstance(new, SimulatedTensor):
        if isinstance(new, SimulatedTensor):
            old._raw = new._raw
        _set_data(old, new)
        return
    grad = old.grad
    moved = torch.nn.Parameter(new.detach(), old.requires_grad)
    kept = vars(old).copy()
    vars(old).clear()
    old.__class__ = type(moved)
    vars(old).update({**{k: v for k, v in kept.items() if k != "_raw"}, **vars(moved)})
    torch._C._swap_tensor_impl(old, moved)
    if grad is not None:
        old.grad = grad.to(old.device)


def _is_compatible(input: Tensor, from_: Tensor) -> bool:
    return True


# Products of matrices under autocast, as on any device.
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "conv2d")
_CAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def _halves(module: object) -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _autocast() -> None:
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    products = torch.library.Library("aten", "IMPL")
    for name in _PRODUCTS:
        products.impl(name, _in_half(getattr(torch.ops.aten, name)), "AutocastPrivateUse1")
    _libraries.extend([others, products])


def _in_half(function):
    def product(*args, **kwargs):
        dtype = torch.get_autocast_dtype(NAME)

        def cast(value: object) -> object:
            single = isinstance(value, Tensor) and value.dtype is torch.float32
            return value.to(dtype) if single else value

        with torch._C._ExcludeDispatchKeyGuard(_CAST):
            return function(*pytree.tree_map(cast, args), **pytree.tree_map(cast, kwargs))

    return product


_MODULE = {
    "get_amp_supported_dtype": _halves,
    # No numbers are drawn on the device.
    "get_rng_state": staticmethod(lambda device=NAME: torch.empty(0, dtype=torch.uint8)),
    "set_rng_state": staticmethod(lambda state, device=NAME: None),
}
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Make PyTorch know the device, before the first backward pass of the process."""
    if not _libraries:
        import torch._dynamo  # which looks at the functions that are replaced below
        from torch.utils.backend_registration import (
            _DummyBackendModule,
            _setup_privateuseone_for_python_backend,
        )

        module = type("Module", (_DummyBackendModule,), _MODULE)()
        _setup_privateuseone_for_python_backend(NAME, module)
        _autocast()
        library = torch.library.Library("_", "IMPL")
        library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
        _libraries.append(library)


@contextlib.contextmanager
def simulated_device() -> Iterator[torch.device]:
    """The device, while it is there."""
    register()
    with contextlib.ExitStack() as stack:
        for name in _FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, _made(getattr(torch, name))))
        stack.enter_context(mock.patch.object(Tensor, "data", property(_get_data, _assign_data)))
        stack.enter_context(
            mock.patch.object(torch, "_has_compatible_shallow_copy_type", _is_compatible)
        )
        # What is told from subclasses that carry more than values; recordings, too, take apart
        # the subclasses that they do not know.
        plain = (
            (recording, "_TENSORS", (*recording._TENSORS, SimulatedTensor)),
            (run, "_LEAVES", {*run._LEAVES, SimulatedTensor}),
            (smoothing, "_PLAIN", (*smoothing._PLAIN, SimulatedTensor)),
        )
        for patched in plain:
            stack.enter_context(mock.patch.object(*patched))
        yield torch.device(NAME, 0)
