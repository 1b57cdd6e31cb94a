"""The loss that a guide was trained by, as far as a judge needs to know it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from pyro_mcvae.compiled.elbo import CompiledELBO
from pyro_mcvae.evaluation.tables import number
from pyro_mcvae.evaluation.weights import Weights

__all__ = ["TrainedLoss", "trained_loss"]

_REPEATS = 20


@dataclass(frozen=True)
class TrainedLoss:
    """
    :ivar name: its class.
    :ivar num_particles: how many it has; 1 if it does not say.
    :ivar bound: minus its value, in nats per weight.
    :ivar standard_error: of the bound.
    :ivar num_steps: of its chains, if it has any.
    """

    name: str
    num_particles: int
    bound: float
    standard_error: float
    num_steps: int | None = None

    @property
    def label(self) -> str:
        """As a user writes it, without its options."""
        return f"{self.name}({self.num_steps or self.num_particles})"

    def __str__(self) -> str:
        particles = f"{self.num_particles} particle{'s' * (self.num_particles != 1)}"
        steps = "" if self.num_steps is None else f"{self.num_steps} steps, "
        return f"{number(self.bound, self.standard_error)} ({steps}{particles})"


def trained_loss(weights: Weights, loss: Any) -> TrainedLoss:
    """
    Some values of a loss on the programs that are judged.

    :raises ValueError: for what is no loss.
    """
    plain = loss.plain if isinstance(loss, CompiledELBO) else loss
    if isinstance(plain, type) or not callable(getattr(plain, "loss", None)):
        raise ValueError(
            f"loss must be the loss that the guide was trained by, such as Trace_ELBO(), got "
            f"{loss!r}"
        )
    programs, num_weights = weights.programs, float(weights.reference.num_weights)
    values = torch.tensor(
        [
            -float(plain.loss(*programs.pair, *programs.args, **programs.kwargs)) / num_weights
            for _ in range(_REPEATS)
        ],
        dtype=torch.float64,
    )
    count = int(getattr(plain, "num_particles", 1))
    steps = getattr(plain, "num_steps", None)
    error = float(values.std()) / math.sqrt(_REPEATS)
    return TrainedLoss(type(plain).__name__, count, float(values.mean()), error, steps)
