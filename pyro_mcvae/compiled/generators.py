"""The random numbers that are not PyTorch's."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["other_generators"]


def other_generators() -> dict[str, object]:
    """Python's and NumPy's generators, whose draws a recording would repeat."""
    import numpy

    state: Any = numpy.random.get_state()
    return {"Python": random.getstate(), "NumPy": (state[0], state[1].tobytes(), *state[2:])}
