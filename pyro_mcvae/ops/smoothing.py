"""Smooth operations with kinks, so that their gradients can be differentiated."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from types import CodeType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pyro_mcvae.ops.compat import is_mapped, unwrapped, without_torch_function

# Attention with second derivatives.

# Each backend: whether it is enabled, how to enable it, and whether it has a second derivative.
_BACKENDS = (
    (cuda.math_sdp_enabled, cuda.enable_math_sdp, True),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
)


@contextmanager
def math_attention() -> Iterator[None]:
    """
    Use plain operations for ``scaled_dot_product_attention``, on any device.

    Fused kernels have no second derivative. This is equivalent to
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``, without its 70 microseconds.
    """
    before = [enabled() for enabled, _, _ in _BACKENDS]
    for _, enable, twice in _BACKENDS:
        enable(twice)
    try:
        yield
    finally:
        for (_, enable, _), was in zip(_BACKENDS, before, strict=True):
            enable(was)


# Smooth gradients of operations whose exact gradients jump.

# The width of a smoothed kink, relative to the spread of its argument. Digits VAE with ReLU, 300
# steps of SIS-5: the bound is -23.84 +- 0.03 for any value between 0.05 and 0.4, -23.94 for 0.8.
_RELATIVE_WIDTH = 0.2

# Files with frames between an operation and the code that calls it; this package's are others.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_INTERNAL_FILES = (
    functional.__file__,
    torch.overrides.__file__,
    Tensor.backward.__code__.co_filename,
)

_MODULES = os.path.dirname(functional.__file__) + os.sep
_PLAIN = Tensor, nn.Parameter

_active: list[None] = []


class Place(NamedTuple):
    """
    The place where a program calls an operation.

    :ivar code: the calling code, at ``line``.
    :ivar module: PyTorch's module that calls it, such as ``nn.ReLU``; otherwise None.
    """

    name: str
    code: CodeType
    line: int
    module: nn.Module | None


# The width of each kink of an operation, by place; None for kinks that need no smoothing.
Widths = Mapping[Place, tuple[float | None, ...]]


@contextmanager
def smoothed_gradients() -> Iterator[None]:
    """Use smoothed gradients for all gradients that are computed inside."""
    _active.append(None)
    try:
        yield
    finally:
        _active.pop()


def smoothed(widths: Widths) -> AbstractContextManager[object]:
    """
    Let :func:`smoothed_gradients` smooth the gradients of programs that run inside.

    Example::

        >>> from pyro_mcvae.ops.smoothing import KinkFinder, smoothed, smoothed_gradients
        >>> z, relu = torch.tensor([-0.1, 0.1, 2.0], requires_grad=True), torch.nn.ReLU()
        >>> finder = KinkFinder()
        >>> with finder:
        ...     y = relu(z)
        >>> finder.collect(y, [z])
        >>> with smoothed({place: (0.1,) for place in finder.widths()}):
        ...     y = relu(z)
        >>> with smoothed_gradients():
        ...     drift, = torch.autograd.grad(y.sum(), z, create_graph=True)
        >>> drift.detach()
        tensor([0.2689, 0.7311, 1.0000])
        >>> torch.autograd.grad(y.sum(), z)
        (tensor([0., 1., 1.]),)
    """
    return _Smoothing(widths) if widths else nullcontext()


class _Switch(torch.autograd.Function):
    """The first argument; the second gets its gradient inside :func:`smoothed_gradients`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(exact: Tensor, smooth: Tensor) -> Tensor:
        return exact.view_as(exact)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return (None, grad) if _active else (grad, None)


