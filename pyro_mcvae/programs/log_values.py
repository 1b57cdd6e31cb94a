"""Draws near the boundary of a support: their logarithms, and densities as functions of these."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import (
    Beta,
    Dirichlet,
    ExpTransform,
    Gamma,
    PowerTransform,
    SigmoidTransform,
    StickBreakingTransform,
    TransformedDistribution,
)
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli
from torch.nn.functional import logsigmoid, pad, softplus

from pyro_mcvae.ops.compat import validate, version_of
from pyro_mcvae.programs.types import Distribution

# Values with their logarithms.


class Logs(NamedTuple):
    """
    The logarithms of a draw x before it is rounded.

    :ivar log: log x.
    :ivar complement: log(1 - x), for a draw between 0 and 1; None if unknown.
    :ivar simplex: whether the last dim of x sums to one.
    """

    log: Tensor
    complement: Tensor | None = None
    simplex: bool = False

    def changed(self, change: Callable[..., Tensor], *others: Logs) -> Logs:
        """Apply a function of tensors to these logarithms, and to others."""
        every = (self, *others)
        complements = [c for logs in every if (c := logs.complement) is not None]
        complement = change(*complements) if len(complements) == len(every) else None
        return self._replace(log=change(*(logs.log for logs in every)), complement=complement)


def value_of(logs: Logs) -> Tensor:
    """Return the draw, rounded to a value inside its support, with its logarithms."""
    info = torch.finfo(logs.log.dtype)
    high = info.max if logs.complement is None else 1 - info.eps / 2
    value = logs.log.clamp(max=math.log(info.max) - 1e-3).exp().clamp(info.tiny, high)
    if logs.simplex:
        value = value / value.detach().sum(-1, keepdim=True)  # large logits round their sum
    return with_logs(value, logs)


def with_logs(value: Tensor, logs: Logs) -> Tensor:
    """Attach logarithms to a value, valid until it is changed in place."""
    value._logs = logs, _changes(value)  # type: ignore[attr-defined]
    return value


def logs_of(value: Any) -> Logs | None:
    """Return the logarithms of a draw; None if they are unknown, or the draw was changed."""
    logs, changes = getattr(value, "_logs", (None, None))
    return logs if logs is not None and changes == _changes(value) else None


def _changes(value: Tensor) -> int:
    return 0 if value.is_inference() else version_of(value)


def leaf_of(value: Tensor) -> Tensor:
    """Return a detached draw, with a gradient of its own, also through its logarithms."""
    leaf = value.detach().requires_grad_(torch.is_grad_enabled())
    logs = logs_of(value)
    if logs is None:
        return leaf
    change = leaf - leaf.detach()
    log = logs.log.detach() + change / leaf.detach()
    complement = logs.complement
    if complement is not None:
        complement = complement.detach() - change / (1 - leaf.detach())
    return with_logs(leaf, logs._replace(log=log, complement=complement))


# Transforms as functions from and to logarithms.


def pushed(transform: Any, x: Tensor) -> Tensor:
    """Return a transform's value at x, with its logarithms if they are known."""
    kind, logs = type(transform), logs_of(x)
    if kind is ExpTransform:
        return value_of(Logs(x))
    if kind is SigmoidTransform:
        return value_of(Logs(logsigmoid(x), logsigmoid(-x)))
    if kind is StickBreakingTransform:
        x = x - _log_offset(x)
        rest = logsigmoid(-x).cumsum(-1)
        return value_of(Logs(pad(logsigmoid(x), [0, 1]) + pad(rest, [1, 0]), simplex=True))
    if kind is PowerTransform and logs is not None:
        return value_of(Logs(transform.exponent * logs.log))
    value: Tensor = transform(x)
    return value


def pulled(transform: Any, y: Tensor) -> Tensor:
    """Return the inverse of :func:`pushed`."""
    kind, logs = type(transform), logs_of(y)
    if logs is not None:
        if kind is ExpTransform:
            return logs.log
        if kind is SigmoidTransform and logs.complement is not None:
            return logs.log - logs.complement
        if kind is StickBreakingTransform and logs.simplex:
            head, tail = logs.log[..., :-1], logs.log.flip(-1).logcumsumexp(-1).flip(-1)[..., 1:]
            return head - tail + _log_offset(head)
        if kind is PowerTransform:
            return value_of(Logs(logs.log / transform.exponent))
    x: Tensor = transform.inv(y)
    return x


