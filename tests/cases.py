"""Cases of a parametrised test of which some are left to the slow ones."""

from collections.abc import Iterable
from typing import Any

import pytest


def some_slow(names: Iterable[str], *slow: str) -> list[Any]:
    """All names, of which some are marked slow."""
    return [pytest.param(n, marks=pytest.mark.slow if n in slow else []) for n in names]


def every(step: int, cases: Iterable[Any], start: int = 0) -> list[Any]:
    """All cases, of which every second, third or so runs by default and the others are slow."""
    slow = pytest.mark.slow
    result = []
    for i, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        result.append(pytest.param(*values, marks=() if (i - start) % step == 0 else slow))
    return result
