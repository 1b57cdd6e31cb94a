"""Recording a training step on CUDA, and replaying it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import pyro
import torch
from torch import Tensor, nn

__all__ = ["StepGraph"]

Step = Callable[[list[Any]], Tensor]


class StepGraph:
    """
    One step on tensors that stay in place.

    :param module: whose parameters and buffers must be on the device.
    :param inputs: the leaves of the arguments; tensors are copied to the device.
    :ivar loss: where the recorded step leaves its loss; None before.
    :raises ValueError: naming a tensor on another device, or an optimizer that cannot be captured.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        inputs: list[Any],
    ) -> None:
        _check_devices(module, device)
        _check_optimizer(optimizer)
        self._module, self._optimizer, self._device = module, optimizer, device
        self._inputs = [
            torch.empty_like(i, device=device) if isinstance(i, Tensor) else i for i in inputs
        ]
        self._stream = torch.cuda.Stream(device)
        self._graph: Any = None
        self._settings: list[Any] = []
        self.loss: Tensor | None = None

    def fill(self, given: list[Any]) -> None:
        """Copy a step's arguments to where the recording reads them."""
        for static, now in zip(self._inputs, given, strict=True):
            if isinstance(static, Tensor):
                static.copy_(now, non_blocking=True)

    def rehearse(self, step: Step, strict: bool) -> Tensor:
        """Make a step as ever, on a stream of its own; strict: with an error where it waits."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        mode = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(self._stream):
            try:
                torch.cuda.set_sync_debug_mode("error" if strict else mode)
                loss = step(self._inputs)
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                raise RuntimeError(
                    f"the step waits for the device, which a graph cannot, at {_line(error)}: "
                    f"leave out what reads a tensor's value there (.item(), if z > 0, indexing by "
                    f"booleans, a copy from the host)"
                ) from error
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return loss

    def record(self, step: Step) -> None:
        """
        Record a step; nothing is computed.

        :raises ValueError: for programs that draw on the CPU.
        """
        self._graph = torch.cuda.CUDAGraph()
        # Gradients are made once more, in the graph's own memory.
        self._optimizer.zero_grad(set_to_none=True)
        self._settings = self._present_settings()
        on_cpu = _cpu_generators()
        buffers = _buffers(self._module)
        with torch.cuda.graph(self._graph, stream=self._stream):
            loss = step(self._inputs)
            # A buffer that was replaced by a new tensor is read by the next replay where it was.
            for owner, name, before in buffers:
                now = owner._buffers.get(name)
                if now is not before and now is not None:
                    before.copy_(now)
        for owner, name, before in buffers:
            owner._buffers[name] = before
        if _cpu_generators() != on_cpu:
            raise ValueError(
                "the step draws random numbers on the CPU, which would be the same in every "
                "replay. A minibatch that a plate draws by subsample_size: pass its indices as an "
                "argument, pyro.plate('data', N, subsample=index). Other draws: make their "
                "parameters on the device"
            )
        self.loss = loss

    def replay(self) -> Tensor:
        """
        Launch the recorded step.

        :raises ValueError: if a setting that is part of it has changed.
        """
        for (name, before), (_, now) in zip(self._settings, self._present_settings(), strict=True):
            if before != now:
                raise ValueError(
                    f"{name} was {before!r} when the step was recorded, and is {now!r}: the graph "
                    f"would not see it. Capture another step, or for a learning rate pass a "
                    f"tensor, lr=torch.tensor(1e-3), to be changed in place"
                )
        self._graph.replay()
        assert self.loss is not None
        # The next replay overwrites it.
        return self.loss.clone()

    def _present_settings(self) -> list[Any]:
        found: list[Any] = []
        for i, group in enumerate(self._optimizer.param_groups):
            found += [
                (f"'{name}' of the optimizer's group {i}", value)
                for name, value in group.items()
                if isinstance(value, int | float | bool | tuple)
            ]
        modules = self._module.named_modules()
        return found + [(f"the training mode of '{n}'", m.training) for n, m in modules]


def _line(error: BaseException) -> str:
    """Where an error came from, PyTorch's own files left out."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"{os.sep}torch{os.sep}" not in f.filename]
    return f"{own[-1].filename}:{own[-1].lineno}, {own[-1].line}"


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (owner, name, value)
        for owner in module.modules()
        for name, value in owner._buffers.items()
        if value is not None
    ]


def _cpu_generators() -> list[Any]:
    state = pyro.util.get_rng_state()
    return [state["torch"].tolist(), state["random"], [str(s) for s in state["numpy"]]]


def _check_devices(module: nn.Module, device: torch.device) -> None:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    away = [(name, value.device) for name, value in tensors if value.device != device]
    if away:
        name, found = away[0]
        raise ValueError(
            f"'{name}' is on {found} and the optimizer's parameters are on {device}: a graph "
            f"would take its present value for a constant. Move it, elbo_module.to('{device}'), "
            f"before the optimizer is made"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if group.get("capturable") is False:
            raise ValueError(
                f"{name} counts its steps on the host: make it by torch.optim.{name}(..., "
                f"capturable=True)"
            )
