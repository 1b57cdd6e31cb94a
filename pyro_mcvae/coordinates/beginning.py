"""Where the local sites of a guide begin: at draws of its own, or at what is given."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pyro_mcvae.coordinates.coordinate import Coordinate
from pyro_mcvae.programs.errors import NoCoordinateError
from pyro_mcvae.programs.types import Message


class Beginning:
    """
    Where the sites of a guide begin in each of a step's leading rows: at draws of the guide's.

    :ivar count: how many rows there are; None for as many as there are particles.
    :ivar held: the discrete sites that stay where they begin.
    """

    count: int | None = None
    held: frozenset[str] = frozenset()

    def begin(self, msg: Message, rows: range, coordinate: Coordinate) -> Tensor:
        """The coordinate of a site in some rows of the first run."""
        return coordinate.draw()

    def again(self, msg: Message, rows: range) -> Tensor | None:
        """The coordinate of a held site, for a further run; None for another site."""
        return None


class GivenLatents(Beginning):
    """
    Given values, the same in all rows, and draws of other sites.

    :param values: by site, in the shape of a run without particles.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values

    def begin(self, msg: Message, rows: range, coordinate: Coordinate) -> Tensor:
        """
        :raises NoCoordinateError: naming a site at which the coordinate of a value is not known.
        """
        value = self._values.get(msg["name"])
        return coordinate.draw() if value is None else _given_at(msg, coordinate, value)


def _given_at(msg: Message, coordinate: Coordinate, value: Tensor) -> Tensor:
    try:
        at = coordinate.at(value.expand(msg["fn"].shape()))
    except NoCoordinateError as error:
        raise NoCoordinateError(
            f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) cannot begin at a given "
            f"value in these coordinates ({error}): use coordinates='latent'"
        ) from error
    return at.detach().expand(tuple(msg["fn"].batch_shape) + coordinate.event_shape).clone()
