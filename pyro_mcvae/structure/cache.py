"""What was found out about programs, as long as there is no sign that they have changed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from torch import nn

from pyro_mcvae.ops.recording import is_recording
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.modules import find_modules
from pyro_mcvae.programs.types import Program

__all__ = ["PairCache", "StructureCache"]

_logger = logging.getLogger(__name__)

# Programs of stochastic structure can show ever new structures; the oldest are forgotten.
_MAX_STRUCTURES = 256
# How many pairs of programs share one objective before the one used longest ago is forgotten.
_MAX_PAIRS = 8
# After so many uses what was found is looked at again, then after twice as many, up to the second.
_AGAIN, _AT_LEAST_EVERY = 16, 1024

T = TypeVar("T")


class PairCache(Generic[T]):
    """
    One object for each pair of programs, of those that were used last.

    :param make: makes it for a pair that was not seen, or seen with modules in evaluation mode of
        which one trains now: dropout then draws numbers that nobody has looked at.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._pairs: list[_Pair[T]] = []

    def __getstate__(self) -> dict[str, object]:
        # Programs are often local functions, which cannot be pickled; they are looked at again.
        return {"_make": self._make, "_pairs": []}

    def of(self, programs: Programs) -> T:
        """The object of a pair."""
        if not self._pairs or not self._pairs[0].is_of(programs):
            self._to_front(programs)
        return self._pairs[0].found

    def _to_front(self, programs: Programs) -> None:
        pair = next((p for p in self._pairs if p.is_of(programs)), None)
        others = [p for p in self._pairs if p.programs != programs.pair]
        self._pairs = [pair or _Pair(programs, self._make()), *others][:_MAX_PAIRS]


class _Pair(Generic[T]):
    """
    A pair of programs.

    :ivar found: what is kept of them.
    """

    def __init__(self, programs: Programs, found: T) -> None:
        self.programs, self.found = programs.pair, found
        resting = programs.once(_resting, lambda: _resting(*programs.pair))
        self._resting = [weakref.ref(module) for module in resting]

    def is_of(self, programs: Programs) -> bool:
        """Whether these are the programs, and no module of theirs trains that did not."""
        return self.programs == programs.pair and not any(map(_trains, self._resting))


def _resting(*programs: Program) -> list[nn.Module]:
    """The programs' modules in evaluation mode."""
    modules = (m for root in find_modules(*programs) for m in root.modules())
    return [m for m in modules if not m.training]


def _trains(ref: weakref.ref[nn.Module]) -> bool:
    module = ref()
    return module is not None and module.training


class StructureCache(Generic[T]):
    """
    Findings about pairs of programs, by the sites and plates that a run of them shows.

    The same sites can come to depend on each other in another way. Flags (bool and str arguments,
    attributes, closures) count as signs of that; for what else may decide it (a counter, say) the
    programs are looked at again from time to time.
    """

    def __init__(self) -> None:
        self._pairs: PairCache[dict[Hashable, _Finding[T]]] = PairCache(dict)

    def of(
        self, programs: Programs, signature: Hashable, find: Callable[[], T], renew: bool = True
    ) -> T:
        """
        What ``find`` finds out about the programs.

        :param signature: what a run of them shows.
        :param bool renew: whether this is a use that may look again. One in the middle of a step
            may not: a checkpoint would run it a second time without that look.
        """
        found = self._pairs.of(programs)
        key = signature, programs.flags
        finding = found.get(key)
        if finding is None:
            finding = _added(found, key, _Finding(find()))
        elif renew and finding.used_often():
            programs.forget()
            finding.renew(find())
        return finding.value


def _added(found: dict[Hashable, _Finding[T]], key: Hashable, finding: _Finding[T]) -> _Finding[T]:
    if len(found) >= _MAX_STRUCTURES:
        found.pop(next(iter(found)))
    found[key] = finding
    return finding


class _Finding(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value
        self._uses, self._next = 1, _AGAIN

    def renew(self, value: T) -> None:
        if value != self.value:
            _logger.warning(
                "the programs show the same sites as before, but their dependencies have "
                "changed: say so by a bool or str argument or attribute, on which they are "
                "looked at again at once, or use a new loss object"
            )
        self.value = value

    def used_often(self) -> bool:
        """Count one use; whether it is time to look again."""
        self._uses += 1
        if self._uses < self._next or is_recording():
            return False
        self._next += min(self._next, _AT_LEAST_EVERY)
        return True
