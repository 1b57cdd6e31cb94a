"""Record a step as a graph, with a signature of the calls that it serves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from types import MethodType
from typing import Any, TypeAlias

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import is_validation_enabled
from torch import Tensor, nn
from torch.fx import GraphModule

from pyro_mcvae.compiled.graph import Update, as_function
from pyro_mcvae.compiled.guards import ReadingMode
from pyro_mcvae.compiled.inductor import Run
from pyro_mcvae.compiled.tracer import NotRecordable, is_recorded, said_by, trace
from pyro_mcvae.ops import compat
from pyro_mcvae.ops.compat import tree_flatten, tree_unflatten
from pyro_mcvae.ops.tensors import Tree, read, recorded_guards, total_norm
from pyro_mcvae.programs.isolation import visible_handlers
from pyro_mcvae.programs.messengers import is_param_tracer
from pyro_mcvae.programs.outside_state import OutsideState
from pyro_mcvae.programs.outside_values import (
    Dependencies,
    Entry,
    ExecutedCode,
    GeneratorStates,
    is_a,
    is_hashable,
    is_plain,
    is_written,
    space_of,
)
from pyro_mcvae.programs.run import flat
from pyro_mcvae.programs.types import Program
from pyro_mcvae.structure.cache import OutdatedAnalysisError

# The signature of a call: calls with equal ones share a recording.

Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = dict[str, object]

_TENSORS = (Tensor, torch.nn.Parameter)
_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class Call:
    """
    One call of one of a loss's functions.

    :ivar function: ``loss``, ``differentiable_loss`` or ``loss_and_grads``.
    :ivar leaves: the leaves of the arguments; tensors and floats are inputs of a recording.
    :ivar spec: the structure of the arguments: a tree, or, which is faster, the number and names of
        plain arguments.
    """

    function: str
    model: Program
    guide: Program
    args: Args
    kwargs: Kwargs

    def __post_init__(self) -> None:
        self.leaves, self.spec = flat(self.args, self.kwargs)

    @property
    def key(self) -> Hashable:
        """
        Return a key that is equal for calls that can share a recording.

        :raises NotRecordable: naming an argument that a recording cannot have.
        """
        about = [_about(i, leaf) for i, leaf in enumerate(self.leaves)]
        pair = _hashable(self.model), _hashable(self.guide)
        return (self.function, *pair, self.spec, *about, *_settings())

    def inputs(self) -> list[Tensor]:
        """Return the tensors, and the floats as tensors of their precision."""
        return [
            leaf if is_a(leaf, Tensor) else torch.tensor(leaf, dtype=torch.float64)
            for leaf in self.leaves
            if _is_input(leaf)
        ]

    def numbers(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the inputs that are floats."""
        pairs = zip(inputs, filter(_is_input, self.leaves), strict=True)
        return [number for number, leaf in pairs if not is_a(leaf, Tensor)]

    def with_inputs(self, inputs: tuple[Tensor, ...]) -> tuple[Args, Kwargs]:
        """Return the arguments with other tensors instead of the inputs."""
        values = iter(inputs)
        leaves = [next(values) if _is_input(leaf) else leaf for leaf in self.leaves]
        if isinstance(self.spec, Tree):
            args, kwargs = tree_unflatten(leaves, self.spec.spec)
            return args, kwargs
        count = len(self.args)
        return tuple(leaves[:count]), dict(zip(self.kwargs, leaves[count:], strict=True))


def _is_input(leaf: object) -> bool:
    """Return whether a leaf may have another value at each replay."""
    return is_a(leaf, Tensor) or type(leaf) is float


def _about(index: int, leaf: object) -> Hashable:
    if is_a(leaf, Tensor) and _is_ordinary(leaf) and not leaf.requires_grad:
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    if type(leaf) is float:
        return float
    if is_a(leaf, (*_PLAIN, float)):
        return (type(leaf), _hashable(leaf))
    if is_a(leaf, Tensor):
        kind = type(leaf).__name__ if _has_strides(leaf) else f"tensor of layout {leaf.layout}"
        why = "requires a gradient" if leaf.requires_grad else f"is a {kind}"
    elif callable(leaf):
        return _hashable(leaf)  # its globals and attributes are watched separately
    else:
        why = f"is a {type(leaf).__name__}, whose changes do not show"
    raise NotRecordable(
        f"argument {index} {why}: pass tensors, numbers, strings, or containers of these"
    )


