"""A whole training step as one CUDA graph."""

from __future__ import annotations

from typing import Any

import pyro
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_mcvae.ops.checks import check_count
from pyro_mcvae.training.graph import StepGraph

__all__ = ["CapturedStep", "capture"]


def capture(
    elbo_module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *example_args: Any,
    warmup: int = 3,
    **example_kwargs: Any,
) -> CapturedStep:
    """
    Make a training step that replays one CUDA graph: the bound, its gradient through chains and
    densities, the optimizer's step, and the adaptation of step sizes.

    A step of a small model spends most of its time in Python, one launch after the other; a graph
    launches everything at once, on memory that stays where it is. The first ``warmup`` steps run
    as ever, the next one is recorded, and all further ones are replayed: the same training as the
    plain loop, with other noise in every step. On the CPU every step is the plain one.

    Nothing may depend on values that the host reads, so Pyro's validation is off within the step: a
    NaN shows in the loss, which is returned as a tensor and waits for nothing until it is read.

    :param elbo_module: ``elbo(model, guide)``, all of it on one device.
    :param optimizer: of its parameters; on CUDA one that can be captured, such as
        ``torch.optim.Adam(..., capturable=True)``. A learning rate that changes must be a tensor.
    :param example_args: arguments of a step: those of every step must have their shapes and dtypes.
        What is no tensor has to stay as it is.
    :param int warmup: how many steps to run before one is recorded, at least 1.
    :returns: a function of the arguments that makes one step and returns the loss, detached.
    :raises ValueError: for arguments of another shape, and on CUDA for an optimizer that cannot be
        captured, for tensors on other devices, for programs that draw random numbers on the CPU
        (minibatches: pass ``subsample=index``), and for settings that changed after the recording.
    :raises RuntimeError: on CUDA, for programs that wait for the device, as ``z.item()`` does.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> class Guide(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.slope = torch.nn.Parameter(torch.tensor(0.1))
        ...     def forward(self, x):
        ...         with pyro.plate("data", len(x)):
        ...             pyro.sample("z", dist.Normal(self.slope * x, 0.7))
        >>> guide, x = Guide(), torch.tensor([-2.0, 0.0, 2.0])
        >>> optimizer = torch.optim.Adam(guide.parameters(), lr=0.05)
        >>> step = capture(TraceSIS_ELBO(num_steps=2)(model, guide), optimizer, x)
        >>> losses = [step(x) for _ in range(100)]
        >>> bool(abs(guide.slope - 0.5) < 0.2)
        True
    """
    return CapturedStep(elbo_module, optimizer, example_args, example_kwargs, warmup)


class CapturedStep:
    """
    A training step, made by :func:`capture`.

    :ivar replayed: how many steps were replayed.
    """

    def __init__(
        self,
        elbo_module: nn.Module,
        optimizer: torch.optim.Optimizer,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any],
        warmup: int,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"capture takes an optimizer of torch.optim, got {type(optimizer).__name__}: one "
                f"of Pyro's makes an optimizer for every parameter, at the step that first sees it"
            )
        warmup = check_count("warmup", warmup)
        if isinstance(elbo_module, DistributedDataParallel):
            raise ValueError(
                "capture takes elbo(model, guide) itself: steps of DistributedDataParallel, whose "
                "ranks talk to each other, are not captured"
            )
        self._module, self._optimizer, self._warmup = elbo_module, optimizer, warmup
        self._examples, self._spec = tree_flatten((example_args, example_kwargs))
        self.replayed = 0
        device = _device(optimizer)
        self._graph: StepGraph | None = None
        if device.type == "cuda":
            self._graph = StepGraph(elbo_module, optimizer, device, self._examples)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """
        One step of the optimizer.

        :returns: the loss before the step, a scalar without a graph.
        """
        given = self._checked(args, kwargs)
        if self._graph is None:
            return self._step(given)
        self._graph.fill(given)
        if self._warmup > 0:
            self._warmup -= 1
            # The last one with an error where the host waits, which names the line.
            return self._graph.rehearse(self._step, strict=self._warmup == 0)
        if self._graph.loss is None:
            self._graph.record(self._step)
        self.replayed += 1
        return self._graph.replay()

    def _step(self, given: list[Any]) -> Tensor:
        args, kwargs = tree_unflatten(given, self._spec)
        self._optimizer.zero_grad(set_to_none=True)
        with pyro.validation_enabled(False):
            loss: Tensor = self._module(*args, **kwargs)
            loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        given, spec = tree_flatten((args, kwargs))
        if spec != self._spec:
            raise ValueError(
                f"the step was captured for other arguments: {self._spec}, got {spec}; capture "
                f"another one for these"
            )
        for i, (now, example) in enumerate(zip(given, self._examples, strict=True)):
            if isinstance(example, Tensor) and isinstance(now, Tensor):
                if (now.shape, now.dtype) != (example.shape, example.dtype):
                    raise ValueError(
                        f"argument {i} has shape {tuple(now.shape)} and dtype {now.dtype}, but the "
                        f"step was captured for {tuple(example.shape)} and {example.dtype}: drop "
                        f"an incomplete last batch, or capture another step for it"
                    )
            elif isinstance(example, Tensor) or isinstance(now, Tensor) or now != example:
                raise ValueError(
                    f"argument {i} is {now!r}, but the step was captured for {example!r}: what is "
                    f"no tensor is part of the step; pass a tensor, or capture another step"
                )
        return given


def _device(optimizer: torch.optim.Optimizer) -> torch.device:
    found = {p.device for group in optimizer.param_groups for p in group["params"]}
    if len(found) > 1:
        raise ValueError(f"the parameters must be on one device, got {sorted(map(str, found))}")
    return found.pop() if found else torch.device("cpu")
