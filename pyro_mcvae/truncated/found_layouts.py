"""What was found of the programs that a truncated posterior was called with, kept for the next."""

from __future__ import annotations

from collections.abc import Callable

from pyro_mcvae.ops import ranks
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.types import Program
from pyro_mcvae.truncated.searched_sites import Layouts, find_layouts

__all__ = ["FoundLayouts"]

# An objective's and one's own questions; others come and go.
_KEPT = 4


class FoundLayouts:
    """The layouts of a few programs, the latest first; of a copy they are found again."""

    def __init__(self) -> None:
        self._found: list[tuple[object, Layouts]] = []

    def __getstate__(self) -> dict[str, object]:
        return {"_found": []}

    def of(
        self,
        model: Program,
        guide: Program | None,
        sampler: ParticleSampler,
        arguments: tuple[tuple[object, ...], dict[str, object]],
        sharded: bool,
        prepare: Callable[[Layouts], None],
    ) -> Layouts:
        """
        The layouts of a model, and of the guide of its other latents.

        :param prepare: called with new ones, before they are kept.
        """
        # A guide may have been called before its process joined others.
        place = (ranks.rank(), ranks.num_ranks()) if sharded else ()
        key = (model, guide, sampler, *place)
        for known, layouts in self._found:
            if known == key:
                return layouts
        layouts = find_layouts(sampler, model, guide, *arguments)
        prepare(layouts)
        self._found = [(key, layouts), *self._found[: _KEPT - 1]]
        return layouts

    def forget(self) -> None:
        """Know of no programs."""
        self._found = []
