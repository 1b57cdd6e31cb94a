"""CompiledELBO: decide when a step is recorded, replayed, compared and left uncompiled."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, cast

import pyro
import torch
from pyro.infer.elbo import ELBO
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor, nn

from pyro_mcvae.compiled.backends import Backend, Run, check_kernels, differing, moved_outputs
from pyro_mcvae.compiled.recording import (
    Args,
    Call,
    Kwargs,
    NotUsable,
    Outcome,
    Recording,
    gradients_of,
    record,
)
from pyro_mcvae.compiled.tracer import NotRecordable
from pyro_mcvae.ops.checks import FixedOptions, WarnOnce, options_of
from pyro_mcvae.ops.compat import multiplied
from pyro_mcvae.ops.tensors import Generators, is_due
from pyro_mcvae.programs.contract import LossModule
from pyro_mcvae.programs.isolation import visible_handlers
from pyro_mcvae.programs.outside_values import Dependencies, ExecutedCode
from pyro_mcvae.programs.types import Program, first_line

# One kind of call of a loss: when it is recorded, replayed, compared, and left uncompiled.

_logger = logging.getLogger(__name__)

# Uncompiled steps before the first recording, in which programs create their parameters.
_PLAIN_STEPS = 2
# The cost of a recording in steps, the seconds above which it is logged, and the longest wait. If a
# recording served for fewer steps than its cost, the wait for the next one doubles.
_COST, _LONG, _MAX_WAIT = 30, 20, 1024
# If attempts are at least this many steps apart, the log names what changes.
_OFTEN = 64
# The number of stored recordings of one specialization, such as of training and evaluation mode.
_MAX_RECORDINGS = 4
# The number of failed comparisons after which the loss stays uncompiled.
_MAX_FAILURES = 3
# The use at which a recording is compiled; one that is used once or twice is not worth it.
_COMPILED_FROM = 3

_MISSED = object()


class Specialization:
    """
    Calls that differ only in the values of their tensors.

    :param loss: the loss.
    :param log_reason: logs why the calls cannot be recorded.
    """

    def __init__(self, loss: object, backend: Backend, log_reason: Callable[[str], object]) -> None:
        self._loss, self._backend, self._log_reason = loss, backend, log_reason
        self._recordings: list[Recording] = []
        # Plain steps since the last attempt to record one, and how many there are before the next.
        self._plain_steps, self._wait = 0, _PLAIN_STEPS
        self._failures = self._uses = self._num_recorded = 0
        self._changed, self._seconds = "", 0.0
        self._dependencies: Dependencies | None = None
        self._executed, self._more = ExecutedCode(), ExecutedCode()
        self.unsupported = ""

    def step(self, call: Call) -> object:
        """Take one step."""
        if self.unsupported:
            return self._plain(call)
        for recording in tuple(self._recordings):
            if changed := recording.changed():
                self._changed = changed
            elif (loss := self._replayed(recording, call)) is not _MISSED:
                return loss
        if self._plain_steps >= self._wait and self._is_stable():
            return self._recorded(call)
        return self._watched(call)

    def _is_stable(self) -> bool:
        """Return whether nothing has changed since the last plain step."""
        if self._dependencies is None:
            return False
        if (entry := self._dependencies.changed()) is None:
            return True
        self._changed = entry.name
        self._wait_longer()
        return False

    def _wait_longer(self) -> None:
        self._plain_steps = 0
        self._wait = min(2 * self._wait, _MAX_WAIT)
        if self._wait == _OFTEN and self._changed:
            _logger.warning(
                "most steps run uncompiled, since %s changes again and again (arguments of the "
                "programs may change at each step, if they are floats or tensors)",
                self._changed,
            )

    def _plain(self, call: Call) -> object:
        """Take the uncompiled step."""
        return getattr(self._loss, call.function)(call.model, call.guide, *call.args, **call.kwargs)

    def _watched(self, call: Call) -> object:
        """Take the uncompiled step, and note the code that it executes before a recording."""
        self._plain_steps += 1
        if self._plain_steps < self._wait:
            return self._plain(call)
        begin = time.perf_counter()
        with ExecutedCode() as self._executed:
            loss = self._plain(call)
        self._seconds = time.perf_counter() - begin
        self._executed.add(self._more)
        self._dependencies = Dependencies.of(call.model, call.guide, executed=self._executed)
        return loss

    def _recorded(self, call: Call) -> object:
        generators = Generators()
        if self._uses >= _COST * self._num_recorded:
            self._wait, self._plain_steps = _PLAIN_STEPS, 0
        else:
            self._wait_longer()
        self._num_recorded += 1
        if (seconds := _COST * self._seconds) > _LONG:
            _logger.warning("recording a step once, which may take up to %.0f s", seconds)
        try:
            recording, outcome = record(self._loss, call, self._executed)
        except NotRecordable as reason:
            generators.put_back()
            if isinstance(reason, NotUsable):
                self._more.add(self._executed)
            else:
                self._give_up(str(reason))
            return self._plain(call)
        self._recordings = [recording, *self._recordings[: _MAX_RECORDINGS - 1]]
        return self._to_result(call, recording, outcome)

    def _replayed(self, recording: Recording, call: Call) -> object:
        recording.uses += 1
        self._uses += 1
        generators = Generators()
        compared = is_due(recording.uses)
        try:
            inputs = recording.inputs(call)
            run = recording.graph if compared else self._run(recording, inputs)
            outcome = recording.replay(run, inputs)
        except RuntimeError as error:
            generators.put_back()
            self._failed(recording, f"its replay failed ({first_line(error)})")
            return _MISSED
        if compared:
            generators.put_back()
            return self._compared(recording, outcome, call, generators)
        if not outcome.is_usable():
            # The step takes another branch than the recorded one, or is not finite.
            generators.put_back()
            recording.misses += 1
            if recording.misses > 8 + recording.uses // 2:
                self._recordings.remove(recording)
            return _MISSED
        self._recordings.sort(key=lambda r: r is not recording)  # tried first next time
        recording.commit(outcome)
        return self._to_result(call, recording, outcome)

    def _run(self, recording: Recording, inputs: list[Tensor]) -> Run:
        if recording.run is None:
            if recording.uses < _COMPILED_FROM and not self._backend.replays:
                return recording.graph
            recording.run = self._backend.compile(recording.graph, inputs)
        return recording.run

    def _compared(
        self, recording: Recording, outcome: Outcome, call: Call, begin: Generators
    ) -> object:
        """Take the uncompiled step, and compare the replayed one with it."""
        result, loss, gradients = self._run_eager(call, recording)
        after = Generators()
        if all(map(bool, outcome.assumed)) and bool(loss.isfinite()):

            def moved(seed: int) -> list[Tensor]:
                begin.put_back()
                inputs = recording.inputs(call)
                again = recording.outcome(moved_outputs(recording.graph, inputs, seed))
                new = [new[-1] for *_, new in recording.updated(again)]
                return [again.loss, *again.gradients, *new]

            pairs = [
                (outcome.loss, loss),
                *zip(outcome.gradients, gradients, strict=True),
                *(update.done(buffer, new) for update, buffer, new in recording.updated(outcome)),
            ]
            if differing(pairs, recording.graph, moved):
                self._failed(recording, "its numbers have changed")
            elif recording.run is not None:
                try:
                    with torch.enable_grad():
                        check_kernels(recording.run, recording.graph, recording.inputs(call))
                except RuntimeError as error:
                    why = "the step is replayed without a compiler from now on: %s"
                    _logger.warning(why, error)
                    recording.run = recording.graph
            after.put_back()
        return result

    def _failed(self, recording: Recording, why: str) -> None:
        self._recordings.remove(recording)
        self._failures += 1
        if self._failures >= _MAX_FAILURES:
            self._give_up(f"{why}, for the {self._failures}rd time: it depends on what is not seen")
        else:
            _logger.warning("a step is recorded again, since %s", why)

    def _give_up(self, reason: str) -> None:
        self._recordings, self._dependencies, self.unsupported = [], None, reason
        self._log_reason(reason)

    # The three functions of a loss: return the result of a recorded step like that of the plain
    # one.

    def _run_eager(self, call: Call, recording: Recording) -> tuple[Any, Tensor, list[Tensor]]:
        """Take the uncompiled step, and return also its loss and gradients for the comparison."""
        leaves, adds = recording.leaves, call.function == "loss_and_grads"
        before = [p.grad for p in leaves]
        gradients: Sequence[Tensor | None] = []
        for p in leaves if adds else ():
            p.grad = None
        try:
            result: Any = self._plain(call)
            if adds:
                gradients = [p.grad for p in leaves]
        finally:
            # Existing gradients are added to zero gradients.
            for p, old in zip(leaves, before, strict=True):
                if adds and old is not None:
                    p.grad = old if p.grad is None else old + p.grad
        if call.function == "differentiable_loss" and result.requires_grad:
            gradients = gradients_of(result, leaves)  # one more than the uses
        loss = (
            result.detach()
            if isinstance(result, Tensor)
            else torch.tensor(result, dtype=torch.double)
        )
        zeros = zip(gradients, leaves, strict=False)
        return result, loss, [torch.zeros_like(p) if g is None else g for g, p in zeros]

    def _to_result(self, call: Call, recording: Recording, outcome: Outcome) -> object:
        """Return the results of a recorded step in the form of the uncompiled one."""
        if call.function == "loss_and_grads":
            for p, gradient in zip(recording.leaves, outcome.gradients, strict=True):
                if p.grad is None:
                    p.grad = gradient
                else:
                    p.grad += gradient
        store = pyro.get_param_store()
        for handler in visible_handlers():
            # SVI finds the parameters by these. A call of pyro.param takes three times as long.
            assert isinstance(handler, TraceMessenger)
            for name, site in recording.param_sites.items():
                handler.trace.add_node(name, **{**site, "value": store[name]})
        if call.function != "differentiable_loss":
            return outcome.numbers[0]
        if not recording.leaves or not torch.is_grad_enabled():
            return outcome.loss
        return _WithGradients.apply(outcome.loss, outcome.gradients, *recording.leaves)


class _Context(Protocol):
    """Passes gradients from the forward to the backward pass."""

    gradients: list[Tensor]


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are already there."""

    @staticmethod
    def forward(ctx: _Context, loss: Tensor, gradients: list[Tensor], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: _Context, scale: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a recorded loss has first derivatives only, and create_graph=True asks for more: "
                "use the loss that CompiledELBO was made of, CompiledELBO(loss).plain"
            )
        if len({g.dtype for g in ctx.gradients}) > 1:
            return (None, None, *(g * scale.to(g.dtype) for g in ctx.gradients))
        return (None, None, *multiplied(ctx.gradients, scale.to(ctx.gradients[0].dtype)))


