"""Record a transition of a chain once, and replay it along long schedules."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pyro
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pyro_mcvae.chains.kernels import Info, Kernel, State, Target
from pyro_mcvae.compiled.backends import same_bits
from pyro_mcvae.compiled.graph import as_function, fresh, quick, split_off
from pyro_mcvae.compiled.guards import ReadingMode
from pyro_mcvae.compiled.recording import NotUsable, Surroundings
from pyro_mcvae.compiled.tracer import NotRecordable, trace
from pyro_mcvae.ops.tensors import Generators, is_due
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.outside_values import Dependencies, ExecutedCode
from pyro_mcvae.structure.blocks import Structure

_logger = logging.getLogger(__name__)

# A recording costs about fifty transitions. Chains that use each recording for fewer do not gain
# from it.
_MAX_RECORDINGS, _COST = 6, 50

_Step = tuple[State, Info]


class _Contents(pickle.Pickler):
    """
    The tensors of a density, which may differ in the next chain, and a key for all other content.

    :ivar tensors: each tensor once, in order of first use.
    :ivar key: equal for densities that differ only in the values of tensors.
    """

    def __init__(self, density: object, programs: tuple[object, ...]) -> None:
        super().__init__(buffer := io.BytesIO())
        self.fast = True  # without a mark where an object is the same as an equal one
        self._programs = programs
        self._alive: list[object] = []  # whose identity is part of the key
        self._places: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        try:
            self.dump(density)
            self.key: Hashable = buffer.getvalue()
        except Exception:
            self.key = object()  # equal to no other key

    def place(self, tensor: Tensor) -> int | None:
        """Return the index of the tensor."""
        return self._places.get(id(tensor))

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self._places:
                self._places[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return self._places[id(value)], repr(_layout(value))
        if isinstance(value, ParticleSampler):
            return "sampler"  # it has sites and plates, but no data
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        opaque = isinstance(value, nn.Module | type | CodeType | ModuleType)
        if opaque or any(value is program for program in self._programs):
            self._alive.append(value)
            return id(value)
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return list, ((), (value.__code__, value.__defaults__, value.__kwdefaults__, cells))
        if isinstance(value, Structure):  # without cached findings
            return list, ((), (value.blocks, value.block_of, value.mean_field, value.masked_by))
        return NotImplemented


@dataclass
class _KernelRecording:
    """
    :ivar prepare: ``(*constants) -> (*prepared)``, which is computed once for each chain.
    :ivar graph: ``(*prepared, *inputs) -> (*tensors of the new state and info, assumed)``.
    :ivar constants: as they were recorded.
    :ivar places: where each is among the tensors of a density; None for parameters and numbers.
    :ivar template: the new state and the info, with the places of tensors among the outputs.
    """

    prepare: GraphModule
    graph: GraphModule
    constants: list[Tensor]
    places: list[int | None]
    template: list[Any]
    assumes: bool
    dependencies: Dependencies
    chain: _Contents | None = None
    prepared: tuple[Tensor, ...] = ()
    uses: int = 0

    @torch.no_grad()
    def begin(self, contents: _Contents) -> None:
        """Replay from now on with the tensors of another chain."""
        self.chain = contents
        pairs = zip(self.constants, self.places, strict=True)
        self.prepared = self.prepare(*(c if i is None else contents.tensors[i] for c, i in pairs))

    def outcome(self, outputs: list[Tensor]) -> _Step | None:
        """Return the new state; None if the guards of the graph do not hold."""
        if self.assumes and not bool(outputs[-1]):
            return None
        tensors = iter(outputs)
        values: list[Any] = [next(tensors) if v is Tensor else v for v in self.template]
        fields = len(State._fields)
        return State(*values[:fields]), Info(*values[fields:])


class RecordedTransition:
    """
    A kernel whose transitions are replayed, with the same numbers but without running Python code.

    The first transition runs as usual, the second is recorded while it is taken. A replay draws the
    random numbers of the plain transition. A recording serves all chains whose densities differ in
    the values of tensors, such as those of batches of one size. At uses 1, 2, 4, 8, ... and at the
    first transition of a chain, the plain transition runs as well and must agree. Transitions that
    cannot be recorded run as usual.

    :param Kernel kernel: moves the chains.
    :param programs: whose globals, attributes and parameters are watched.
    """

    def __init__(self, kernel: Kernel, programs: tuple[object, ...]) -> None:
        self._kernel, self._programs = kernel, programs
        self.adjusted = kernel.adjusted
        self._recordings: dict[Hashable, _KernelRecording] = {}
        self._chain: Callable[[Tensor], State] | None = None
        self._last: State | None = None
        self._steps = self._recorded = self._uses = 0
        self._executed = ExecutedCode()
        # Its transitions are different functions.
        parts = kernel.modules()
        self._unsupported = any(getattr(p, "num_transitions", None) is not None for p in parts)

    def step(self, state: State, target: Target) -> _Step:
        """Move the chains, as :meth:`Kernel.step`."""
        self._steps += 1
        last, self._last = self._last, None
        if self._unsupported:
            return self._kernel.step(state, target)
        if begins := target.evaluate is not self._chain:
            self._chain = target.evaluate
            self._contents = _Contents((target.evaluate, target.movable), self._programs)
        if self._steps == 1:
            with self._executed:
                return self._kernel.step(state, target)
        inputs = [*(t for t in state if t is not None), target.beta]
        # The result of a replay has the structure of its input.
        if begins or state is not last:
            self._key = (self._contents.key, *map(_layout, inputs))
        known = self._recordings.get(self._key)
        if begins := known is not None and known.chain is not self._contents:
            assert known is not None
            known.begin(self._contents)
        if known is None or (begins and known.dependencies.changed() is not None):
            return self._record(state, target, inputs)
        return self._replay(known, state, target, inputs, begins)

    def _replay(
        self,
        known: _KernelRecording,
        state: State,
        target: Target,
        inputs: list[Tensor],
        begins: bool,
    ) -> _Step:
        known.uses += 1
        self._uses += 1
        compared = begins or is_due(known.uses)
        generators = Generators() if compared or known.assumes else None
        step = known.outcome(known.graph(*known.prepared, *inputs))
        if step is not None and not compared:
            self._last = step[0]
            return step
        assert generators is not None
        generators.put_back()
        plain = self._kernel.step(state, target)
        if step is not None and not _agree(step, plain):
            del self._recordings[self._key]  # record again, with the present state
        return plain

    def _record(self, state: State, target: Target, inputs: list[Tensor]) -> _Step:
        self._recorded += 1
        generators = Generators()
        try:
            if self._recorded > _MAX_RECORDINGS and self._uses < _COST * self._recorded:
                raise NotRecordable("its transitions keep changing")
            recording, outputs = self._recording_of(state, target, inputs)
            step = recording.outcome(outputs)
        except NotRecordable as reason:
            step = None
            if not isinstance(reason, NotUsable):
                self._unsupported = True
                _logger.info("transitions run uncompiled, as one cannot be recorded: %s", reason)
        if step is None:
            generators.put_back()
            return self._kernel.step(state, target)
        self._recordings[self._key] = recording
        return step

    def _recording_of(
        self, state: State, target: Target, inputs: list[Tensor]
    ) -> tuple[_KernelRecording, list[Tensor]]:
        kernel, recorded = self._kernel, []
        around = Surroundings(*self._programs, kernel, executed=self._executed)

        def function(*inputs: Tensor) -> list[Tensor]:
            tensors_left = iter(inputs)
            then = State(*(None if t is None else next(tensors_left) for t in state))  # type: ignore[arg-type]
            at = Target(target.evaluate, next(tensors_left), target.movable, target.transition)
            with around.watched(ReadingMode(_no_backward)) as assumed:
                values = _values(kernel.step(then, at))
            tensors = [t.detach() for t in values if isinstance(t, Tensor)]
            if assumed:
                tensors.append(torch.stack([a.reshape(()) for a in assumed]).all())
            template = [Tensor if isinstance(t, Tensor) else t for t in values]
            recorded.append((tensors, template, bool(assumed)))
            return tensors

        with around:
            graph, constants, updates = as_function(*trace(function, inputs))
            around.check([])
        if updates:
            raise NotRecordable("it updates tensors in place")
        tensors, template, assumes = recorded[0]
        # The kernel is a copy of ours: what changes in it shows in the first transition of a chain.
        dependencies = Dependencies.of(*self._programs, executed=around.executed)
        # Nothing is trained here, but a step size adapts.
        moving = {id(t) for t in (*kernel.parameters(), *kernel.buffers())}
        known = moving | {id(t) for _, t in pyro.get_param_store().named_parameters()}
        known |= {id(entry.value) for entry in dependencies.entries}
        places = [None if id(c) in known else self._contents.place(c) for c in constants]
        numbers = fresh(graph.graph, len(constants))
        unknown = (
            i is None and id(c) not in known and n not in numbers
            for n, (c, i) in enumerate(zip(constants, places, strict=True))
        )
        if any(unknown):  # it may depend on the data in a way that is not recorded
            self._contents.key = object()
            self._key = (self._contents.key, *self._key[1:])
        stays = [id(c) not in moving for c in constants]
        prepare, graph = split_off(graph.graph, stays)
        recording = _KernelRecording(
            prepare, quick(graph), constants, places, template, assumes, dependencies
        )
        recording.begin(self._contents)
        return recording, tensors


def _values(step: _Step) -> list[Any]:
    """Return the tensors of a transition, without the score of accept decisions."""
    return [*step[0], *step[1]._replace(log_prob=None)]


def _no_backward(_: Tensor) -> None:
    raise NotRecordable("it calls loss.backward()")


def _layout(value: Tensor) -> Hashable:
    return value.shape, value.stride(), value.dtype, value.device


def _agree(step: _Step, plain: _Step) -> bool:
    """Return whether two transitions are equal, bit for bit."""
    pairs = zip(_values(step), _values(plain), strict=True)
    return all(same_bits(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))
