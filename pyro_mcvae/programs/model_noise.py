"""What a model draws apart from its sites, as dropout does: the same numbers again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from pyro_mcvae.ops.generators import Generators
from pyro_mcvae.ops.recording import refuse


class ModelNoise:
    """
    The numbers that a model draws apart from its sites: those of its first run, in every run.

    A chain is annealed along one density: with other numbers at each of its states the weight
    would be that of no density, and too small.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._before: Generators | None = None  # of a run that drew some

    def of_run(self) -> AbstractContextManager[None]:
        """Around a run of the model: the first one shows its numbers, which others then draw."""
        if not self._is_known:
            return self._shown()
        return nullcontext() if self._before is None else self._again(self._before)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        before = Generators()
        yield
        self._is_known, self._before = True, before if before.have_moved() else None

    @contextmanager
    def _again(self, before: Generators) -> Iterator[None]:
        """The same numbers, and the generators as they are."""
        now = Generators()
        before.put_back()
        try:
            yield
            # Not where the first run drew a minibatch only.
            drew = before.have_moved()
        finally:
            now.put_back()
        if drew:
            refuse(
                "the model draws random numbers apart from its sites, dropout say, which stay the "
                "same along a chain"
            )