# A loss that is recorded once and replayed.

# The number of kinds of calls. A program with more is called with new ones all the time, so that
# recordings do not pay.
_MAX_SPECIALIZATIONS = 16

# The options of Pyro's losses, read from the plain loss.
_PYROS = frozenset(inspect.signature(ELBO.__init__).parameters) - {"self", "num_particles"}


class CompiledELBO(FixedOptions, ELBO, nn.Module):
    """
    Any loss, recorded once and replayed without its Python code.

    The first steps run uncompiled. Then one step is recorded as a graph of tensor operations,
    including its gradient and the updates of step sizes. Later steps run the graph.

    :param loss: an objective with Pyro's interface: one of this package's, or Pyro's own.
    :param str backend: ``"inductor"`` compiles the graph, once, for seconds to a minute;
        ``"eager"`` runs the recorded operations, those of the plain loss up to rounding. Other
        backends of :func:`torch.compile` are allowed.
    :param options: options of :func:`torch.compile`, such as ``mode="reduce-overhead"``.
    :raises ValueError: if ``loss`` is not a loss, or if an option does not exist.
    :raises RuntimeError: in the backward pass of a recorded step, for second derivatives.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro_mcvae import CompiledELBO, TraceSIS_ELBO
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     slope = pyro.param("slope", torch.tensor(0.1))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(slope * x, 0.7))
        >>> x = torch.tensor([-2.0, 0.0, 2.0])
        >>> loss = CompiledELBO(TraceSIS_ELBO(num_steps=2), backend="eager")
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss)
        >>> losses = [svi.step(x) for _ in range(100)]
        >>> round(pyro.param("slope").item(), 1)  # of the posterior mean: 0.5
        0.5
    """

    def __init__(self, loss: ELBO, backend: str = "inductor", **options: object) -> None:
        nn.Module.__init__(self)
        if isinstance(loss, type) or not callable(getattr(loss, "loss", None)):
            raise ValueError(f"CompiledELBO takes a loss such as Trace_ELBO(), got {loss!r}")
        self.plain = loss
        ELBO.__init__(self, num_particles=getattr(loss, "num_particles", 1))
        self.backend = backend
        self._backend = Backend(backend, options)
        self._clear()

    def _is_initialized(self) -> bool:
        return "_backend" in vars(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_initialized() and name in (options_of(self.plain) | _PYROS) - {"loss"}:
            setattr(self.plain, name, value)  # may raise an error
            self._clear()
        else:
            super().__setattr__(name, value)

    @property
    def num_particles(self) -> Any:
        """Return the number of particles of the plain loss; it can be assigned."""
        return self.plain.num_particles

    @num_particles.setter
    def num_particles(self, num_particles: int) -> None:
        self.plain.num_particles = num_particles

    def loss(self, model: Program, guide: Program, *args: object, **kwargs: object) -> Any:
        """Return the ``loss`` of the plain loss."""
        return self._step("loss", model, guide, args, kwargs)

    def loss_and_grads(
        self, model: Program, guide: Program, *args: object, **kwargs: object
    ) -> Any:
        """Return the ``loss_and_grads`` of the plain loss."""
        return self._step("loss_and_grads", model, guide, args, kwargs)

    def differentiable_loss(
        self, model: Program, guide: Program, *args: object, **kwargs: object
    ) -> Tensor:
        """Return the ``differentiable_loss`` of the plain loss."""
        return cast(Tensor, self._step("differentiable_loss", model, guide, args, kwargs))

    def _get_trace(self, model: Program, guide: Program, args: Args, kwargs: Kwargs) -> object:
        # Pyro's hook for one particle, abstract in ELBO.
        return self.plain._get_trace(model, guide, args, kwargs)

    def _step(
        self, function: str, model: Program, guide: Program, args: Args, kwargs: Kwargs
    ) -> object:
        call = Call(function, model, guide, args, kwargs)
        try:
            key = call.key
            if (
                key not in self._specializations
                and len(self._specializations) >= _MAX_SPECIALIZATIONS
            ):
                raise NotRecordable(
                    f"it is called in more than {_MAX_SPECIALIZATIONS} ways (shapes, modes, "
                    f"arguments that are no tensors or floats): new ones"
                )
            if key not in self._specializations:
                self._specializations[key] = Specialization(
                    self.plain, self._backend, self._log_reason
                )
            return self._specializations[key].step(call)
        except NotRecordable as reason:
            self._log_reason(str(reason))
            return getattr(self.plain, function)(model, guide, *args, **kwargs)

    def __call__(self, model: nn.Module, guide: nn.Module) -> LossModule:
        """Return a module whose call on data returns the loss, for ``torch.optim``."""
        return LossModule(model, guide, self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Attributes of the plain loss, such as kernel, schedule, last_step and bounds.
            if name.startswith("_") or name == "plain":
                raise
            return getattr(self.plain, name)

    def __getstate__(self) -> dict[str, object]:
        # Recordings refer to the tensors of the programs, so a copy records again.
        return {**self.__dict__, "_specializations": {}, "_warn": WarnOnce(_logger)}

    def _log_reason(self, reason: str) -> None:
        self._warn(f"{type(self.plain).__name__} cannot be recorded and runs uncompiled: {reason}")

    def _clear(self) -> None:
        self._specializations: dict[Hashable, Specialization] = {}
        self._warn = WarnOnce(_logger)
