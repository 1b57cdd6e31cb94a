"""The three functions of a loss: how a recorded step hands back what the plain one does."""

from __future__ import annotations

from typing import Protocol

import pyro
import torch
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor

from pyro_mcvae.compiled.case import Observed
from pyro_mcvae.compiled.gradients import gradients_of
from pyro_mcvae.compiled.recording import Outcome, Recording
from pyro_mcvae.compiled.signature import Call

__all__ = ["DifferentiableLoss", "Loss", "LossAndGrads"]


class Loss:
    """``loss``: numbers, no gradient."""

    name = "loss"

    def __init__(self, loss: object) -> None:
        self._loss = loss

    def plain(self, call: Call) -> object:
        """As ever."""
        return getattr(self._loss, self.name)(call.model, call.guide, *call.args, **call.kwargs)

    def observed(self, call: Call, recording: Recording) -> Observed:
        """As ever; also its results and its gradients, to be compared."""
        found = self.plain(call)
        return found, recording.tensors_of(found), []

    def handed(self, recording: Recording, outcome: Outcome) -> object:
        """What a recorded step computed."""
        _state_params(recording)
        return recording.result([r.item() for r in outcome.results])


class LossAndGrads(Loss):
    """``loss_and_grads``: gradients are accumulated in the parameters."""

    name = "loss_and_grads"

    def observed(self, call: Call, recording: Recording) -> Observed:
        """As ever, from gradients of zero, to which those that were there are added."""
        leaves = recording.leaves
        before = [p.grad for p in leaves]
        for p in leaves:
            p.grad = None
        try:
            found = self.plain(call)
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in leaves]
        finally:
            for p, old in zip(leaves, before, strict=True):
                if old is not None:
                    p.grad = old if p.grad is None else old + p.grad
        return found, recording.tensors_of(found), gradients

    def handed(self, recording: Recording, outcome: Outcome) -> object:
        """What a recorded step computed."""
        for p, gradient in zip(recording.leaves, outcome.gradients, strict=True):
            if p.grad is None:
                p.grad = gradient
            else:
                p.grad += gradient
        return super().handed(recording, outcome)


class DifferentiableLoss(Loss):
    """``differentiable_loss``: a tensor with a ``backward``."""

    name = "differentiable_loss"

    def observed(self, call: Call, recording: Recording) -> Observed:
        """As ever; its gradient is computed once more than it is used."""
        found = self.plain(call)
        assert isinstance(found, Tensor)
        if not found.requires_grad:
            return found, [found], []
        leaves = recording.leaves
        zipped = zip(gradients_of(found, leaves), leaves, strict=True)
        return found, [found], [torch.zeros_like(p) if g is None else g for g, p in zipped]

    def handed(self, recording: Recording, outcome: Outcome) -> object:
        """What a recorded step computed."""
        _state_params(recording)
        (loss,) = outcome.results
        if not recording.leaves or not torch.is_grad_enabled():
            return loss
        return _WithGradients.apply(loss, outcome.gradients, *recording.leaves)


class _Context(Protocol):
    """Where the backward pass finds what the forward pass has left."""

    gradients: list[Tensor]


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are already there."""

    @staticmethod
    def forward(ctx: _Context, loss: Tensor, gradients: list[Tensor], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: _Context, scale: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a recorded loss has first derivatives only, and create_graph=True asks for more: "
                "use the loss that CompiledELBO was made of, CompiledELBO(loss).plain"
            )
        return (None, None, *(g * scale.to(g.dtype) for g in ctx.gradients))


def _state_params(recording: Recording) -> None:
    """Say which parameters a step used to whom it concerns: SVI learns what to optimise by it."""
    store = pyro.get_param_store()
    for handler in _PYRO_STACK:
        # Within others nothing is replayed. To call pyro.param takes three times as long.
        assert isinstance(handler, TraceMessenger)
        for name, site in recording.param_sites.items():
            handler.trace.add_node(name, **{**site, "value": store[name]})
