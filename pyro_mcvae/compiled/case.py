"""One kind of call of a loss: when it is recorded, replayed, compared, and given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

import pyro
import torch
from torch import Tensor

from pyro_mcvae.compiled.agreement import check_kernels, differing, is_due, perturbed
from pyro_mcvae.compiled.backends import Backend
from pyro_mcvae.compiled.recording import NotUsable, Outcome, Recording, Run, record
from pyro_mcvae.compiled.refusal import NotRecordable
from pyro_mcvae.compiled.signature import Call
from pyro_mcvae.ops.generators import Generators
from pyro_mcvae.programs.errors import first_line
from pyro_mcvae.programs.executed_code import ExecutedCode
from pyro_mcvae.programs.outside_values import Dependencies

__all__ = ["Case"]

_logger = logging.getLogger(__name__)

# Programs make parameters and find out about themselves in their first steps.
_PLAIN_STEPS = 2
# Where it starts again and again with new parameters, at most after so many.
_MAX_WAIT = 64
# How many recordings of one kind of call are kept: of training and of evaluation mode, say.
_MAX_RECORDINGS = 4
# After so many comparisons that failed, or programs that changed at each step, it is given up.
_MAX_FAILURES, _MAX_UNSTABLE = 3, 16
# And after so many recordings that served for less than these steps each: one costs several steps.
_LEAST_USES = 4
# So many steps in a row that are not as any of them assumes, and one is recorded as they are now.
_MAX_MISSED = 4
# A recording takes as long as so many steps; from so many seconds on it is announced.
_STEPS_OF_A_RECORDING, _LONG = 100, 20
# A recording is compiled at its third use: one that serves once or twice is not worth it.
_COMPILED_FROM = 3

_MISSED = object()

Observed: TypeAlias = tuple[object, list[Tensor] | None, list[Tensor]]


class Side(Protocol):
    """How a step of one of a loss's functions is taken, and what it hands back."""

    def plain(self, call: Call) -> object:
        """As ever."""

    def observed(self, call: Call, recording: Recording) -> Observed:
        """As ever; also its results and its gradients, to be compared."""

    def handed(self, recording: Recording, outcome: Outcome) -> object:
        """What a recorded step computed."""


