"""Draws of a guide that no chain moves, as of discrete sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pyro_mcvae.programs.messengers import SampleFn
from pyro_mcvae.programs.types import Message

__all__ = ["HeldDraws", "holding"]


class HeldDraws(Protocol):
    """
    Values of some local sites of a guide, in each of a step's leading rows, that stay as they are.

    :ivar count: how many rows there are.
    :ivar names: the sites.
    """

    count: int
    names: frozenset[str]

    def draw(self, msg: Message, rows: range) -> Tensor | None:
        """The value of a held site in some rows of the first run; None for another site."""

    def again(self, msg: Message, rows: range) -> Tensor | None:
        """The same value, for a further run."""

    def shared(self, msg: Message, at: Tensor, rows: range) -> Tensor:
        """A draw of another site, with what rows have in common."""


def holding(
    held: Callable[[Message, range], Tensor | None], sample_fn: SampleFn, rows: range
) -> SampleFn:
    """
    Gives held sites their values, and the others what ``sample_fn`` says.

    :param held: :meth:`HeldDraws.draw`, or :meth:`HeldDraws.again`.
    """

    def give(msg: Message) -> Tensor | None:
        value = held(msg, rows)
        return sample_fn(msg) if value is None else value

    return give
