"""Track exact logarithms of values: the logarithm of exp(u) is u."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus
from torch.overrides import TorchFunctionMode

_version = attrgetter("_version")
_entered: list[None] = []
_suspended: list[None] = []
Lazy: TypeAlias = Callable[[], Tensor]


class Logs(NamedTuple):
    """
    Exact logarithms of a tensor x, computed on access.

    :ivar log: returns log abs(x).
    :ivar complement: returns log(1 - x), for a tensor between 0 and 1; None if unknown.
    :ivar sign: the sign of x: 1, -1, or 0 if unknown.
    :ivar simplex: whether the last dim sums to one.
    """

    log: Lazy
    complement: Lazy | None = None
    sign: int = 1
    simplex: bool = False


class ExactLogs(TorchFunctionMode):
    r"""
    A context in which ``log``, ``xlogy`` and related functions use exact logarithms.

    For :math:`z = e^u` in single precision the derivative of log z overflows below 1e-38. Its
    second derivative, which the gradient of a chain needs, overflows below 1e-19; one draw of
    Gamma(0.1) in a hundred lies there. An overflow becomes NaN in the gradient of u. As functions
    of the logarithm, the densities of Gamma, Beta and Dirichlet are smooth. They are exact even if
    z is rounded to 0 or 1.

    Example::

        >>> u = torch.tensor(-60.0, requires_grad=True)
        >>> with ExactLogs():
        ...     density = dist.Gamma(0.5, 1.0).log_prob(u.exp())
        ...     (slope,) = torch.autograd.grad(density, u, create_graph=True)
        >>> slope, torch.autograd.grad(slope, u)[0]
        (tensor(-0.5000, grad_fn=<AddBackward0>), tensor(-8.7565e-27))
    """

    def __enter__(self) -> ExactLogs:
        super().__enter__()
        _entered.append(None)
        return self

    def __exit__(self, *error: Any) -> None:
        _entered.pop()
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _suspended:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if not all(t is Tensor or t is nn.Parameter for t in types):
            return func(*args, **kwargs)  # subclasses carry more than a value
        rule = _VALUES.get(name)
        if rule is not None and not kwargs.get("out"):
            value_by_rule = rule(*args, **kwargs)
            if value_by_rule is not None:
                return value_by_rule
        logs_rule = _RULES.get(name)
        if logs_rule is None:
            return func(*args, **kwargs)
        if name in _BY_LOGS:
            logs = logs_rule(func, *args, **kwargs)
            if logs is not None and logs.sign:
                # The function's value and derivatives would overflow, or be rounded to 0.
                value = _inside(logs.log().exp(), logs)
                return with_logs(value if logs.sign > 0 else -value, logs)
            return with_logs(func(*args, **kwargs), logs)
        result = func(*args, **kwargs)
        return with_logs(result, logs_rule(func, *args, **kwargs))


def with_logs(value: Any, logs: Logs | list[Logs | None] | None) -> Any:
    """Attach exact logarithms to a tensor, valid until it is changed in place."""
    if isinstance(logs, list):
        return type(value)(map(with_logs, value, logs))
    if logs is not None:
        value._exact_logs = logs, _changes(value)
    return value


@contextmanager
def without_exact_logs() -> Iterator[None]:
    """Ignore exact logarithms inside, so that compared runs treat their latents equally."""
    _suspended.append(None)
    try:
        yield
    finally:
        _suspended.pop()


def _logs_of(value: Any) -> Logs | None:
    if _suspended:
        return None
    logs, version = getattr(value, "_exact_logs", (None, None))
    return logs if version is not None and version == _changes(value) else None


def _changes(value: Tensor) -> int:
    """Return the number of in-place changes of a tensor."""
    return 0 if value.is_inference() else _version(value)


def positive(value: Tensor, simplex: bool = False) -> Tensor:
    """
    Clamp a value with exact logarithms away from 0 (or 1) and infinity.

    :param simplex: whether its last dim sums to one, up to the rounding of large logits.
    """
    logs = _logs_of(value)
    logs = None if logs is None or logs.sign < 0 else logs
    if logs is not None:
        value = _inside(value, logs)
    if simplex:
        with torch._C.DisableTorchFunction():
            value = value / value.detach().sum(-1, keepdim=True)
    return value if logs is None else with_logs(value, logs._replace(simplex=simplex))


def _inside(value: Tensor, logs: Logs) -> Tensor:
    info = torch.finfo(value.dtype)
    least = info.tiny if logs.sign else -info.max
    with torch._C.DisableTorchFunction():  # rounding is not part of the program
        return value.clamp(least, info.max if logs.complement is None else 1 - info.eps / 2)


def exact_logs_if(needed: bool = True) -> AbstractContextManager[object]:
    """Return a :class:`ExactLogs` context, if needed and not already entered."""
    return ExactLogs() if needed and not _entered else nullcontext()


def exact_logs(value: Any) -> AbstractContextManager[object]:
    """Return a :class:`ExactLogs` context if a value has exact logarithms."""
    return exact_logs_if(_logs_of(value) is not None)


def copy_logs(value: Tensor, change: Callable[[Tensor], Tensor], result: Tensor) -> Tensor:
    """Attach the changed logarithms of ``value`` to ``result``, which is ``change(value)``."""
    logs = _logs_of(value)
    return result if logs is None else with_logs(result, _changed(logs, change))


def _changed(logs: Logs, change: Callable[[Tensor], Tensor]) -> Logs:
    log, complement = logs.log, logs.complement
    changed = None if complement is None else lambda: change(complement())
    return logs._replace(log=lambda: change(log()), complement=changed)


# Functions whose result follows from the logarithms.


def _log(x: Any) -> Tensor | None:
    logs = _logs_of(x)
    if logs is None or logs.sign < 0:
        return None
    log = logs.log()
    # A new tensor: transforms cache their values by identity.
    return log.view_as(log) if logs.sign else torch.where(x < 0, torch.nan, log)


def _xlogy(a: Any, x: Any) -> Tensor | None:
    log = _log(x)
    return None if log is None else a * log


def _log1p(x: Any) -> Tensor | None:
    logs = _logs_of(x)
    if logs is None or logs.sign == 0:
        return None
    if logs.sign > 0:
        return softplus(logs.log())
    return None if logs.complement is None else logs.complement()


def _logit(x: Any, eps: float | None = None) -> Tensor | None:
    logs = _logs_of(x)
    if logs is None or logs.complement is None or logs.sign <= 0:
        return None
    return logs.log() - logs.complement()


def _clamp(x: Any, min: Any = None, max: Any = None) -> Tensor | None:
    """Return the value itself if clamping would only remove rounding errors."""
    logs = _logs_of(x)
    if logs is None or logs.sign <= 0 or isinstance(min, Tensor) or isinstance(max, Tensor):
        return None
    info = torch.finfo(x.dtype)
    if (min is not None and min > info.tiny) or (max is not None and max < 1 - 1.5 * info.eps):
        return None
    return positive(x, logs.simplex) if max is None or logs.complement is not None else None


def _lgamma(x: Any) -> Tensor | None:
    logs = _logs_of(x)
    return None if logs is None or logs.sign <= 0 else torch.lgamma(1 + x) - logs.log()


def _divided(x: Any, other: Any, **options: Any) -> Tensor | None:
    """Divide by a value close to 0: multiply by its reciprocal, whose derivatives are finite."""
    logs = _logs_of(other)
    if options or logs is None or logs.sign <= 0 or _logs_of(x) is not None:
        return None
    value = _exp(-logs.log())
    return value if _is_number(x, 1) or value is None else x * value


def _exp(x: Tensor) -> Tensor | None:
    """Return exp(x) without overflow, which would have no gradient."""
    if not x.is_floating_point():
        return None
    with torch._C.DisableTorchFunction():
        value = x.clamp(max=math.log(torch.finfo(x.dtype).max) - 1e-3).exp()
    return positive(with_logs(value, Logs(lambda: x)))


_VALUES: dict[str, Callable[..., Tensor | None]] = {
    "clamp": _clamp,
    "exp": _exp,
    "log": _log,
    "xlogy": _xlogy,
    "special_xlogy": _xlogy,
    "log1p": _log1p,
    **dict.fromkeys(("lgamma", "special_gammaln"), _lgamma),
    **dict.fromkeys(("div", "true_divide", "__truediv__", "__div__"), _divided),
    **dict.fromkeys(("__rdiv__", "__rtruediv__"), lambda x, other: _divided(other, x)),
    "reciprocal": lambda x: _divided(1, x),
    "logit": _logit,
    "special_logit": _logit,
}

# The exact logarithms of the result of a function.


def _sigmoid(func: Any, x: Tensor) -> Logs:
    return Logs(lambda: logsigmoid(x), lambda: logsigmoid(-x))


def _ndtr(func: Any, x: Tensor) -> Logs:
    log = torch.special.log_ndtr
    return Logs(lambda: log(x), lambda: log(-x))


def _softmax(func: Any, x: Tensor, dim: int, *args: Any, **options: Any) -> Logs:
    return Logs(lambda: x.log_softmax(dim), simplex=dim in (-1, x.dim() - 1))


def _shape(func: Any, x: Any, *args: Any, **options: Any) -> Logs | None:
    logs = _logs_of(x)
    if logs is None:
        return None
    tail = logs.simplex and func.__name__ == "__getitem__" and args == ((..., slice(None, -1)),)
    changed = _changed(logs, lambda t: func(t, *args, **options))
    return changed._replace(simplex=tail, complement=_tail(logs) if tail else changed.complement)


def _tail(logs: Logs) -> Lazy:
    """Return log(1 - the sum up to an entry) for each entry of a simplex except the last."""
    return lambda: logs.log().flip(-1).logcumsumexp(-1).flip(-1)[..., 1:]


def _cumsum(func: Any, x: Any, *args: Any, **options: Any) -> Logs | None:
    logs = _logs_of(x)
    if logs is None or not logs.simplex or logs.complement is None:
        return None
    return Logs(lambda: logs.log().logcumsumexp(-1), logs.complement)


def _joined(func: Any, parts: Iterable[Any], *args: Any, **options: Any) -> Logs | None:
    part_logs = [_logs_of(part) for part in parts]
    if not part_logs or not all(logs is not None and logs.sign > 0 for logs in part_logs):
        return None
    all_logs: list[Logs] = [logs for logs in part_logs if logs is not None]
    log: Lazy = lambda: func([logs.log() for logs in all_logs], *args, **options)  # noqa: E731
    complements = [logs.complement for logs in all_logs]
    if any(c is None for c in complements):
        return Logs(log)
    return Logs(log, lambda: func([c() for c in complements if c], *args, **options))


def _one_minus(func: Any, x: Any, one: Any) -> Logs | None:
    """Return the logarithms of 1 - x, also for ``rsub(x, 1)``."""
    logs = _logs_of(x)
    if not _is_number(one, 1) or logs is None or logs.sign <= 0 or logs.complement is None:
        return None
    return Logs(logs.complement, logs.log)


def _sub(func: Any, x: Any, other: Any, **options: Any) -> Logs | None:
    if options:
        return None
    logs = _logs_of(x)
    if logs is None:
        return _one_minus(func, other, x)
    if _is_number(other, 0):
        return logs
    difference = _one_minus(func, x, other)
    return None if difference is None else difference._replace(sign=-1)


def _add(func: Any, x: Any, other: Any, **options: Any) -> Logs | None:
    if options:
        return None
    x, other = (x, other) if _logs_of(other) is None else (other, x)
    logs = _logs_of(x)
    if logs is None or _is_number(other, 0):
        return logs
    if logs.sign >= 0 or logs.complement is None or not _is_number(other, 1):
        return None
    return Logs(logs.complement, logs.log)


def _neg(func: Any, x: Any) -> Logs | None:
    logs = _logs_of(x)
    return None if logs is None else logs._replace(sign=-logs.sign, simplex=False)


def _abs(func: Any, x: Any) -> Logs | None:
    logs = _logs_of(x)
    return None if logs is None else Logs(logs.log, logs.complement if logs.sign > 0 else None)


def _mul(func: Any, x: Any, other: Any) -> Logs | None:
    x, other = (x, other) if _logs_of(x) is not None else (other, x)
    a, b = _logs_of(x), _logs_of(other)
    if a is None:
        return None
    if b is not None:
        return Logs(lambda: a.log() + b.log(), sign=a.sign * b.sign)
    if _is_number(other, 1) or _is_number(other, -1):
        return a._replace(sign=a.sign * int(other), simplex=False)
    return Logs(lambda: a.log() + _log_abs(other, a), sign=a.sign * _sign(other))


def _div(func: Any, x: Any, other: Any, **options: Any) -> Logs | None:
    a, b = _logs_of(x), _logs_of(other)
    if options or (a is None and b is None):
        return None
    if b is None:
        assert a is not None
        if _is_number(other, 1) or _is_number(other, -1):
            return _mul(func, x, other)
        return Logs(lambda: a.log() - _log_abs(other, a), sign=a.sign * _sign(other))
    if a is None:
        return Logs(lambda: _log_abs(x, b) - b.log(), sign=_sign(x) * b.sign)
    return Logs(lambda: a.log() - b.log(), sign=a.sign * b.sign)


def _pow(func: Any, x: Any, exponent: Any) -> Logs | None:
    logs = _logs_of(x)
    if logs is None or logs.sign < 0:
        return None
    complement = None if logs.complement is None else lambda: _one_minus_power(logs, exponent)
    return Logs(lambda: exponent * logs.log(), complement)


def _one_minus_power(logs: Logs, exponent: Any) -> Tensor:
    """Return log(1 - x**e), by a series in 1 - x near x = 1."""
    assert logs.complement is not None
    log, log_gap = logs.log(), logs.complement()
    e = torch.as_tensor(exponent).to(log)
    gap = log_gap.exp()
    near = gap * e.abs().clamp_min(1.0) < 1e-3
    small = torch.where(near, gap, 0.0)
    series = torch.log1p((1 - e) * small / 2 * (1 + (2 - e) * small / 3))
    return torch.where(
        near, log_gap + e.abs().log() + series, _log1mexp(e * torch.where(near, -1.0, log))
    )


def _cumprod(func: Any, x: Any, *args: Any, **options: Any) -> Logs | None:
    logs = _logs_of(x)
    if logs is None or logs.sign <= 0:
        return None
    return Logs(lambda: logs.log().cumsum(*args, **options))


def _pad(
    func: Any, x: Any, pad: Any, mode: str = "constant", value: float | None = None
) -> Logs | None:
    logs = _logs_of(x)
    if logs is None or logs.sign <= 0 or mode != "constant" or value != 1:
        return None
    return Logs(lambda: func(logs.log(), pad, value=0.0))


def _broadcast(func: Any, *tensors: Any) -> list[Logs | None]:
    tensors = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    logs = map(_logs_of, tensors)
    return [None if x is None else _changed(x, lambda t: t.expand(shape)) for x in logs]


def _is_number(value: Any, number: int) -> bool:
    return isinstance(value, int | float) and value == number


def _sign(value: Any) -> int:
    if isinstance(value, Tensor):
        return 0
    return (value > 0) - (value < 0)


def _log_abs(value: Any, like: Logs) -> Tensor:
    value = value if isinstance(value, Tensor) else torch.as_tensor(float(value)).to(like.log())
    return value.abs().log()


def _log1mexp(x: Tensor) -> Tensor:
    """Return log abs(1 - exp(x))."""
    small = x < -0.7
    far = torch.log1p(-torch.where(small, x, -1.0).exp())
    return torch.where(small, far, torch.where(small, -1.0, x).expm1().abs().log())


_BY_LOGS = frozenset(
    (
        *("pow", "__pow__", "sqrt", "square"),
        *("div", "true_divide", "__truediv__", "__div__", "rsub", "__rsub__", "sub", "__sub__"),
    )
)
_RULES: dict[str, Callable[..., Any]] = {
    "sigmoid": _sigmoid,
    "special_expit": _sigmoid,
    "special_ndtr": _ndtr,
    "softmax": _softmax,
    "stack": _joined,
    "cat": _joined,
    "rsub": _one_minus,
    "__rsub__": _one_minus,
    "neg": _neg,
    "__neg__": _neg,
    "abs": _abs,
    "__abs__": _abs,
    "sqrt": lambda func, x: _pow(func, x, 0.5),
    "square": lambda func, x: _pow(func, x, 2),
    "cumprod": _cumprod,
    "cumsum": _cumsum,
    "pad": _pad,
    "broadcast_tensors": _broadcast,
    **dict.fromkeys(("sub", "__sub__"), _sub),
    **dict.fromkeys(("add", "__add__", "__radd__"), _add),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), _mul),
    **dict.fromkeys(("div", "true_divide", "__truediv__", "__div__"), _div),
    **dict.fromkeys(("pow", "__pow__"), _pow),
    **dict.fromkeys(
        (
            *("expand", "expand_as", "broadcast_to", "view", "view_as", "reshape", "__getitem__"),
            *("unsqueeze", "squeeze", "permute", "movedim", "transpose", "flatten", "unflatten"),
            *("clone", "contiguous", "select", "narrow", "diagonal", "detach", "to", "mT", "T"),
        ),
        _shape,
    ),
}
