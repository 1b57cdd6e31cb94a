"""What is known of a model and guide: one cache, one key, one timetable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from pyro_mcvae.ops.tensors import is_recording
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.types import Program

_logger = logging.getLogger(__name__)

# How many pairs, and how many keys of one pair, are kept; the one used longest ago goes.
_MAX_PAIRS, _MAX_KEYS = 8, 64
# An analysis is made again at uses 2, 4, 8, ..., up to the second, and then every so many uses.
_AT_LEAST_EVERY = 1024
# A choice that has had more values than this counts anything (steps, documents): its values are
# then no part of the key, and only the timetable notices what depends on them.
_MAX_VALUES = 8
# Within an analysis, findings about runs of ever new sizes: the oldest are forgotten.
_MAX_FINDINGS = 1024

T = TypeVar("T")

# A finding is known by its kind and what it is of.
Key = tuple[Any, ...]


class Analysis:
    """
    What is known of one model and guide under one key.

    :param before: the analysis that this one replaces.
    """

    def __init__(self, before: Analysis | None = None) -> None:
        self.uses: int = 1 if before is None else before.uses
        self._findings: dict[Key, Any] = {}
        self._counts: dict[str, int] = {} if before is None else dict(before._counts)
        self._before = {} if before is None else before._findings
        self._since = self.uses
        self._replaced = 0 if before is None else self.uses - before._since
        self._next: int = 2 if before is None else before._next + min(before._next, _AT_LEAST_EVERY)

    @property
    def is_new(self) -> bool:
        """Whether it was made in this use, whose first run may have to be made again."""
        return self.uses == self._since

    @property
    def is_due(self) -> bool:
        """Whether it is time to make a fresh analysis."""
        return self.uses >= self._next

    def once(self, key: Key, find: Callable[[], T]) -> T:
        """Return what ``find`` finds, which is called at the first use of ``key``."""
        if key not in self._findings:
            self.put(key, find())
        return cast("T", self._findings[key])

    def compared(self, key: Key, find: Callable[[], T]) -> T:
        """As :meth:`once`, with a warning if the analysis before had found something else."""
        if key not in self._findings:
            found = self.once(key, find)
            if self.before(key, found) != found:
                _logger.warning(
                    "the model or guide has other dependencies, or runs its particles in another "
                    "way, than %d steps ago, though its arguments, attributes and sizes are the "
                    "same: up to so many steps used what no longer holds. Pass what decides it as "
                    "an argument or attribute, or use a new loss object",
                    self._replaced,
                )
        return cast("T", self._findings[key])

    def get(self, key: Key, default: Any = None) -> Any:
        """Return what was put under the key."""
        return self._findings.get(key, default)

    def before(self, key: Key, default: Any = None) -> Any:
        """Return what the analysis that this one replaces had under the key."""
        return self._before.get(key, default)

    def put(self, key: Key, value: object) -> None:
        """Keep a finding."""
        if len(self._findings) >= _MAX_FINDINGS:
            self._findings.pop(next(iter(self._findings)))
        if key not in self._findings:
            self._counts[key[0]] = self._counts.get(key[0], 0) + 1
        self._findings[key] = value

    def count(self, kind: str) -> int:
        """Return how many findings there were, in all analyses, whose key begins with ``kind``."""
        return self._counts.get(kind, 0)

    def forget(self, kind: str) -> None:
        """Drop the findings whose key begins with ``kind``."""
        for key in [k for k in self._findings if k[0] == kind]:
            del self._findings[key]


class _Pair:
    """One model and guide, with an analysis for each key."""

    def __init__(self, pair: tuple[Program, Program]) -> None:
        self.programs = pair
        self._by_key: dict[Hashable, Analysis] = {}
        self._values: dict[str, set[Hashable]] = {}

    def of(self, programs: Programs) -> Analysis:
        if is_recording() and self._by_key:
            # Plain steps of the same kind come before one that is recorded.
            return next(reversed(self._by_key.values()))
        key = self._key(programs)
        found = self._by_key.pop(key, None)
        if found is None:
            found = Analysis()
        else:
            found.uses += 1
            if found.is_due and not is_recording():
                found = Analysis(found)
        self._by_key[key] = found  # the latest is the last
        if len(self._by_key) > _MAX_KEYS:
            self._by_key.pop(next(iter(self._by_key)))
        return found

    def _key(self, programs: Programs) -> Hashable:
        parts = []
        for place, value in programs.choices.items():
            values = self._values.setdefault(place, set())
            if len(values) <= _MAX_VALUES:
                values.add((type(value), value))  # True is no 1
            parts.append((place, type(value), None if len(values) > _MAX_VALUES else value))
        return tuple(parts)


class Analyses:
    """
    The analyses of the models and guides that an objective was used with last.

    The key of an analysis is complete: the two programs, every argument, attribute, closure and
    global that is no tensor, and the modules' training modes. Findings inside it are kept by
    the sites of a run with their sizes. For what else may decide the structure of a program (a
    tensor's value, a file), a fresh analysis is made at uses 2, 4, 8, ..., 1024, and at every
    1024th from there on.
    """

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []

    @property
    def num_pairs(self) -> int:
        """With how many models and guides the objective was used, of the last few."""
        return len(self._pairs)

    def __getstate__(self) -> dict[str, object]:
        # Programs are often local functions, which cannot be pickled; they are analysed again.
        return {"_pairs": []}

    def of(self, programs: Programs) -> Analysis:
        """Return the analysis of the programs, which one call uses once."""
        return programs.once(self, lambda: self._find(programs))

    def _find(self, programs: Programs) -> Analysis:
        if not self._pairs or self._pairs[0].programs != programs.pair:
            pair = next((p for p in self._pairs if p.programs == programs.pair), None)
            others = [p for p in self._pairs if p is not pair]
            self._pairs = [pair or _Pair(programs.pair), *others][:_MAX_PAIRS]
        return self._pairs[0].of(programs)
