"""The random numbers that a step draws: PyTorch's, which a recording draws too, and others."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

__all__ = ["Generators", "other_generators"]


class Generators:
    """PyTorch's default generators as they are when this is made, to be put back."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda: list[Tensor] = []
        if torch.cuda.is_initialized():
            self._cuda = torch.cuda.get_rng_state_all()

    def put_back(self) -> None:
        """Draw the same numbers once more."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def other_generators() -> dict[str, object]:
    """Python's and NumPy's generators, whose draws a recording would repeat."""
    import numpy

    state: Any = numpy.random.get_state()
    return {"Python": random.getstate(), "NumPy": (state[0], state[1].tobytes(), *state[2:])}
