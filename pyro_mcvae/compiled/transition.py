"""Record a transition of a chain once, and replay it along long schedules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pyro_mcvae.chains.kernels import Info, Kernel, State, Target
from pyro_mcvae.compiled.backends import is_due, quick, same_bits
from pyro_mcvae.compiled.graph import as_function, fold
from pyro_mcvae.compiled.guards import NotRecordable, ReadingMode, trace
from pyro_mcvae.compiled.recording import NotUsable, Surroundings
from pyro_mcvae.ops.tensors import Generators
from pyro_mcvae.programs.outside_values import Dependencies, ExecutedCode

_logger = logging.getLogger(__name__)

# A recording costs some fifty transitions. Chains that make ever new ones, and use each for fewer,
# do not gain by it.
_MAX_RECORDINGS, _COST = 6, 50

_Step = tuple[State, Info]


@dataclass
class _Recording:
    """
    :ivar graph: ``(*constants, *inputs) -> (*tensors of the new state and info, assumed)``.
    :ivar kept: the new state and the info, with the places of tensors among the outputs.
    :ivar about: the layouts of the inputs.
    """

    graph: GraphModule
    constants: list[Tensor]
    kept: list[Any]
    assumes: bool
    about: list[object]
    dependencies: Dependencies
    uses: int = 0

    def outcome(self, outputs: list[Tensor]) -> _Step | None:
        """Return the new state; None if the graph does not hold for this one."""
        if self.assumes and not bool(outputs[-1]):
            return None
        given = iter(outputs)
        values: list[Any] = [next(given) if v is Tensor else v for v in self.kept]
        fields = len(State._fields)
        return State(*values[:fields]), Info(*values[fields:])


class RecordedTransition:
    """
    A kernel whose transitions are replayed: the same numbers without the Python of programs.

    The first transition runs as usual, the second is recorded while it is taken. A replay draws the
    random numbers of the plain transition. At the uses 1, 2, 4, 8, ... and at a chain's first one
    the plain transition is taken, too, and must agree. What cannot be recorded runs as usual.

    :param Kernel kernel: moves the chains.
    :param programs: whose globals, attributes and parameters are watched.
    """

    def __init__(self, kernel: Kernel, programs: tuple[object, ...]) -> None:
        self._kernel, self._programs = kernel, programs
        self.adjusted = kernel.adjusted
        self._recording: _Recording | None = None
        self._chain: Callable[[Tensor], State] | None = None
        self._last: State | None = None
        self._steps = self._recorded = self._uses = 0
        self._executed = ExecutedCode()
        # Its transitions are different functions.
        parts = kernel.modules()
        self._refused = any(getattr(p, "num_transitions", None) is not None for p in parts)

    def step(self, state: State, target: Target) -> _Step:
        """Move the chains, as :meth:`Kernel.step`."""
        self._steps += 1
        last, self._last = self._last, None
        if self._refused:
            return self._kernel.step(state, target)
        if self._steps == 1:
            with self._executed:
                return self._kernel.step(state, target)
        begins = target.evaluate is not self._chain
        self._chain = target.evaluate
        inputs = [*(t for t in state if t is not None), target.beta]
        known = self._recording
        # What a replay has made is like what it was made of.
        if known is not None and (begins or state is not last):
            known = known if known.about == _about(inputs) else None
            if begins and known is not None and known.dependencies.changed() is not None:
                known = None
        if known is None:
            return self._record(state, target, inputs)
        return self._replay(known, state, target, inputs, begins)

    def _replay(
        self, known: _Recording, state: State, target: Target, inputs: list[Tensor], begins: bool
    ) -> _Step:
        known.uses += 1
        self._uses += 1
        compared = begins or is_due(known.uses)
        generators = Generators() if compared or known.assumes else None
        found = known.outcome(known.graph(*known.constants, *inputs))
        if found is not None and not compared:
            self._last = found[0]
            return found
        assert generators is not None
        generators.put_back()
        plain = self._kernel.step(state, target)
        if found is not None and not _agree(found, plain):
            self._recording = None  # another one is made, of what is so now
        return plain

    def _record(self, state: State, target: Target, inputs: list[Tensor]) -> _Step:
        self._recorded += 1
        self._recording = None
        generators = Generators()
        try:
            if self._recorded > _MAX_RECORDINGS and self._uses < _COST * self._recorded:
                raise NotRecordable("its transitions are ever other ones")
            self._recording, outputs = self._recording_of(state, target, inputs)
            found = self._recording.outcome(outputs)
        except NotRecordable as reason:
            found = None
            if not isinstance(reason, NotUsable):
                self._refused = True
                _logger.info("transitions run uncompiled, as one cannot be recorded: %s", reason)
        if found is None:
            self._recording = None
            generators.put_back()
            return self._kernel.step(state, target)
        return found

    def _recording_of(
        self, state: State, target: Target, inputs: list[Tensor]
    ) -> tuple[_Recording, list[Tensor]]:
        kernel, made = self._kernel, []
        around = Surroundings(*self._programs, kernel, executed=self._executed)

        def function(*inputs: Tensor) -> list[Tensor]:
            given = iter(inputs)
            then = State(*(None if t is None else next(given) for t in state))  # type: ignore[arg-type]
            at = Target(target.evaluate, next(given), target.movable, target.transition)
            with around.watched(ReadingMode(_no_backward)) as assumed:
                values = _values(kernel.step(then, at))
            tensors = [t.detach() for t in values if isinstance(t, Tensor)]
            if assumed:
                tensors.append(torch.stack([a.reshape(()) for a in assumed]).all())
            kept = [Tensor if isinstance(t, Tensor) else t for t in values]
            made.append((tensors, kept, bool(assumed)))
            return tensors

        with around:
            graph, constants, updates = as_function(trace(function, inputs))
            around.check([])
        if updates:
            raise NotRecordable("it updates tensors in place")
        tensors, kept, assumes = made[0]
        # Nothing is trained meanwhile, but a step size is found.
        moving = {id(t) for t in (*kernel.parameters(), *kernel.buffers())}
        constants = fold(graph.graph, constants, [id(c) not in moving for c in constants])
        # The kernel is a copy of ours: what changes in it shows in the first transition of a chain.
        dependencies = Dependencies.of(*self._programs, executed=around.executed)
        recording = _Recording(quick(graph), constants, kept, assumes, _about(inputs), dependencies)
        return recording, tensors


def _values(found: _Step) -> list[Any]:
    """A transition without the score of what was decided, which evaluators have no use for."""
    return [*found[0], *found[1]._replace(log_prob=None)]


def _no_backward(_: Tensor) -> None:
    raise NotRecordable("it calls loss.backward()")


def _about(inputs: list[Tensor]) -> list[object]:
    return [(t.shape, t.stride(), t.dtype, t.device) for t in inputs]


def _agree(found: _Step, plain: _Step) -> bool:
    """Whether two transitions are the same, bit for bit."""
    pairs = zip(_values(found), _values(plain), strict=True)
    return all(same_bits(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))
