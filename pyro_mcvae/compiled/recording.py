"""One step of a loss, its gradient included, as one graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pyro_mcvae.compiled.gradients import gradients_of, has_hooks, is_recorded, leaves_of
from pyro_mcvae.compiled.graph import as_function
from pyro_mcvae.compiled.reading import Reading, ReadingMode
from pyro_mcvae.compiled.refusal import NotRecordable, said_by
from pyro_mcvae.compiled.signature import Call
from pyro_mcvae.compiled.tracing import trace
from pyro_mcvae.compiled.updates import Update
from pyro_mcvae.compiled.writes import Slot, Spaces, check_detached
from pyro_mcvae.ops.recording import assumptions
from pyro_mcvae.programs.executed_code import ExecutedCode
from pyro_mcvae.programs.outside_values import Dependencies, Entry, GeneratorStates

__all__ = ["NotUsable", "Outcome", "Recording", "Run", "Surroundings", "record"]

Run = Callable[..., list[Tensor]]
Change = Callable[[list[Tensor], GraphModule], list[Tensor]]


_TENSOR = object()


class NotUsable(NotRecordable):
    """This very step is not finite, or takes a way that others do not."""


@dataclass
class Outcome:
    """
    What one step computed.

    :ivar results: the tensors of what the loss returned.
    :ivar assumed: whether what the recording assumes was so; None if it assumes nothing.
    :ivar gradients: one for each of the recording's leaves.
    :ivar written: the new values of each slot.
    :ivar updated: what each update in place writes.
    """

    results: list[Tensor]
    assumed: Tensor | None
    gradients: list[Tensor]
    written: list[list[Tensor]]
    updated: list[list[Tensor]]

    def is_usable(self) -> bool:
        """Whether the step is one that the plain loss would have taken, too; reads its values."""
        if self.assumed is not None and not bool(self.assumed):
            return False
        return all(math.isfinite(r.item()) for r in self.results)


@dataclass
class Recording:
    """
    A recorded step.

    :ivar leaves: the parameters that have a gradient.
    :ivar params: names of ``pyro.param`` statements and the parameters behind them.
    :ivar param_sites: these statements as Pyro's handlers see them, without values.
    :ivar dependencies: what the graph took for constant.
    :ivar adds_gradients: whether replays add gradients to their parameters' without PyTorch's
        backward pass, in which hooks on them are called.
    """

    graph: GraphModule
    constants: list[Tensor]
    updates: list[Update]
    leaves: list[Tensor]
    params: list[tuple[str, Tensor]]
    param_sites: dict[str, dict[str, object]]
    slots: list[Slot]
    sizes: list[int]
    spec: TreeSpec
    fixed: list[object]
    assumes: bool
    dependencies: Dependencies
    adds_gradients: bool
    uses: int = 0
    run: Run | None = None
    _sources: list[tuple[int, Slot]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shapes = [(leaf, leaf.shape) for leaf in self.leaves]
        # What a step reads where the one before has written it.
        self._sources = [
            (i, s) for i, c in enumerate(self.constants) for s in self.slots if s.before is c
        ]

    def changed(self) -> str | None:
        """What has changed of that which the graph takes for constant, if anything has."""
        store = pyro.get_param_store()._params
        for name, value in self.params:
            if store.get(name) is not value:
                return f"parameter '{name}'"
        for _, slot in self._sources:
            if not _is_like(slot.space.get(slot.key), slot.before):
                return f"attribute '{slot.key}' of {slot.owner.__name__}"
        if not all(p.requires_grad and p.shape == s for p, s in self._shapes):
            return "a parameter's shape, or whether it requires a gradient,"
        if self.adds_gradients and any(map(has_hooks, self.leaves)):
            return "a hook on a parameter"
        entry = self.dependencies.changed()
        return None if entry is None else entry.name

    def inputs(self, call: Call) -> list[Tensor]:
        """What the graph is called with: its constants as they are now, and the call's inputs."""
        for i, slot in self._sources:
            now = slot.space[slot.key]
            assert isinstance(now, Tensor)
            self.constants[i] = now
        return [*self.constants, *call.inputs()]

    def replay(self, call: Call, run: Run, change: Change | None = None) -> Outcome:
        """
        Compute a step; nothing is changed by it but the generators.

        :param change: makes other inputs of those of the graph.
        """
        with torch.no_grad():
            inputs = self.inputs(call)
            return self.outcome(run(*(inputs if change is None else change(inputs, self.graph))))

    def outcome(self, outputs: list[Tensor]) -> Outcome:
        """Sort a graph's outputs."""
        given = iter(outputs)
        sizes = [*self.sizes, *(update.num_outputs for update in self.updates)]
        results, assumed, gradients, *rest = [list(islice(given, size)) for size in sizes]
        slots = len(self.slots)
        return Outcome(
            results, assumed[0] if assumed else None, gradients, rest[:slots], rest[slots:]
        )

    def commit(self, outcome: Outcome) -> None:
        """Write what the step writes besides gradients."""
        for update, new in zip(self.updates, outcome.updated, strict=True):
            update.write(self.constants[update.constant], new)
        for slot, tensors in zip(self.slots, outcome.written, strict=True):
            slot.write(tensors)

    def result(self, results: list[object]) -> object:
        """What the loss returned, of its tensors or numbers."""
        given = iter(results)
        return tree_unflatten([next(given) if f is _TENSOR else f for f in self.fixed], self.spec)

    def tensors_of(self, returned: object) -> list[Tensor] | None:
        """The results of a plain step, to be compared; None if it returned anything else."""
        leaves, spec = tree_flatten(returned)
        if spec != self.spec:
            return None
        pairs = list(zip(leaves, self.fixed, strict=True))
        if any(f is not _TENSOR and f is not r and repr(f) != repr(r) for r, f in pairs):
            return None
        return [torch.as_tensor(r, dtype=torch.double) for r, f in pairs if f is _TENSOR]


