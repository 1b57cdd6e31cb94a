"""Reentrant checkpoints of programs, run as the others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointFunction, checkpoint


class NonReentrant:
    """
    Around the run of a program: ``checkpoint(..., use_reentrant=True)`` is one with False.

    The numbers are the same. But a reentrant checkpoint of tensors that need no gradient, as
    latents without a path to the guide, has none for its parameters either, and it can be
    differentiated neither with respect to given tensors nor twice.
    """

    def __enter__(self) -> None:
        self._before = vars(CheckpointFunction).get("apply")
        setattr(CheckpointFunction, "apply", staticmethod(_non_reentrant))  # noqa: B010

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            del CheckpointFunction.apply  # and with it what hides that of its base class
        else:
            setattr(CheckpointFunction, "apply", self._before)  # noqa: B010


def _non_reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