class Case:
    """
    Calls that differ in their tensors' values only.

    :param loss: whose calls they are.
    :param Side side: how it is called.
    """

    def __init__(
        self, loss: object, side: Side, backend: Backend, tell: Callable[[str], object]
    ) -> None:
        self._loss, self._side, self._backend, self._tell = loss, side, backend, tell
        self._recordings: list[Recording] = []
        self._plain_steps = self._failures = self._unstable = self._unusable = self._uses = 0
        self._missed_in_a_row = self._ways = self._made = 0
        self._changed, self._wait = "", _PLAIN_STEPS
        self._started_with: dict[str, Tensor] = {}
        self._seconds = 0.0
        self._seen: Dependencies | None = None
        self._executed, self._more = ExecutedCode(), ExecutedCode()
        self.refused = ""
        # Why floats cannot be inputs of its recordings, if so.
        self.fixed_floats = ""

    def take(self, call: Call) -> object:
        """One step."""
        if self.refused:
            return self._side.plain(call)
        missed = False
        for recording in tuple(self._recordings):
            if (changed := recording.changed()) is None:
                found = self._replayed(recording, call)
                if found is not _MISSED:
                    return found
                missed = True
            else:
                self._changed = changed
        if missed:
            return self._missed(call)
        if self._is_new_start():
            self._begin_again()
        if self._made >= _MAX_UNSTABLE and self._uses < _LEAST_USES * self._made:
            self._refuse(f"it is recorded again and again, since {self._changed} changes")
            return self._side.plain(call)
        if self._plain_steps >= self._wait and self._is_stable():
            return self._recorded(call)
        return self._watched(call)

    def _is_new_start(self) -> bool:
        """Whether parameters were cleared, or replaced, since the last plain step."""
        now = pyro.get_param_store()._params
        return any(now.get(name) is not value for name, value in self._started_with.items())

    def _begin_again(self) -> None:
        """Training starts anew: wait longer if recordings did not pay before, with short starts."""
        paid = self._uses >= _LEAST_USES * self._made
        self._wait = _PLAIN_STEPS if paid else min(2 * self._wait, _MAX_WAIT)
        self._recordings, self._seen, self._started_with = [], None, {}
        self._plain_steps = self._failures = self._unstable = self._unusable = self._uses = 0
        self._missed_in_a_row = self._ways = self._made = 0

    def _is_stable(self) -> bool:
        """Whether nothing has changed since the last plain step."""
        if self._seen is None:
            return False
        entry = self._seen.changed()
        if entry is None:
            return True
        self._unstable += 1
        if self._unstable > _MAX_UNSTABLE:
            self._refuse(
                f"{entry.name} is another at each step: pass it as an argument of the programs, "
                f"where floats may change"
            )
        return False

    def _watched(self, call: Call) -> object:
        self._plain_steps += 1
        begin = time.perf_counter()
        with ExecutedCode() as self._executed:
            found = self._side.plain(call)
        self._seconds = time.perf_counter() - begin
        self._executed.add(self._more)
        self._seen = Dependencies.of(call.model, call.guide, executed=self._executed)
        self._started_with = dict(pyro.get_param_store()._params)
        return found

    def _recorded(self, call: Call) -> object:
        generators, self._seen = Generators(), None
        self._made += 1
        if (seconds := _STEPS_OF_A_RECORDING * self._seconds) > _LONG:
            _logger.warning("recording a step once, which takes about %.0f s", seconds)
        try:
            recording, outcome = record(self._loss, call, self._executed)
        except NotUsable:
            self._more.add(self._executed)
            generators.put_back()
            return self._plain_instead(call)
        except NotRecordable as reason:
            generators.put_back()
            # With floats as inputs it is tried once more, with floats as they are.
            if any(type(a) is float and call.is_input(a) for a in call.leaves):
                self.fixed_floats = str(reason)
            self._refuse("" if self.fixed_floats else str(reason))
            return self._side.plain(call)
        self._recordings.insert(0, recording)
        del self._recordings[_MAX_RECORDINGS:]
        return self._side.handed(recording, outcome)

    def _replayed(self, recording: Recording, call: Call) -> object:
        recording.uses += 1
        self._uses += 1
        generators = Generators()
        compared = is_due(recording.uses)
        try:
            run = recording.graph if compared else self._run(recording, call)
            outcome = recording.replay(call, run)
        except RuntimeError as error:
            generators.put_back()
            self._failed(recording, f"its replay failed ({first_line(error)})")
            return self._side.plain(call)
        if compared:
            generators.put_back()
            return self._compared(recording, outcome, call, generators)
        if not outcome.is_usable():
            generators.put_back()
            return _MISSED
        self._missed_in_a_row = 0
        self._recordings.sort(key=lambda r: r is not recording)  # the first one to ask next time
        recording.commit(outcome)
        return self._side.handed(recording, outcome)

    def _missed(self, call: Call) -> object:
        """A step that takes another way than those recorded, or that is not finite."""
        self._missed_in_a_row += 1
        if self._missed_in_a_row <= _MAX_MISSED:
            return self._plain_instead(call)
        self._missed_in_a_row = 0
        self._ways += 1
        if self._ways > _MAX_RECORDINGS:
            self._refuse("steps take ever other ways: it depends on what is not seen")
            return self._side.plain(call)
        _logger.warning("a step is recorded anew, since steps take another way now")
        return self._recorded(call)

    def _run(self, recording: Recording, call: Call) -> Run:
        if recording.run is None:
            if recording.uses < _COMPILED_FROM and not self._backend.replays:
                return recording.graph
            recording.run = self._backend.compile(recording.graph, recording.inputs(call))
        return recording.run

    def _plain_instead(self, call: Call) -> object:
        """For steps that are not finite, or take another way than the recorded one."""
        self._unusable += 1
        if self._unusable >= 8 and 2 * self._unusable > self._uses:
            self._refuse("more than half of its steps take another way than the recorded one")
        return self._side.plain(call)

    def _compared(
        self, recording: Recording, outcome: Outcome, call: Call, begin: Generators
    ) -> object:
        found, results, gradients = self._side.observed(call, recording)
        after = Generators()
        if results is None:
            self._failed(recording, "it returns something else")
            return found
        usable = all(bool(r.isfinite()) for r in results)
        taken = outcome.assumed is None or bool(outcome.assumed)
        if usable and taken:
            updates = list(zip(recording.updates, outcome.updated, strict=True))
            held = [recording.constants[u.constant] for u, _ in updates]

            def moved() -> list[Tensor]:
                begin.put_back()
                again = recording.replay(call, recording.graph, perturbed)
                new = [n[-1] for n in again.updated]
                return [*again.results, *again.gradients, *new]

            pairs = [
                *zip(outcome.results, results, strict=True),
                *zip(outcome.gradients, gradients, strict=True),
                *(u.done(c, new) for c, (u, new) in zip(held, updates, strict=True)),
            ]
            if differing(pairs, recording.graph, moved):
                self._failed(recording, "its numbers have changed")
            elif recording.run is not None:
                self._check_kernels(recording, recording.run, call)
            after.put_back()
        return found

    def _check_kernels(self, recording: Recording, run: Run, call: Call) -> None:
        try:
            with torch.no_grad():
                check_kernels(run, recording.graph, recording.inputs(call))
        except RuntimeError as error:
            _logger.warning("the step is replayed without a compiler from now on: %s", error)
            recording.run = recording.graph

    def _failed(self, recording: Recording, why: str) -> None:
        self._recordings = [r for r in self._recordings if r is not recording]
        self._failures += 1
        if self._failures >= _MAX_FAILURES:
            self._refuse(f"{why}, for the {self._failures}rd time: it depends on what is not seen")
        else:
            _logger.warning("a step is recorded anew, since %s", why)

    def _refuse(self, reason: str) -> None:
        self._recordings, self._seen = [], None
        self.refused = reason or "floats"
        if reason:
            self._tell(reason)