def log_det(transform: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the log determinant of a transform from x to y."""
    kind, logs = type(transform), logs_of(y)
    if logs is not None and kind is StickBreakingTransform:
        return (logsigmoid(_log_offset(x) - x) + logs.log[..., :-1]).sum(-1)
    if logs is not None and kind is PowerTransform and (base := logs_of(x)) is not None:
        return transform.exponent.abs().log() + logs.log - base.log
    result: Tensor = transform.log_abs_det_jacobian(x, y)
    return result


def _log_offset(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], 0, -1, dtype=x.dtype, device=x.device).log()


# Densities as functions of logarithms.


def at_logs(fn: Distribution, value: Any) -> Distribution:
    """
    Return a distribution whose density at a value is a function of the value's logarithms.

    For :math:`z = e^u` in single precision the second derivative of log z, which the gradient of a
    chain needs, overflows below 1e-19; one draw of Gamma(0.1) in a hundred lies there. As functions
    of u, the densities of Gamma, Beta and Dirichlet are smooth, and exact even if z is rounded to 0
    or 1. Classes that define another ``log_prob``, and values whose logarithms are unknown, keep
    theirs.

    Example::

        >>> from pyro_mcvae.programs.log_values import Logs, at_logs, value_of
        >>> u = torch.tensor(-60.0, requires_grad=True)
        >>> z, fn = value_of(Logs(u)), dist.Gamma(0.5, 1.0)
        >>> (slope,) = torch.autograd.grad(at_logs(fn, z).log_prob(z), u, create_graph=True)
        >>> slope, torch.autograd.grad(slope, u)[0]
        (tensor(-0.5000, grad_fn=<AddBackward0>), tensor(-8.7565e-27))
    """
    return fn if logs_of(value) is None else _by_logs(fn)


def _by_logs(fn: Distribution) -> Distribution:
    density = _DENSITIES.get(type(fn).log_prob) if "log_prob" not in vars(fn) else None
    base = getattr(fn, "base_dist", None)
    if density is None and base is None:
        return fn
    new = copy(fn)
    if density is not None:
        new.log_prob = partial(density, fn)
    else:
        new.base_dist = _by_logs(base)
    return new


def _gamma(fn: Any, value: Tensor) -> Tensor | None:
    logs = logs_of(value)
    if logs is None:
        return None
    rate, concentration = fn.rate, fn.concentration
    constant = torch.xlogy(concentration, rate) - torch.lgamma(concentration)
    return constant + (concentration - 1) * logs.log - rate * value


def _beta(fn: Any, value: Tensor) -> Tensor | None:
    logs, a, b = logs_of(value), fn.concentration1, fn.concentration0
    if logs is None or logs.complement is None:
        return None
    constant = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    return constant + (a - 1) * logs.log + (b - 1) * logs.complement


def _dirichlet(fn: Any, value: Tensor) -> Tensor | None:
    logs, concentration = logs_of(value), fn.concentration
    if logs is None or not logs.simplex:
        return None
    constant = torch.lgamma(concentration.sum(-1)) - torch.lgamma(concentration).sum(-1)
    return constant + ((concentration - 1) * logs.log).sum(-1)


def _logit_relaxed(fn: Any, value: Tensor) -> Tensor:
    difference = fn.logits - value * fn.temperature  # its exponential may overflow
    return fn.temperature.log() + difference - 2 * softplus(difference)


def _transformed(fn: Any, value: Tensor) -> Tensor:
    total: Any = 0.0
    event_dim, y = len(fn.event_shape), value
    for transform in reversed(fn.transforms):
        x, domain = pulled(transform, y), transform.domain.event_dim
        event_dim += domain - transform.codomain.event_dim
        total = total - _sum_last(log_det(transform, x, y), event_dim - domain)
        y = x
    density = _by_logs(fn.base_dist).log_prob(y)
    result: Tensor = total + _sum_last(density, event_dim - len(fn.base_dist.event_shape))
    return result


def _sum_last(value: Tensor, count: int) -> Tensor:
    return value.sum(tuple(range(-count, 0))) if count else value


def _or_plain(density: Callable[[Any, Tensor], Tensor | None]) -> Callable[[Any, Tensor], Tensor]:
    def log_prob(fn: Any, value: Tensor) -> Tensor:
        result = density(fn, value)
        if result is None:
            return fn.log_prob(value)
        validate(fn, value)
        return result

    return log_prob


# By the method that they replace.
_DENSITIES: dict[Any, Callable[[Any, Tensor], Tensor]] = {
    Gamma.log_prob: _or_plain(_gamma),
    Beta.log_prob: _or_plain(_beta),
    Dirichlet.log_prob: _or_plain(_dirichlet),
    LogitRelaxedBernoulli.log_prob: _or_plain(_logit_relaxed),
    TransformedDistribution.log_prob: _or_plain(_transformed),
}
