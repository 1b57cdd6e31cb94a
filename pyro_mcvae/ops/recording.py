"""
What code on tensors has to know while a step of it is recorded.

A recording is replayed on other values, so it must not depend on those that it was made with. Where
the host looks at a value only to take a shorter way, it asks by :func:`holds`: while a step is
recorded the answer is assumed, and every replay checks the assumption.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_open: list[list[Tensor]] = []


def is_recording() -> bool:
    """Whether a step is being recorded, so that nothing may be looked at from time to time."""
    return bool(_open) or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def holds(condition: Tensor) -> bool:
    """
    Whether a condition holds; True while a step is recorded, whose replays check it.

    :param ~torch.Tensor condition: one truth value.

    Example::

        >>> from pyro_mcvae.ops.recording import assumptions, holds
        >>> holds(torch.tensor(1.0) > 2)
        False
        >>> with assumptions() as assumed:
        ...     holds(torch.tensor(1.0) > 2)
        True
        >>> assumed
        [tensor(False)]
    """
    return True if assume(condition) else bool(condition)


def assume(condition: Tensor) -> bool:
    """Assume a condition, if a step is being recorded; whether one is."""
    if _open:
        _open[-1].append(condition.detach())
    return bool(_open)


def refuse(reason: str) -> None:
    """
    Say that what comes now cannot be replayed.

    :raises RuntimeError: with the reason, if a step is being recorded; the step runs as ever then.
    """
    if _open:
        raise RuntimeError(reason)


@contextmanager
def assumptions() -> Iterator[list[Tensor]]:
    """A step is recorded within; the list fills with what it assumes."""
    found: list[Tensor] = []
    _open.append(found)
    try:
        yield found
    finally:
        _open.pop()
