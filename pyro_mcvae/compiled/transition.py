"""A transition of a chain, recorded once and replayed along long schedules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from pyro_mcvae.chains.kernel import Info, Kernel, State, Target
from pyro_mcvae.compiled.agreement import is_due, same_bits
from pyro_mcvae.compiled.calls import quick
from pyro_mcvae.compiled.folding import fold
from pyro_mcvae.compiled.graph import as_function
from pyro_mcvae.compiled.reading import ReadingMode
from pyro_mcvae.compiled.recording import NotUsable, Surroundings
from pyro_mcvae.compiled.refusal import NotRecordable, said_by
from pyro_mcvae.compiled.tracing import trace
from pyro_mcvae.ops.generators import Generators
from pyro_mcvae.ops.recording import assumptions
from pyro_mcvae.programs.executed_code import ExecutedCode
from pyro_mcvae.programs.outside_values import Dependencies

__all__ = ["RecordedTransition"]

_logger = logging.getLogger(__name__)

# A recording costs some fifty transitions. Chains that make ever new ones, and use each for fewer,
# do not gain by it.
_MAX_RECORDINGS, _COST = 6, 50


@dataclass
class _Recording:
    """
    :ivar graph: ``(*constants, *inputs) -> (*tensors of the new state and info, assumed)``.
    :ivar fixed: the new state and the info, with a mark at tensors.
    :ivar assumes: whether the last output tells if what the graph assumes is so.
    """

    graph: GraphModule
    constants: list[Tensor]
    fixed: list[object]
    assumes: bool
    about: tuple[object, ...]
    dependencies: Dependencies
    uses: int = 0

    def outcome(self, outputs: list[Tensor]) -> tuple[State, Info] | None:
        """The new state; None if the graph does not hold for this one."""
        if self.assumes and not bool(outputs[-1]):
            return None
        given = iter(outputs)
        values: list[Any] = [next(given) if v is _TENSOR else v for v in self.fixed]
        return State(*values[:_FIELDS]), Info(*values[_FIELDS:])


_TENSOR = object()
_FIELDS = len(State._fields)


class RecordedTransition:
    """
    A kernel whose transitions are replayed: the same numbers without the Python of programs.

    The first transition runs as ever, the second is recorded while it is taken. A replay draws the
    random numbers of the plain transition. At the uses 1, 2, 4, 8, ... and at a chain's first one
    the plain transition is taken, too, and must agree. What cannot be recorded runs as ever.

    :param Kernel kernel: moves the chains.
    :param programs: whose globals, attributes and parameters are watched.
    """

    def __init__(self, kernel: Kernel, programs: tuple[object, ...]) -> None:
        self._kernel, self._roots = kernel, (*programs, kernel)
        self.adjusted = kernel.adjusted
        self._recording: _Recording | None = None
        self._chain: Callable[[Tensor], State] | None = None
        self._last: State | None = None
        self._steps = self._recorded = self._uses = 0
        self._executed = ExecutedCode()
        # Its transitions are different functions.
        parts = kernel.modules()
        self._refused = any(getattr(p, "num_transitions", None) is not None for p in parts)

    def step(self, state: State, target: Target) -> tuple[State, Info]:
        """As :meth:`Kernel.step`."""
        self._steps += 1
        last, self._last = self._last, None
        if self._refused:
            return self._kernel.step(state, target)
        if self._steps == 1:
            with self._executed:
                return self._kernel.step(state, target)
        begins = target.evaluate is not self._chain
        self._chain = target.evaluate
        inputs = _inputs(state, target)
        # What a replay has made is like what it was made of.
        if (begins or state is not last) and not self._is_valid(inputs, begins):
            return self._record(state, target, inputs)
        assert self._recording is not None
        return self._replay(self._recording, state, target, inputs, begins)

    def _is_valid(self, inputs: list[Tensor], begins: bool) -> bool:
        known = self._recording
        if known is None or known.about != _about(inputs):
            return False
        return not begins or known.dependencies.changed() is None

    def _replay(
        self, known: _Recording, state: State, target: Target, inputs: list[Tensor], begins: bool
    ) -> tuple[State, Info]:
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

    def _record(self, state: State, target: Target, inputs: list[Tensor]) -> tuple[State, Info]:
        self._recorded += 1
        generators = Generators()
        try:
            if self._recorded > _MAX_RECORDINGS and self._uses < _COST * self._recorded:
                raise NotRecordable("its transitions are ever other ones")
            self._recording, outputs = _record(
                self._kernel, state, target, inputs, self._roots, self._executed
            )
            found = self._recording.outcome(outputs)
        except NotUsable:
            found = None
        except NotRecordable as reason:
            self._refused, found = True, None
            _logger.info("transitions run as ever, since one cannot be recorded: %s", reason)
        if found is None:
            self._recording = None
            generators.put_back()
            return self._kernel.step(state, target)
        return found


def _record(
    kernel: Kernel,
    state: State,
    target: Target,
    inputs: list[Tensor],
    roots: tuple[object, ...],
    executed: ExecutedCode,
) -> tuple[_Recording, list[Tensor]]:
    around = Surroundings(*roots, executed=executed)
    made: list[tuple[list[Tensor], list[object], bool]] = []

    def function(*inputs: Tensor) -> list[Tensor]:
        given = iter(inputs)
        then = State(*(None if t is None else next(given) for t in state))  # type: ignore[arg-type]
        at = Target(target.evaluate, next(given), target.movable, target.transition)
        mode = ReadingMode(_no_backward)
        plain = pyro.validation_enabled(False)
        with assumptions() as assumed, plain, mode, around.executed:
            found = _unscored(kernel.step(then, at))
        if mode.refused is not None:
            raise mode.refused
        values = [*found[0], *found[1]]
        tensors = [t.detach() for t in values if isinstance(t, Tensor)]
        if assumed:
            tensors.append(torch.stack([a.reshape(()) for a in assumed]).all())
        fixed = [_TENSOR if isinstance(t, Tensor) else t for t in values]
        made.append((tensors, fixed, bool(assumed)))
        return tensors

    try:
        graph, constants, updates = as_function(trace(function, inputs))
        around.check([])
    except NotRecordable:
        around.put_back()
        raise
    except Exception as error:
        around.put_back()
        raise NotRecordable(said_by(error)) from error
    if updates:
        raise NotRecordable("it updates tensors in place")
    tensors, fixed, assumes = made[0]
    about = _about(inputs)
    # Nothing is trained meanwhile, but a step size is found.
    moving = {id(t) for t in (*kernel.parameters(), *kernel.buffers())}
    constants = fold(graph.graph, constants, [id(c) not in moving for c in constants])
    # The kernel is a copy of ours: what changes in it shows in the first transition of a chain.
    dependencies = Dependencies.of(*roots[:-1], executed=around.executed)
    return _Recording(quick(graph), constants, fixed, assumes, about, dependencies), tensors


def _unscored(found: tuple[State, Info]) -> tuple[State, Info]:
    """Without the score of what was decided, which judges have no use for."""
    return found[0], found[1]._replace(log_prob=None)


def _no_backward(_: Tensor) -> None:
    raise NotRecordable("it calls loss.backward()")


def _inputs(state: State, target: Target) -> list[Tensor]:
    return [*(t for t in state if t is not None), target.beta]


def _about(inputs: list[Tensor]) -> tuple[object, ...]:
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs)


def _agree(found: tuple[State, Info], plain: tuple[State, Info]) -> bool:
    """Whether two transitions are the same, bit for bit."""
    pairs = zip(tree_leaves(found), tree_leaves(_unscored(plain)), strict=True)
    return all(same_bits(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))