class _Hinge(torch.autograd.Function):
    """Computes max(d, 0), with a smooth derivative inside :func:`smoothed_gradients`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(d: Tensor, width: float) -> Tensor:
        return d.relu()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.width = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (d,) = ctx.saved_tensors
        # A function of the value, so its derivative is exact.
        return grad * (torch.sigmoid(d / ctx.width) if _active else d > 0), None


class _Hinges:
    """The hinges of operations with kinks, which are smooth if a width is given.

    :ivar arguments: the argument of each kink so far; the kink is at 0.
    """

    def __init__(self, widths: tuple[float | None, ...] = ()) -> None:
        self._widths = iter(widths)
        self.arguments: list[Tensor] = []

    def relu(self, d: Tensor) -> Tensor:
        width = next(self._widths, None)
        self.arguments.append(d)
        return d.relu() if width is None else cast(Tensor, _Hinge.apply(d, width))

    def max(self, x: Tensor, dim: Any, keepdim: bool) -> Tensor:
        width = next(self._widths, None)
        if width is None:
            self.arguments.append(x - x.mean(dim, True))
            return x.amax(dim, keepdim)
        return width * (x / width).logsumexp(dim, keepdim)


def _unwrapped(value: Tensor) -> Tensor:
    while is_mapped(value):
        value = unwrapped(value)
    return value


_Smooth = Callable[[_Hinges], Tensor | None]


class _Mode(TorchFunctionMode):
    """Calls :meth:`kinked` for operations with kinks."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        bare = name.strip("_")
        hinge_form = _OPERATIONS.get(bare)
        if hinge_form is None or not _on_floats(args):
            return func(*args, **kwargs)
        place = _place(bare)
        if not self.is_smoothed(place):
            return func(*args, **kwargs)
        inplace = name == bare + "_"
        if isinstance(func, FunctionType):  # of torch.nn.functional
            bound = signature(func).bind(*args, **kwargs).arguments
            inplace = bound.pop("inplace", False)
            args, kwargs = (args[0],), {k: v for k, v in bound.items() if v is not args[0]}
        source = args[0].clone() if inplace else args[0]
        exact = func(source.clone() if inplace else source, *args[1:], **kwargs)
        values = exact if isinstance(exact, Tensor) else exact[0]
        values = self.kinked(place, values, lambda h: hinge_form(h, source, *args[1:], **kwargs))
        if inplace:
            return args[0].copy_(values)
        return values if isinstance(exact, Tensor) else type(exact)((values, *exact[1:]))

    def is_smoothed(self, place: Place) -> bool:
        return True

    def kinked(self, place: Place, exact: Tensor, smooth: _Smooth) -> Tensor:
        """Return the result of an operation."""
        raise NotImplementedError


class _Smoothing(_Mode):
    def __init__(self, widths: Widths) -> None:
        super().__init__()
        self._widths = widths

    def is_smoothed(self, place: Place) -> bool:
        return place in self._widths

    def kinked(self, place: Place, exact: Tensor, smooth: _Smooth) -> Tensor:
        if not _unwrapped(exact).requires_grad:  # requires_grad is unreliable under vmap
            return exact
        with without_torch_function():  # not part of the program
            surrogate = smooth(_Hinges(self._widths[place]))
        return exact if surrogate is None else cast(Tensor, _Switch.apply(exact, surrogate))


class KinkFinder(_Mode):
    """
    Finds the operations with kinks in programs that run inside.

    :param ignored: code whose kinks cancel.

    Example::

        >>> from pyro_mcvae.ops.smoothing import KinkFinder
        >>> z = torch.tensor([-0.1, 0.1, 2.0], requires_grad=True)
        >>> finder = KinkFinder()
        >>> with finder:
        ...     y = torch.relu(z) + (z + 5.0).abs()
        >>> finder.collect(y, [z])
        >>> [(place.name, width) for place, width in finder.widths().items()]
        [('relu', (0.015625,))]
    """

    def __init__(self, ignored: frozenset[CodeType] = frozenset()) -> None:
        super().__init__()
        self._ignored = ignored
        # For each call, by place: the result, and the argument of each kink.
        self._calls: list[tuple[Place, Tensor, list[Tensor]]] = []
        # By place, for each kink: its arguments that depended on positions.
        self._seen: dict[Place, dict[int, list[Tensor]]] = {}

    def is_smoothed(self, place: Place) -> bool:
        return place.code not in self._ignored

    def kinked(self, place: Place, exact: Tensor, smooth: _Smooth) -> Tensor:
        hinges = _Hinges()
        with without_torch_function():
            has_kinks = smooth(hinges) is not None
        if has_kinks:
            self._calls.append((place, _unwrapped(exact), list(map(_unwrapped, hinges.arguments))))
        return exact

    def collect(self, value: Tensor, positions: list[Tensor]) -> None:
        """
        Keep the arguments of the kinks that a value depends on.

        :param value: a log weight, computed inside this context since the last call.
        :param positions: the positions at which it is differentiated.
        """
        results = [y for _, y, _ in self._calls if y.requires_grad]
        grads = _gradients(value, results)
        used = {
            id(y) for y, g in zip(results, grads, strict=True) if g is not None and bool(g.any())
        }
        moving = [p for p in positions if p.requires_grad]
        for place, result, arguments in self._calls:
            for i, d in enumerate(arguments) if id(result) in used else ():
                if any(g is not None for g in _gradients(d, moving)):
                    self._seen.setdefault(place, {}).setdefault(i, []).append(d.detach())
        self._calls.clear()

    def widths(self) -> dict[Place, tuple[float | None, ...]]:
        """Return the widths of the kinks at which gradients jump between the positions."""
        widths = dict[Place, tuple[float | None, ...]]()
        for place, kinks in self._seen.items():
            width = tuple(_width(kinks.get(i, [])) for i in range(1 + max(kinks)))
            if any(width):
                widths[place] = width
        return widths