def _is_like(now: object, then: object) -> bool:
    both = isinstance(now, Tensor) and isinstance(then, Tensor)
    return both and _about(now) == _about(then)


def _about(value: Any) -> tuple[object, ...]:
    return value.shape, value.dtype, value.device


class _Step:
    """Makes a recording's parts while the step runs."""

    def __init__(self, loss: object, call: Call, around: Surroundings) -> None:
        self._loss, self._call, self._around = loss, call, around
        self.leaves: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        call = self._call
        args, kwargs = call.with_inputs(inputs)
        mode = ReadingMode(self._backward, call.numbers(inputs))
        function = getattr(self._loss, call.function)
        with assumptions() as assumed, pyro.validation_enabled(False):
            with poutine.trace(param_only=True) as capture, mode, self._around.executed:
                returned = function(call.model, call.guide, *args, **kwargs)
            if isinstance(returned, Tensor) and returned.requires_grad:
                with self._around.executed:
                    self._backward(returned)
            if mode.refused is not None:
                raise mode.refused
            store = pyro.get_param_store()
            # Under module_local_params those of modules are no parameters of the store.
            sites = {n: site for n, site in capture.trace.nodes.items() if n in store}
            results = self._results(returned)
            self.params = [(n, site["value"].unconstrained()) for n, site in sites.items()]
            self.param_sites = {n: {**site, "value": None} for n, site in sites.items()}
            if self.gradients:
                total = torch.stack([g.sum().double() for g in self.gradients]).sum()
                assumed.append(total.detach().isfinite())  # the plain step names what is not
            holds = [torch.stack([a.reshape(()) for a in assumed]).all()] if assumed else []
        self.slots = self._around.spaces.written(is_recorded)
        if call.function == "differentiable_loss":
            check_detached(self.slots)
        parts = [results, holds, self.gradients, *(s.tensors for s in self.slots)]
        self.sizes = [len(part) for part in parts]
        self.outputs = [t.detach() for part in parts for t in part]
        return self.outputs

    def _backward(
        self, loss: Tensor, gradient: Tensor | None = None, *_: object, **__: object
    ) -> None:
        leaves = list(leaves_of(loss))
        if not leaves:
            return
        found = gradients_of(loss, leaves, gradient)
        for leaf, gradient in zip(leaves, found, strict=True):
            if gradient is None:
                continue
            for i, known in enumerate(self.leaves):
                if known is leaf:
                    self.gradients[i] = self.gradients[i] + gradient
                    break
            else:
                self.leaves.append(leaf)
                self.gradients.append(gradient)

    def _results(self, returned: object) -> list[Tensor]:
        leaves, self.spec = tree_flatten(returned)
        tensors = [r.tensor if isinstance(r, Reading) else r for r in leaves]
        self.fixed = [_TENSOR if isinstance(t, Tensor) else t for t in tensors]
        if self._call.function == "differentiable_loss" and not isinstance(returned, Tensor):
            raise NotRecordable(
                f"its differentiable_loss returns a {type(returned).__name__}, and not a tensor"
            )
        return [t for t in tensors if isinstance(t, Tensor)]