def _is_ordinary(tensor: Tensor) -> bool:
    return type(tensor) in _TENSORS and _has_strides(tensor)


def _has_strides(tensor: Tensor) -> bool:
    return tensor.layout in (torch.strided, torch.sparse_coo) and not tensor.is_nested


def _hashable(program: object) -> Hashable:
    # Objects of dataclasses have no hash, so their methods are hashed by the identity of the
    # object.
    return program if is_hashable(program) else MethodType(id, program)


def _settings() -> tuple[Hashable, ...]:
    for handler in visible_handlers():
        if not is_param_tracer(handler):
            raise NotRecordable(
                f"the loss is called within a handler ({type(handler).__name__}), which would not "
                f"see the sites of a recording: put it around the model or the guide"
            )
    if torch.is_inference_mode_enabled():
        raise NotRecordable("the loss is called in inference mode: use torch.no_grad()")
    devices = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    kept = torch.is_grad_enabled(), torch.get_default_dtype(), is_validation_enabled()
    return (*kept, *autocast)


# One step of a loss and its gradient as one graph.

# Marks a tensor in a value that a step wrote.
_TENSOR = object()


class NotUsable(NotRecordable):
    """This step is not finite, or takes a branch that other steps do not take."""


# Gradients ----------------------------------------------------------------------------------------


