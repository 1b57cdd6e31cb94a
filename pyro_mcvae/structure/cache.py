"""Cache the analyses of a model and guide, by one key, on one schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from pyro import poutine

from pyro_mcvae.ops.tensors import is_recording
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.types import Program

_logger = logging.getLogger(__name__)

# The number of pairs, and of keys per pair, that are kept; the least recently used is dropped.
_MAX_PAIRS, _MAX_KEYS = 8, 64
# An analysis is repeated at uses 2, 4, 8, ..., and then at every multiple of this number.
_AT_LEAST_EVERY = 1024
# A choice with more values than this is a counter (of steps, documents). Its values are then not
# part of the key, and only repeated analyses detect a dependence on them.
_MAX_VALUES = 8
# The number of findings in an analysis; the oldest are dropped, for runs with many sizes.
_MAX_FINDINGS = 1024

T = TypeVar("T")

# The key of a finding: its kind, then its subject.
Key = tuple[Any, ...]


class Analysis:
    """
    The findings about one model and guide under one key.

    :param before: the analysis that this one replaces.
    """

    def __init__(self, before: Analysis | None = None) -> None:
        self.uses: int = 1 if before is None else before.uses
        self._findings: dict[Key, Any] = {}
        self._before = {} if before is None else before._findings
        self._since = self.uses
        self._replaced = 0 if before is None else self.uses - before._since
        self._next: int = 2 if before is None else before._next + min(before._next, _AT_LEAST_EVERY)

    @property
    def is_new(self) -> bool:
        """Return whether it was made in this use, whose first run may be repeated."""
        return self.uses == self._since

    @property
    def is_due(self) -> bool:
        """Return whether a fresh analysis is due."""
        return self.uses >= self._next

    def cached(self, key: Key, find: Callable[[], T]) -> T:
        """Return the finding of ``key``, computed by ``find`` at its first use."""
        if key not in self._findings:
            self.put(key, find())
        return cast("T", self._findings[key])

    def compared(self, key: Key, find: Callable[[], T]) -> T:
        """Return the finding of ``key``, with a warning if the previous analysis had another."""
        if key not in self._findings:
            finding = self.cached(key, find)
            if self.before(key, finding) != finding:
                _logger.warning(
                    "the dependencies of the model or guide, or how its particles run, differ from "
                    "those %d steps ago, though its arguments, attributes and sizes are the same: "
                    "up to that many steps used an outdated analysis. Pass the value that decides "
                    "this as an argument or attribute, or use a new loss object",
                    self._replaced,
                )
        return cast("T", self._findings[key])

    def get(self, key: Key, default: Any = None) -> Any:
        """Return the finding of a key."""
        return self._findings.get(key, default)

    def before(self, key: Key, default: Any = None) -> Any:
        """Return the finding of a key in the previous analysis."""
        return self._before.get(key, default)

    def put(self, key: Key, value: object) -> None:
        """Store a finding."""
        if len(self._findings) >= _MAX_FINDINGS:
            self._findings.pop(next(iter(self._findings)))
        self._findings[key] = value

    def forget(self, kind: str) -> None:
        """Delete the findings whose key begins with ``kind``."""
        for key in [k for k in self._findings if k[0] == kind]:
            del self._findings[key]


class _Pair:
    """One model and guide, with an analysis for each key."""

    def __init__(self, pair: tuple[Program, Program]) -> None:
        self.programs = pair
        self._by_key: dict[frozenset[Hashable], Analysis] = {}
        self._values: dict[str, set[Hashable]] = {}

    def of(self, programs: Programs) -> Analysis:
        if is_recording() and self._by_key:
            # The uncompiled steps before a recorded step have made the analysis.
            return next(reversed(self._by_key.values()))
        key = self._key(programs)
        analysis = self._by_key.pop(key, None) or self._pop_first(key)
        if analysis is None:
            analysis = Analysis()
        else:
            analysis.uses += 1
            if analysis.is_due and not is_recording():
                analysis = Analysis(analysis)
        self._by_key[key] = analysis  # the most recent is the last
        if len(self._by_key) > _MAX_KEYS:
            self._by_key.pop(next(iter(self._by_key)))
        return analysis

    def _pop_first(self, key: frozenset[Hashable]) -> Analysis | None:
        """
        Remove and return the analysis of a first call that only made modules, as AutoGuides do.

        A second use has a fresh analysis in any case.
        """
        for first, analysis in self._by_key.items() if len(self._by_key) == 1 else ():
            if analysis.uses == 1 and first < key:
                return self._by_key.pop(first)
        return None

    def _key(self, programs: Programs) -> frozenset[Hashable]:
        parts = []
        for place, value in programs.choices.items():
            values = self._values.setdefault(place, set())
            if len(values) <= _MAX_VALUES:
                values.add((type(value), value))  # True differs from 1
            parts.append((place, type(value), None if len(values) > _MAX_VALUES else value))
        return frozenset(parts)


class Analyses:
    """
    The analyses of the models and guides that an objective was used with recently.

    The key of an analysis is the two programs, every argument, attribute, closure and global that
    is not a tensor, and the modules' training modes. Its findings are stored by the sites of a run
    with their sizes. The structure of a program may also depend on other things (a tensor's value,
    a file). So a fresh analysis is made at uses 2, 4, 8, ..., 1024, and then at every 1024th use.
    """

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []

    @property
    def num_pairs(self) -> int:
        """Return the number of model-guide pairs that the objective was used with recently."""
        # A model under a handler is the same model.
        return len({tuple(map(poutine.unwrap, pair.programs)) for pair in self._pairs})

    def __getstate__(self) -> dict[str, object]:
        # Programs are often local functions, which cannot be pickled; they are analyzed again.
        return {"_pairs": []}

    def of(self, programs: Programs) -> Analysis:
        """Return the analysis of the programs; one call counts as one use."""
        return programs.cached(self, lambda: self._find(programs))

    def _find(self, programs: Programs) -> Analysis:
        if not self._pairs or self._pairs[0].programs != programs.pair:
            pair = next((p for p in self._pairs if p.programs == programs.pair), None)
            other_pairs = [p for p in self._pairs if p is not pair]
            self._pairs = [pair or _Pair(programs.pair), *other_pairs][:_MAX_PAIRS]
        return self._pairs[0].of(programs)