class Surroundings:
    """
    What a step may change that its replays would not.

    :param executed: the functions that the step before has executed.
    """

    def __init__(self, *roots: object, executed: ExecutedCode) -> None:
        self._before = Dependencies.of(*roots, executed=executed)
        if self._before.refused:
            raise NotRecordable(self._before.refused)  # before an item of an iterator is lost
        self._generators = GeneratorStates(self._before)
        self._names = set(pyro.get_param_store()._params)
        self._roots, self._expected = roots, executed
        self.executed = ExecutedCode()
        self.spaces = Spaces(self._before)

    def put_back(self) -> None:
        """Undo what a step did that is not recorded, but for PyTorch's generators."""
        store = pyro.get_param_store()
        for name in set(store._params) - self._names:
            del store[name]
        self.spaces.put_back()
        self._generators.put_back()

    def check(self, slots: list[Slot]) -> Dependencies:
        """
        Check that a step has changed nothing but what is known, and read nothing that may change.

        :returns: what it has read.
        :raises NotRecordable: naming what it has changed, or read.
        """
        found = Dependencies.of(*self._roots, executed=self.executed)
        if not found.functions <= self._before.functions:
            self._expected.add(self.executed)
            raise NotUsable("it executes functions that the step before has not")
        if name := self._generators.moved():
            raise NotRecordable(f"draws random numbers from {name}: use PyTorch's")
        if new := set(pyro.get_param_store()._params) - self._names:
            raise NotUsable(f"makes a new parameter, {sorted(new)[0]}")
        entry = _without_slots(self._before, slots).changed()
        if entry is not None:
            raise NotRecordable(f"each step changes {entry.name}, which a replay would not")
        if found.refused:
            raise NotRecordable(found.refused)
        return _without_slots(found, slots)


def record(loss: object, call: Call, executed: ExecutedCode) -> tuple[Recording, Outcome]:
    """
    Take one step, and record it.

    :param executed: the functions that the step before has executed.
    :returns: the recording, and what the step computed, whose writes are done but not its
        gradients'.
    :raises NotRecordable: with the reason; then nothing has changed but the generators.
    """
    roots = (call.model, call.guide, loss, *(a for a in call.leaves if callable(a)))
    around = Surroundings(*roots, executed=executed)
    step = _Step(loss, call, around)
    try:
        # Tensors of their own: what a program sees elsewhere, too, is not the argument.
        traced = trace(step, [t.detach() for t in call.inputs()])
        if (adds := call.function == "loss_and_grads") and any(map(has_hooks, step.leaves)):
            raise NotRecordable(
                "a parameter has a hook on its gradient: use (model, guide) modules"
            )
        dependencies = around.check(step.slots)
        graph, constants, updates = as_function(traced)
    except NotRecordable:
        around.put_back()
        raise
    except Exception as error:
        around.put_back()
        raise NotRecordable(said_by(error)) from error
    recording = Recording(
        graph,
        constants,
        updates,
        step.leaves,
        step.params,
        step.param_sites,
        step.slots,
        step.sizes,
        step.spec,
        step.fixed,
        bool(step.sizes[1]),
        dependencies,
        adds,
    )
    outcome = recording.outcome(step.outputs)
    if not outcome.is_usable():
        around.put_back()
        raise NotUsable
    for name, value in recording.params:
        recording.dependencies.watch_gradient(value, name)
    return recording, outcome


def _without_slots(dependencies: Dependencies, slots: list[Slot]) -> Dependencies:
    keys = {(id(s.space), s.key) for s in slots}

    def is_slot(entry: Entry) -> bool:
        key = entry.key
        return isinstance(key, str) and (id(getattr(entry.get, "__self__", None)), key) in keys

    dependencies.entries = [e for e in dependencies.entries if not is_slot(e)]
    return dependencies
