"""Cases of a parametrised test of which some are left to the slow ones."""

from collections.abc import Iterable
from typing import Any

import pytest


def some_slow(names: Iterable[str], *slow: str) -> list[Any]:
    """All names, of which some are marked slow."""
    return [pytest.param(n, marks=pytest.mark.slow if n in slow else []) for n in names]
