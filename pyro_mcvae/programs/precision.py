"""Densities in full precision, whatever precision the networks behind them compute in."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.programs.types import Distribution, Message

_DISTRIBUTION = torch.distributions.Distribution
_NOTHING = nullcontext()
_HALF = (torch.bfloat16, torch.float16)


def full_precision(fn: Distribution) -> Distribution:
    """
    A distribution whose half-precision parameters, as autocast networks return them, are cast to
    single precision; others are returned as they are.

    bfloat16 has 8 bits: a log density of -500 nats that is summed in it is off by a nat. (A
    Categorical has rounded its normalised logits by then; cast a network's output to avoid it.)

    Example::

        >>> fn = dist.Normal(torch.zeros(3, dtype=torch.bfloat16), 1.0).to_event(1)
        >>> full_precision(fn).log_prob(torch.zeros(3)).dtype
        torch.float32
    """
    changed = {}
    for name, value in vars(fn).items():
        if isinstance(value, Tensor) and value.dtype in _HALF:
            changed[name] = value.float()
        elif isinstance(value, _DISTRIBUTION) and (wide := full_precision(value)) is not value:
            changed[name] = wide
    return _changed(fn, changed) if changed else fn


def site_in_full_precision(msg: Message) -> None:
    """
    Draw and score a site in single precision, whatever the precision of its distribution.

    The program gets its draw in the precision that it would have drawn it in: networks in bfloat16
    throughout take no other. Densities, and the trace, have the draw as it is.
    """
    fn = msg["fn"]
    msg["fn"] = full_precision(fn)
    if msg["fn"] is not fn and not msg["is_observed"]:
        _keep_precision(msg, fn)


def _keep_precision(msg: Message, fn: Distribution) -> None:
    dtypes = set(_float_dtypes(fn))
    if len(dtypes) == 1:
        # Handlers have taken down what they keep by the time this is called.
        msg["continuation"] = functools.partial(_in_precision, dtypes.pop())


def _float_dtypes(fn: Distribution) -> Iterator[torch.dtype]:
    for value in vars(fn).values():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value.dtype
        elif isinstance(value, _DISTRIBUTION):
            yield from _float_dtypes(value)


def _in_precision(dtype: torch.dtype, msg: Message) -> None:
    if msg["value"].is_floating_point():
        msg["value"] = msg["value"].to(dtype)


def _changed(fn: Distribution, changed: dict[str, Any]) -> Distribution:
    """A copy with other parameters."""
    if isinstance(fn, torch.distributions.Categorical):
        # It has normalised them in half precision: without this it would be no density.
        if "logits" in changed:
            changed["logits"] = changed["logits"].log_softmax(-1)
        if "probs" in changed:
            changed["probs"] = changed["probs"] / changed["probs"].sum(-1, keepdim=True)
        changed["_param"] = changed["logits" if "logits" in changed else "probs"]
    wide = copy.copy(fn)
    vars(wide).update(changed)
    return wide


@contextmanager
def _casts_anew() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


# Autocast casts weights at each use. An older PyTorch keeps those that it has cast, also without
# gradients, as for a search: they would have none in the rest of the step.
casts_with_gradients = _casts_anew if torch.__version__ < "2.13" else nullcontext


def without_autocast() -> AbstractContextManager[object]:
    """Turns autocast off where it is on: a density's own products would be rounded."""
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return _switched_off(on) if on else _NOTHING


def _switched_off(on: list[str]) -> ExitStack:
    stack = ExitStack()
    for device in on:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
