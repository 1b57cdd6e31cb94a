"""Runs that leave nothing behind: to look at programs without being part of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pyro
import torch
from pyro import poutine

from pyro_mcvae.ops.generators import Generators
from pyro_mcvae.programs.batch_norm import FixedStatistics

__all__ = ["isolated", "rewindable"]


@contextmanager
def isolated() -> Iterator[None]:
    """Hide a run from outer handlers, random number generators and batch statistics."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    state = pyro.util.get_rng_state()
    with torch.random.fork_rng(devices), poutine.block(), FixedStatistics():
        try:
            yield
        finally:
            pyro.util.set_rng_state(state)


def rewindable(active: bool) -> AbstractContextManager[Callable[[], bool]]:
    """
    A function that sets the random number generators back to where an active block began, and says
    whether it did.
    """
    return _rewinding() if active else nullcontext(lambda: False)


@contextmanager
def _rewinding() -> Iterator[Callable[[], bool]]:
    # Of Python and NumPy, too.
    host, generators = pyro.util.get_rng_state(), Generators()

    def rewind() -> bool:
        pyro.util.set_rng_state(host)
        generators.put_back()
        return True

    yield rewind