def gradients_of(
    loss: Tensor, leaves: list[Tensor], gradient: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """
    Return the gradients of parameters before hooks run; None for parameters without a gradient.
    """
    with compat.without_gradient_hooks(leaves):
        return torch.autograd.grad(loss, leaves, gradient, retain_graph=True, allow_unused=True)


def _leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the parameters behind a loss, in the order of their discovery."""
    waiting, seen, leaves = [loss.grad_fn], set(), []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and not is_recorded(variable):
            leaves.append(variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves


# Side effects of a step ---------------------------------------------------------------------------


@dataclass
class Slot:
    """
    One attribute that a step wrote: a step size that adapts, a record of the last step.

    :ivar owner: the class of the object that has it.
    :ivar tensors: those of its new value, which are outputs of the recording.
    :ivar rebuild: creates such a value from other tensors.
    """

    owner: type
    space: dict[str, Any]
    key: str
    before: object
    tensors: list[Tensor]
    rebuild: Callable[[list[Tensor]], object]

    def write(self, tensors: list[Tensor]) -> None:
        """Write the values that the step would have written."""
        self.space[self.key] = self.rebuild(tensors)


def _split(value: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], object]]:
    """Split a value into the tensors that the step computed and a function that rebuilds it."""
    is_record = dataclasses.is_dataclass(value)
    names = [f.name for f in dataclasses.fields(value) if f.init] if is_record else []
    leaves, spec = tree_flatten([getattr(value, n) for n in names] if is_record else value)
    tensors = [t for t in leaves if isinstance(t, Tensor) and is_recorded(t)]
    parts = [_TENSOR if isinstance(t, Tensor) and is_recorded(t) else t for t in leaves]
    kind = type(value)

    def rebuild(new: list[Tensor]) -> object:
        values = iter(new)
        filled = tree_unflatten([next(values) if v is _TENSOR else v for v in parts], spec)
        return kind(**dict(zip(names, filled, strict=True))) if is_record else filled

    return tensors, rebuild


_OPTIMIZERS = torch.optim.__file__.rpartition("__init__")[0]


class Surroundings:
    """
    The state that a step changes and a replay does not. An error inside the context restores it.

    :param executed: the functions that the previous step executed.
    :raises NotRecordable: for an error inside the context, with its line in the program.
    """

    def __init__(self, *roots: object, executed: ExecutedCode) -> None:
        self._before = Dependencies.of(*roots, executed=executed)
        if self._before.unsupported:
            raise NotRecordable(
                self._before.unsupported
            )  # before an item of an iterator is consumed
        self._generators = GeneratorStates(self._before)
        self._names = set(pyro.get_param_store().keys())
        self._roots, self._expected = roots, executed
        tensors = [root for root in roots if is_a(root, Tensor)]
        self._outside = OutsideState(self._before.with_arguments(*tensors))
        self.executed = ExecutedCode()
        self._spaces: list[tuple[type, dict[str, Any], dict[str, Any]]] = []
        for value in self._before.objects:
            spaces = [space] if (space := space_of(value)) is not None else []
            if is_a(value, nn.Module):
                spaces.append(compat.tables_of(value)["buffers"])
            self._spaces += [(type(value), space, dict(space)) for space in spaces]

    def __enter__(self) -> Surroundings:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.put_back()
        if isinstance(error, OutdatedAnalysisError):
            raise NotUsable from error
        if isinstance(error, Exception):
            raise NotRecordable(said_by(error)) from error

    def put_back(self) -> None:
        """
        Undo the side effects of a step that are not recorded, except for PyTorch's generators.
        """
        store = pyro.get_param_store()
        for name in set(store.keys()) - self._names:
            del store[name]
        for _, space, before in self._spaces:
            if any(space.get(k, space) is not v for k, v in before.items()):
                space.update(before)
            for key in space.keys() - before.keys():
                del space[key]
        self._outside.put_back()

    @contextmanager
    def watched(self, mode: ReadingMode) -> Iterator[list[Tensor]]:
        """
        Record a step within this context; the yielded list collects its guards.

        With Pyro's validation, guards also check that latents are within their supports, outside
        which a density may be finite. Parameters and data are not checked.
        """
        guards, unchecked = recorded_guards(is_validation_enabled()), pyro.validation_enabled(False)
        with guards as assumed, unchecked, mode, self.executed:
            yield assumed

    def slots(self) -> list[Slot]:
        """
        Return the attributes that the step wrote.

        :raises NotRecordable: naming an attribute with another plain value, such as a counter.
        """
        slots = []
        for owner, space, before in self._spaces:
            for key in [k for k, v in space.items() if before.get(k, before) is not v]:
                new, old = space[key], before.get(key)
                if is_plain(new) and not (is_plain(old) and new == old):
                    raise NotRecordable(
                        f"each step changes attribute '{key}' of {owner.__name__} (from {old!r} to "
                        f"{new!r}): make it a tensor, or a buffer, that is updated in place"
                    )
                tensors, rebuild = _split(new)
                if tensors:
                    slots.append(Slot(owner, space, key, old, tensors, rebuild))
        return slots

    def check(self, slots: list[Slot]) -> Dependencies:
        """
        Check that a step has only the recorded side effects, and reads no values that may change.

        :returns: all values that it read.
        :raises NotRecordable: naming a side effect, or a value that may change.
        """
        dependencies_now = Dependencies.of(*self._roots, executed=self.executed)
        if not dependencies_now.functions <= self._before.functions:
            self._expected.add(self.executed)
            raise NotUsable("it executes functions that the step before has not")
        if any(
            code.co_filename.startswith(_OPTIMIZERS)
            for code in (self.executed.codes or {}).values()
        ):
            raise NotRecordable("runs an optimizer inside the model or guide")
        if name := self._generators.moved():
            raise NotRecordable(f"draws random numbers from {name}: use PyTorch's")
        stored = set(pyro.get_param_store().keys())
        if new := stored - self._names:
            raise NotUsable(f"makes a new parameter, {sorted(new)[0]}")
        keys = {(id(s.space), s.key) for s in slots}

        def is_slot(entry: Entry) -> bool:
            return (id(getattr(entry.get, "__self__", None)), entry.key) in keys

        for dependencies in (self._before, dependencies_now):
            entries = [e for e in dependencies.entries if type(e.key) is not str or not is_slot(e)]
            dependencies.entries = entries
        if (entry := self._before.changed()) is not None:
            raise NotRecordable(f"each step changes {entry.name}, which a replay would not")
        if dependencies_now.unsupported:
            raise NotRecordable(dependencies_now.unsupported)
        return dependencies_now


# Recordings ---------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """
    The results of one step.

    :ivar loss: the result of the loss.
    :ivar assumed: whether all guards of the recording are satisfied.
    :ivar gradients: one for each of the recording's leaves.
    :ivar written: the new values of each slot, then the values of each update in place.
    """

    loss: Tensor
    assumed: list[Tensor]
    gradients: list[Tensor]
    written: list[list[Tensor]]

    @cached_property
    def numbers(self) -> list[float]:
        """Return the loss and the guards, which are all numbers of a step that the host reads."""
        return read(self.loss, *self.assumed)

    def is_usable(self) -> bool:
        """Return whether the guards hold and the results are finite."""
        loss, *assumed = self.numbers
        return all(assumed) and math.isfinite(loss)


@dataclass(eq=False)
class Recording:
    """
    A recorded step.

    :ivar leaves: the parameters that have a gradient.
    :ivar params: names of ``pyro.param`` statements and the parameters behind them.
    :ivar param_sites: the messages of these statements for Pyro's handlers, without values.
    :ivar sizes: how many outputs of the graph, after the loss, are guards, gradients, of each
        slot, and of each update.
    :ivar dependencies: the values that the graph has as constants.
    :ivar adds_gradients: whether replays add the gradients themselves, without PyTorch's backward
        pass, which calls hooks.
    """

    graph: GraphModule
    constants: list[Tensor]
    updates: list[Update]
    leaves: list[Tensor]
    params: list[tuple[str, Tensor]]
    param_sites: dict[str, dict[str, object]]
    slots: list[Slot]
    sizes: list[int]
    dependencies: Dependencies
    adds_gradients: bool
    uses: int = 0
    misses: int = 0
    run: Run | None = None

    def __post_init__(self) -> None:
        self._shapes = [(leaf, leaf.shape) for leaf in self.leaves]
        # Values that a step reads after the previous step wrote them.
        self._sources = [
            (i, s) for i, c in enumerate(self.constants) for s in self.slots if s.before is c
        ]

    def changed(self) -> str | None:
        """Return the first value that the graph treats as constant and that has changed, if any."""
        store = dict(pyro.get_param_store().named_parameters())
        for name, value in self.params:
            if store.get(name) is not value:
                return f"parameter '{name}'"
        for i, slot in self._sources:
            if not _is_like(slot.space.get(slot.key), self.constants[i]):
                return f"attribute '{slot.key}' of {slot.owner.__name__}"
        if not all(p.requires_grad and p.shape == s for p, s in self._shapes):
            return "a parameter's shape, or whether it requires a gradient,"
        if self.adds_gradients and any(map(compat.has_gradient_hooks, self.leaves)):
            return "a hook on a parameter"
        entry = self.dependencies.changed()
        return None if entry is None else entry.name

    def inputs(self, call: Call) -> list[Tensor]:
        """
        Return the inputs of the graph: the present values of its constants, and those of the call.
        """
        for i, slot in self._sources:
            self.constants[i] = slot.space[slot.key]
        return [t.detach() for t in (*self.constants, *call.inputs())]

    @torch.enable_grad()  # as when it was recorded: kernels of nn.LSTM depend on the mode
    def replay(self, run: Run, inputs: list[Tensor]) -> Outcome:
        """Compute a step. It changes only the random number generators."""
        return self.outcome(run(*inputs))

    def outcome(self, outputs: list[Tensor]) -> Outcome:
        """Convert the outputs of a graph to an outcome."""
        loss, *others = outputs
        remaining = iter(others)
        assumed, gradients, *written = [list(islice(remaining, size)) for size in self.sizes]
        return Outcome(loss, assumed, gradients, written)

    def updated(self, outcome: Outcome) -> list[tuple[Update, Tensor, list[Tensor]]]:
        """Return each update in place, with its tensor and the values to write."""
        new = outcome.written[len(self.slots) :]
        return [(u, self.constants[u.constant], n) for u, n in zip(self.updates, new, strict=True)]

    def commit(self, outcome: Outcome) -> None:
        """Write all values of the step except gradients."""
        for update, buffer, new in self.updated(outcome):
            update.write(buffer, new)
        for slot, tensors in zip(self.slots, outcome.written, strict=False):
            slot.write(tensors)


def _is_like(now: Any, then: Tensor) -> bool:
    if not isinstance(now, Tensor):
        return False
    return (now.shape, now.dtype, now.device) == (then.shape, then.dtype, then.device)


class _Step:
    """Collects the parts of a recording while the step runs."""

    def __init__(self, loss: object, call: Call, around: Surroundings) -> None:
        self._loss, self._call, self._around = loss, call, around
        self.leaves: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        call = self._call
        args, kwargs = call.with_inputs(inputs)
        function = getattr(self._loss, call.function)
        mode = ReadingMode(self._backward, call.numbers(inputs))
        with poutine.trace(param_only=True) as capture, self._around.watched(mode) as assumed:
            returned = function(call.model, call.guide, *args, **kwargs)
            if isinstance(returned, Tensor) and returned.requires_grad:
                self._backward(returned)
        store = pyro.get_param_store()
        # With module_local_params, the parameters of modules are not in the store.
        sites = {n: site for n, site in capture.trace.nodes.items() if n in store}
        self.params = [(n, site["value"].unconstrained()) for n, site in sites.items()]
        self.param_sites = {n: {**site, "value": None} for n, site in sites.items()}
        if (total := total_norm(self.gradients)) is not None:
            assumed.append(total - total == 0)  # not finite: the plain step names the cause
        self.slots = self._around.slots()
        loss = self._result(returned)
        parts = [
            assumed if len(assumed) < 2 else [torch.stack([a.reshape(()) for a in assumed]).all()],
            self.gradients,
            *(slot.tensors for slot in self.slots),
        ]
        self.sizes = [len(part) for part in parts]
        self.outputs = [loss.detach(), *(t.detach() for part in parts for t in part)]
        return self.outputs

    def _backward(
        self, loss: Tensor, gradient: Tensor | None = None, *_: object, **__: object
    ) -> None:
        leaves = _leaves_of(loss)
        gradients = gradients_of(loss, leaves, gradient) if leaves else ()
        for leaf, new in zip(leaves, gradients, strict=True):
            if new is None:
                continue
            at = next((i for i, known in enumerate(self.leaves) if known is leaf), None)
            if at is None:
                self.leaves.append(leaf)
                self.gradients.append(new)
            else:
                self.gradients[at] = self.gradients[at] + new

    def _result(self, returned: object) -> Tensor:
        loss, function = getattr(returned, "tensor", returned), self._call.function
        differentiable = function == "differentiable_loss"
        if not isinstance(loss, Tensor) or (differentiable and loss is not returned):
            kind, wanted = type(returned).__name__, "tensor" if differentiable else "number"
            raise NotRecordable(f"its {function} returns a {kind}, and not a {wanted}")
        for slot in self.slots if differentiable else ():
            # The user may add a term, such as a penalty, to the loss.
            if is_written(slot.owner) and any(t.requires_grad for t in slot.tensors):
                raise NotRecordable(
                    f"attribute '{slot.key}' of {slot.owner.__name__} has a gradient, which that "
                    f"of a recorded step would not: detach it, or make it a pyro.factor"
                )
        return loss


def record(loss: object, call: Call, executed: ExecutedCode) -> tuple[Recording, Outcome]:
    """
    Take a step and record it.

    :param executed: the functions that the previous step executed.
    :returns: the recording, and the results of the step. Its values are written, but not its
        gradients.
    :raises NotRecordable: with the reason; then only the generators have changed.
    """
    roots = (call.model, call.guide, loss, *(a for a in call.leaves if callable(a)))
    with Surroundings(*roots, executed=executed) as around:
        step = _Step(loss, call, around)
        # Copies, because a tensor that a program also reads elsewhere is not only an argument.
        traced = trace(step, [t.detach() for t in call.inputs()])
        if (adds := call.function == "loss_and_grads") and any(
            map(compat.has_gradient_hooks, step.leaves)
        ):
            raise NotRecordable(
                "a parameter has a hook on its gradient: use (model, guide) modules"
            )
        dependencies = around.check(step.slots)
        graph, constants, updates = as_function(*traced)
        if any(constants[update.constant].requires_grad for update in updates):
            raise NotRecordable(
                "changes a parameter in place: do so after the step, or use a constraint"
            )
        recording = Recording(
            graph=graph,
            constants=constants,
            updates=updates,
            leaves=step.leaves,
            params=step.params,
            param_sites=step.param_sites,
            slots=step.slots,
            sizes=[*step.sizes, *(2 if update.rows else 1 for update in updates)],
            dependencies=dependencies,
            adds_gradients=adds,
        )
        outcome = recording.outcome(step.outputs)
        if not outcome.is_usable():
            raise NotUsable
    for name, value in recording.params:
        dependencies.watch_gradient(value, name)
    return recording, outcome
