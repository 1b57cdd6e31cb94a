"""What a model draws apart from its sites, as dropout does: the same numbers again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyro_mcvae.ops.generators import Generators
from pyro_mcvae.ops.recording import refuse

__all__ = ["ModelNoise"]


class ModelNoise:
    """
    The numbers that one run of a model draws apart from its sites.

    A chain is annealed along one density: with other numbers at each of its states the weight
    would be that of no density, and too small.

    Made where the model begins; :meth:`settle` where it ends.
    """

    def __init__(self) -> None:
        self._before = Generators()
        self._draws = False

    def settle(self) -> None:
        """See whether there are such numbers."""
        self._draws = self._before.have_moved()

    @contextmanager
    def again(self) -> Iterator[None]:
        """A run of the model with the same numbers, which leaves the generators as they are."""
        if not self._draws:
            yield
            return
        now = Generators()
        self._before.put_back()
        try:
            yield
            # Not where the first run drew a minibatch only.
            drew = self._before.have_moved()
        finally:
            now.put_back()
        if drew:
            refuse(
                "the model draws random numbers apart from its sites, dropout say, which stay the "
                "same along a chain"
            )
