"""Draws of a guide that no chain moves, as of discrete sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pyro_mcvae.programs.types import Message

__all__ = ["HeldDraws"]


class HeldDraws(Protocol):
    """
    Where the local sites of a guide begin in each of a step's leading rows.

    :ivar count: how many rows there are.
    :ivar names: the discrete sites that stay where they begin.
    """

    count: int
    names: frozenset[str]

    def begin(self, msg: Message, rows: range, draw: Callable[[], Tensor]) -> Tensor:
        """
        The value of a held site in some rows of the first run; for another site the coordinate of
        a draw, with what rows have in common.

        :param draw: draws a coordinate of its own.
        """

    def again(self, msg: Message, rows: range) -> Tensor | None:
        """The value of a held site, for a further run; None for another site."""