def _gradients(value: Tensor, inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    if not (inputs and value.requires_grad):
        return (None,) * len(inputs)
    return torch.autograd.grad(value.sum(), inputs, retain_graph=True, allow_unused=True)


def _width(arguments: list[Tensor]) -> float | None:
    """Return the width of a kink, if its arguments lie on both sides."""
    if not arguments:
        return None
    d = torch.cat([d.flatten() for d in arguments])
    d = d[d.isfinite()].double()
    sides = d[d > 0], d[d < 0]
    if not all(map(len, sides)):
        return None
    # The spread of the nearer side, so that rarely active bounds have little effect.
    spread = torch.stack([side.square().mean() for side in sides]).min().sqrt()
    # A power of two, so that it rarely changes between steps: recorded steps have it as a constant.
    return float(2.0 ** torch.log2(_RELATIVE_WIDTH * spread).round())


def _on_floats(args: tuple[Any, ...]) -> bool:
    # Subclasses have attributes that a custom function would lose.
    return bool(args) and type(args[0]) in _PLAIN and args[0].is_floating_point()


def _place(name: str) -> Place:
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_filename in _INTERNAL_FILES or frame.f_code.co_filename.startswith(_PACKAGE)
    ):
        frame = frame.f_back
    code, module = frame.f_code, None
    if code.co_filename.startswith(_MODULES):
        module = frame.f_locals.get("self")
    return Place(name, code, frame.f_lineno, module)


def _clamp(h: _Hinges, x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    if min is not None:
        x = min + h.relu(x - min)
    return x if max is None else max - h.relu(max - x)


def _leaky(h: _Hinges, x: Tensor, slope: Any) -> Tensor:
    return slope * x + (1 - slope) * h.relu(x)


def _prelu(h: _Hinges, x: Tensor, weight: Tensor) -> Tensor:
    if weight.numel() > 1 and x.dim() > 1:
        weight = weight.reshape(-1, *[1] * (x.dim() - 2))
    return _leaky(h, x, weight)


def _elu(h: _Hinges, x: Tensor, alpha: float = 1.0, scale: float = 1.0) -> Tensor | None:
    if alpha == 1:
        return None  # has a continuous derivative
    return scale * (h.relu(x) + alpha * (-h.relu(-x)).expm1())


def _max(h: _Hinges, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    if isinstance(dim, Tensor):
        return _maximum(h, x, dim)
    return h.max(x, tuple(range(x.dim())) if dim is None or dim == () else dim, keepdim)


def _min(h: _Hinges, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    if isinstance(dim, Tensor):
        return -_maximum(h, -x, -dim)
    return -_max(h, -x, dim, keepdim)


def _maximum(h: _Hinges, x: Tensor, other: Tensor) -> Tensor:
    return other + h.relu(x - other)


# Operations as sums of hinges; None for calls without a kink that can be smoothed.
_OPERATIONS: dict[str, Callable[..., Tensor | None]] = {
    "relu": lambda h, x: h.relu(x),
    "relu6": lambda h, x: h.relu(x) - h.relu(x - 6),
    "leaky_relu": lambda h, x, negative_slope=0.01: _leaky(h, x, negative_slope),
    "prelu": _prelu,
    "elu": _elu,
    "selu": lambda h, x: _elu(h, x, 1.6732632423543772, 1.0507009873554805),
    "hardtanh": lambda h, x, min_val=-1.0, max_val=1.0: _clamp(h, x, min_val, max_val),
    "abs": lambda h, x: 2 * h.relu(x) - x,
    "absolute": lambda h, x: 2 * h.relu(x) - x,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda h, x, max: _clamp(h, x, None, max),
    "maximum": _maximum,
    "minimum": lambda h, x, other: -_maximum(h, -x, -other),
    "max": _max,
    "amax": _max,
    "min": _min,
    "amin": _min,
}

# The names of these operations.
SMOOTHED = frozenset(_OPERATIONS)
