"""Cache the analyses of a model and guide, by one key, on one schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

from pyro import poutine

from pyro_mcvae.ops.checks import WarnOnce
from pyro_mcvae.ops.tensors import add_guard, is_due, is_recording
from pyro_mcvae.programs.fingerprint import Fingerprint
from pyro_mcvae.programs.isolation import rewindable
from pyro_mcvae.programs.outside_values import (
    Dependencies,
    ExecutedCode,
    GeneratorStates,
    attribute,
)
from pyro_mcvae.programs.run import Arguments, Programs
from pyro_mcvae.programs.types import Program

_logger = logging.getLogger(__name__)

# The number of pairs, of analyses and calls of a pair, and of states of one call, that are kept.
# The least recent one is dropped.
_MAX_PAIRS, _MAX_ANALYSES, _MAX_STATES = 8, 1024, 4
# The fingerprint of an analysis whose runs were made elsewhere, so that it is not known.
_UNKNOWN = 0
# The number of findings in an analysis; the oldest are dropped, for runs with many sizes.
_MAX_FINDINGS = 1024

# Findings about how several particles run, which a run needs before its fingerprint is known.
HOW_RUNS = ("way", "nesting", "sums")
# Whether the entries of index tensors stay in place, for the guards of a recording.
_POSITIONS = "positions"

T = TypeVar("T")

# The key of a finding: its kind, then its subject.
Key = tuple[Any, ...]


class Analysis:
    """
    The findings about one model and guide that execute the same operations.

    :param before: the analysis that this one replaces, if it is of the same operations.
    :param is_unsure: whether this is still to be found out. Then a use at which no fresh analysis
        is due has the same findings, and any other one the same vectorization.
    :ivar fingerprint: of the first run of each use; None before its first run.
    :ivar unsure: the number of uses that needed a fingerprint, since something had changed.
    """

    def __init__(self, before: Analysis | None = None, is_unsure: bool = False) -> None:
        self.uses: int = 1 if before is None else before.uses + 1
        self.fingerprint: int | None = None if before is None else before.fingerprint
        self.unsure: int = is_unsure + (0 if before is None else before.unsure)
        self._findings: dict[Key, Any] = {}
        self._before = {} if before is None else before._findings
        self._since = self.uses
        self._replaced = 0 if before is None else self.uses - before._since
        if before is not None and is_unsure:
            fresh = is_due(self.uses)
            findings = self._before.items()
            self._findings = {k: v for k, v in findings if k[0] in HOW_RUNS or not fresh}
            if not fresh:
                self._before, self._since = before._before, before._since
                self._replaced = before._replaced

    @property
    def is_new(self) -> bool:
        """Return whether it was made in this use, whose first run may be repeated."""
        return self.uses == self._since

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

    def latest(self, key: Key) -> Any:
        """Return the finding of a key in this analysis, or else in the previous one."""
        return self._findings.get(key, self._before.get(key))

    def put(self, key: Key, value: object) -> None:
        """Store a finding."""
        if len(self._findings) >= _MAX_FINDINGS:
            self._findings.pop(next(iter(self._findings)))
        self._findings[key] = value

    def forget(self, kind: str) -> None:
        """Delete the findings whose key begins with ``kind``."""
        for key in [k for k in self._findings if k[0] == kind]:
            del self._findings[key]


class _Watch(NamedTuple):
    """
    The values that a call of the programs reads.

    :ivar has_more: whether it also reads values that cannot be compared: from tensors, iterators
        or random number generators of Python and NumPy.
    :ivar fingerprint: of the operations that were executed with these values.
    """

    floats: tuple[float, ...]
    values: Dependencies
    has_more: bool
    fingerprint: int

    def covers(self, call: Arguments) -> bool:
        """Return whether a call reads the same values, so that it executes the same operations."""
        # A recording has tensors instead of floats, and guards for all values that it reads.
        same = is_recording() or (self.floats == call.floats and not self.has_more)
        return same and self.values.changed(tensors=False) is None


@dataclass
class _Use:
    """
    One call of the programs.

    :ivar is_known: whether it executes what the analysis was made for.
    :ivar is_covered: whether nothing that it reads has changed.
    :ivar has_run: whether its runs have had their fingerprint taken.
    """

    pair: _Pair
    analysis: Analysis
    is_known: bool
    is_covered: bool
    has_run: bool = False


class _Pair:
    """
    One model and guide, with an analysis for each set of operations that they execute.

    :param like: the last pair of the same code. A loop may make one at each step, such as
        ``poutine.condition(model, ...)``. It begins with the analyses of that pair, because these
        belong to operations; the 2nd, 4th, 8th, ... of them begins without.
    """

    def __init__(self, pair: tuple[Program, Program], like: _Pair | None) -> None:
        self.programs = pair
        self._nth: int = 1 if like is None else like._nth + 1
        self._analyses: dict[int, Analysis] = {}  # the most recent is the last
        if like is not None and not is_due(self._nth):
            self._analyses |= {f: a for f, a in like._analyses.items() if f != _UNKNOWN}
        self._watches: dict[Hashable, list[_Watch]] = {}
        self._last: _Use | None = None
        self.read: Dependencies | None = None  # by the last run that was watched
        self.derived: dict[Hashable, Program] = {}

    def begin(self, call: Arguments) -> _Use:
        """Return the analysis of a call, or the most recent one if something has changed."""
        last, self._last = self._last, None
        if last is not None and not (last.is_known or last.has_run):
            # Its runs were made elsewhere, so that only fresh analyses notice changes.
            self.end(last, last.analysis.fingerprint or _UNKNOWN, None, None)
        watches = [w for w in self._watches.get(call.key, ()) if w.fingerprint in self._analyses]
        watch = next((w for w in watches if w.covers(call)), None)
        if is_recording() and watches and len({w.fingerprint for w in watches}) == 1:
            watch = watches[0]  # nothing has changed since the uncompiled step before it
        if not self._analyses:
            self._last = _Use(self, Analysis(), is_recording(), False)
            return self._last
        if watch is None and is_recording() and len(self._analyses) > 1:
            raise OutdatedAnalysisError
        fingerprint = next(reversed(self._analyses)) if watch is None else watch.fingerprint
        analysis = self._analyses[fingerprint]
        if is_recording() or (watch is not None and not is_due(analysis.uses + 1)):
            analysis.uses += not is_recording()
            self._keep(analysis)
            return _Use(self, analysis, True, True)
        self._last = _Use(self, Analysis(analysis, watch is None), False, watch is not None)
        return self._last

    def end(self, use: _Use, fingerprint: int, watch: _Watch | None, key: Hashable) -> bool:
        """Return whether a run of a use has executed what its analysis was made for."""
        analysis = use.analysis
        # A change of something that is not watched makes a new analysis, with a warning.
        surprise = analysis.is_new and use.is_covered
        if analysis.fingerprint in (None, _UNKNOWN, fingerprint) or surprise:
            self.drop(analysis)
            analysis.fingerprint, use.is_known = fingerprint, True
            self._keep(analysis)
            if watch is not None:
                watches = [watch, *self._watches.pop(key, ())]
                self._watches[key] = watches[:_MAX_STATES]
                _drop_first(self._watches)
            return True
        other = self._analyses.get(fingerprint)
        use.analysis, use.is_known = other or Analysis(), other is not None
        if other is not None:
            other.uses += 1
            self._keep(other)
        return False

    def drop(self, analysis: Analysis) -> None:
        """Remove an analysis until another run has its fingerprint taken."""
        self._analyses.pop(cast("int", analysis.fingerprint), None)
        analysis.fingerprint = None

    def _keep(self, analysis: Analysis) -> None:
        if analysis.fingerprint is not None:
            self._analyses.pop(analysis.fingerprint, None)
            self._analyses[analysis.fingerprint] = analysis
            _drop_first(self._analyses)


def _drop_first(items: dict[Any, Any]) -> None:
    if len(items) > _MAX_ANALYSES:
        items.pop(next(iter(items)))


class OutdatedAnalysisError(Exception):
    """A step that is being recorded reads other values than the uncompiled steps before it."""


_ITERATOR = (
    "the model or guide reads an iterator (%s): it also runs to be analyzed, and the items that it "
    "takes then are not seen by a training step. Pass the items as an argument"
)


def _code_of(pair: tuple[Program, Program]) -> tuple[int, ...]:
    """Return the ids of the code that programs share if each step of a loop makes them."""
    return tuple(id(attribute(p, "__code__", p)) for p in map(poutine.unwrap, pair))


class Analyses:
    """
    The analyses of the models and guides that an objective was used with recently.

    An analysis belongs to the operations that the programs execute (:class:`.Fingerprint`). As long
    as nothing has changed that they read (arguments, globals, closures, attributes), they execute
    the same. Otherwise, or if they read values of tensors, the first run of the step has its
    fingerprint taken. If it is another one, the run is repeated with the analysis of that
    fingerprint. Findings are stored by the sites of a run with their sizes. A fresh analysis is
    made at uses 2, 4, 8, ..., 1024, and then at every 1024th use.
    """

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []
        self._uses: WeakKeyDictionary[Programs, _Use] = WeakKeyDictionary()
        self._warn = WarnOnce(_logger)

    @property
    def num_pairs(self) -> int:
        """Return the number of model-guide pairs that the objective was used with recently."""
        # A model under a handler is the same model.
        return len({tuple(map(poutine.unwrap, pair.programs)) for pair in self._pairs})

    def __getstate__(self) -> dict[str, object]:
        # Programs are often local functions, which cannot be pickled; they are analyzed again.
        return {"_warn": self._warn}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)

    def of(self, programs: Programs) -> Analysis:
        """Return the analysis of the programs; one call counts as one use."""
        return self._use(programs).analysis

    def run(self, programs: Programs, kind: Hashable, execute: Callable[[], T]) -> T | None:
        """
        Run the programs, and check that they execute what their analysis was made for.

        :param kind: distinguishes runs with and without leading dims.
        :returns: the result; None if they executed something else. Their analysis is then another
            one, and the run has to be repeated.
        """
        use = self._use(programs)
        if not use.is_known:
            return self._run_watched(programs, kind, execute)
        if is_recording() and (expected := use.analysis.get((_POSITIONS, kind))):
            return self._run_guarded(programs, expected, execute)
        return execute()

    def _run_watched(
        self, programs: Programs, kind: Hashable, execute: Callable[[], T]
    ) -> T | None:
        """Execute a run and compare its fingerprint with that of the analysis."""
        use, call = self._use(programs), programs.call
        seen, executed, roots = Fingerprint(), ExecutedCode(), (*programs.pair, *call.objects)
        # Before the first run it is not known which functions are executed.
        known = use.pair.read or programs.read
        use.has_run = True
        collects = use.pair.read is None or use.analysis.is_new or is_due(use.analysis.unsure)
        constants = [*call.objects, *known.values()]
        generators = GeneratorStates(known) if collects else None
        with seen.of_run(), executed if collects else nullcontext():
            result = execute()
        if collects:
            known = Dependencies.of(*roots, executed=executed)
            constants += [entry.value for entry in known.entries]
            use.pair.read = known
        fingerprint = hash((kind, seen.value(constants)))
        watch = None
        if generators is not None:
            more = seen.reads or known.unsupported or known.generators or generators.moved()
            watch = _Watch(call.floats, known, bool(more), fingerprint)
        is_same = use.pair.end(use, fingerprint, watch, call.key)
        use.analysis.put((_POSITIONS, kind), seen.positions())
        return result if is_same else None

    def _run_guarded(self, programs: Programs, expected: list[bool], execute: Callable[[], T]) -> T:
        """Execute a run, and add a guard for each of its index tensors."""
        seen, known = Fingerprint(), self._use(programs).pair.read or programs.read
        with seen.of_run():
            result = execute()
        seen.finish([*programs.call.objects, *known.values()])
        for in_place, was in zip(seen.in_place, expected, strict=True):
            add_guard(in_place if was else ~in_place)
        return result

    def rewindable(
        self, programs: Programs, active: bool
    ) -> AbstractContextManager[Callable[[], bool]]:
        """
        Return a context for runs that may be repeated: see :func:`.rewindable`.

        :param active: whether they may be, although the operations are those of the analysis.
        """
        use = self._use(programs)
        active = active or (not is_recording() and (use.analysis.is_new or not use.is_known))
        return rewindable(active, self.read(programs) if active and not is_recording() else None)

    def read(self, programs: Programs) -> Dependencies:
        """Return the values outside the programs that they read, and in their arguments."""
        read = self._use(programs).pair.read
        if read is None:
            return programs.read
        if read.iterator:
            self._warn(_ITERATOR % read.iterator)
        return read.with_arguments(*programs.args, *programs.kwargs.values())

    def derived(self, programs: Programs, key: Hashable, make: Callable[[], Program]) -> Program:
        """Return a program derived from this model and guide, kept as long as these."""
        derived = self._use(programs).pair.derived
        if key not in derived:
            derived[key] = make()
        return derived[key]

    def renew(self, programs: Programs) -> bool:
        """Begin an analysis for a call that may execute other operations; return whether it may."""
        use = self._use(programs)
        if use.is_known or is_recording():
            return False
        use.analysis = Analysis()
        return True

    def forget_run(self, programs: Programs) -> None:
        """Take the fingerprint of the next run, which a new finding lays out in another way."""
        use = self._use(programs)
        if not is_recording():
            use.pair.drop(use.analysis)
            use.is_known = False

    def _use(self, programs: Programs) -> _Use:
        if programs in self._uses:
            return self._uses[programs]
        if not self._pairs or self._pairs[0].programs != programs.pair:
            self._put_first(programs.pair)
        use = self._uses[programs] = self._pairs[0].begin(programs.call)
        return use

    def _put_first(self, programs: tuple[Program, Program]) -> None:
        pair = next((p for p in self._pairs if p.programs == programs), None)
        others, code = [p for p in self._pairs if p is not pair], _code_of(programs)
        like = next((p for p in others if _code_of(p.programs) == code), None)
        self._pairs = [pair or _Pair(programs, like), *others][:_MAX_PAIRS]
