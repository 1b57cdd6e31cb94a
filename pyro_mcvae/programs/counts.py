"""The supports of countable distributions: Poisson, Geometric and NegativeBinomial."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pyro import distributions as dist
from torch import Tensor

from pyro_mcvae.ops.countable import CountLaw, betainc
from pyro_mcvae.programs.types import Distribution


def count_law(fn: Distribution) -> CountLaw | None:
    """
    What the slots of a countable distribution need; None for others.

    :param fn: Poisson, Geometric or NegativeBinomial, not wrapped.
    """
    if isinstance(fn, dist.Poisson):
        return _poisson(fn)
    if isinstance(fn, dist.Geometric):
        return _geometric(fn)
    if isinstance(fn, dist.NegativeBinomial):
        return _negative_binomial(fn)
    return None


def _poisson(fn: Distribution) -> CountLaw:
    rate = fn.rate.detach()

    def cdf(x: Tensor) -> Tensor:
        return torch.where(x < 0, 0.0, torch.special.gammaincc(x.clamp_min(0) + 1, rate))

    def tail(x: Tensor) -> Tensor:
        return torch.where(x < 0, 1.0, torch.special.gammainc(x.clamp_min(0) + 1, rate))

    return CountLaw(fn.log_prob, cdf, tail, _either(cdf, tail), rate.floor())


def _either(
    cdf: Callable[[Tensor], Tensor], tail: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, left: torch.where(left, cdf(x), tail(x))


def _geometric(fn: Distribution) -> CountLaw:
    log_failure = torch.log1p(-fn.probs.detach())

    def log_tail(x: Tensor) -> Tensor:
        return (x + 1) * log_failure

    def cdf(x: Tensor) -> Tensor:
        return torch.where(x < 0, 0.0, -torch.expm1(log_tail(x)))

    def tail(x: Tensor) -> Tensor:
        return torch.where(x < 0, 1.0, log_tail(x).exp())

    return CountLaw(fn.log_prob, cdf, tail, _either(cdf, tail), torch.zeros_like(log_failure))


def _negative_binomial(fn: Distribution) -> CountLaw:
    failures, success = fn.total_count.detach(), fn.probs.detach()
    failures = failures.to(success.dtype)

    def tail(x: Tensor) -> Tensor:
        return torch.where(x < 0, 1.0, betainc(x.clamp_min(0) + 1, failures, success))

    def cdf(x: Tensor) -> Tensor:
        return torch.where(x < 0, 0.0, betainc(failures, x.clamp_min(0) + 1, 1 - success))

    def side(x: Tensor, left: Tensor) -> Tensor:
        count = x.clamp_min(0) + 1
        first, second = torch.where(left, failures, count), torch.where(left, count, failures)
        found = betainc(first, second, torch.where(left, 1 - success, success))
        return torch.where(x < 0, torch.where(left, 0.0, 1.0), found)

    mode = (success * (failures - 1) / (1 - success)).floor().clamp_min(0)
    return CountLaw(fn.log_prob, cdf, tail, side, mode)
