"""What names a factor of a log weight."""

from __future__ import annotations

from typing import NamedTuple


class FactorKey(NamedTuple):
    """One factor of the weight: a site's density in the ``"model"`` or in the ``"guide"``."""

    program: str
    name: str
