"""Whether the training of a guide has converged: its bound over a short continuation."""

from __future__ import annotations

import math
from typing import NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_mcvae.elbos.sgvb import TraceSGVB_ELBO
from pyro_mcvae.evaluation.clock import Clock, OutOfTimeError
from pyro_mcvae.programs.isolation import find_modules
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.types import first_line
from pyro_mcvae.training.checkpoint import undo_training

# Steps of the continuation, their first and last step size, and the number of draws of each bound.
_STEPS, _FIRST, _LAST, _DRAWS = 100, 1e-2, 1e-4, 20
# The largest rise of a converged training, in nats per weight.
_CLOSE = 0.1


class Rise(NamedTuple):
    """
    By how many nats the ELBO rises in 100 more steps of training.

    :ivar nats: NaN if it was not checked.
    :ivar error: the standard error.
    :ivar weights: the number of weights of the guide.
    :ivar why: why training could not continue; empty if it did, or if it was not checked.
    """

    nats: float = math.nan
    error: float = math.nan
    weights: int = 1
    why: str = ""

    @property
    def text(self) -> str:
        """Return what this means for the training, in lower case."""
        if self.why:
            return f"training may not have converged, since it cannot continue: {self.why}"
        rise = f"the bound rises by {self.nats:.1f} nats in {_STEPS} steps"
        return f"training has not converged: {rise}"

    @property
    def is_large(self) -> bool:
        """Return whether it is above 0.1 nats per weight, and above three of its errors."""
        return self.nats > max(_CLOSE * self.weights, 3 * self.error)


NOT_CHECKED = Rise()


def continue_training(
    programs: Programs, weights: int, clock: Clock, check: bool | None = None
) -> Rise:
    """
    Train on for 100 steps of Adam, restore all state, and return by how much the ELBO rose.

    The step size falls from 0.01 to 0.0001. Both bounds are means over the same random numbers.
    The result is NaN, with the reason, if training cannot continue. Parameters have other values
    until this returns, also in other threads.

    :param weights: the number of weights of the guide.
    :param Clock clock: the time of the call.
    :param check: None trains only if there is one weight, or the guide is an AutoGuide: encoders
        may be evaluated on other data than they are trained on.
    """
    if check is False or (
        check is None and weights > 1 and not isinstance(programs.guide, AutoGuide)
    ):
        return NOT_CHECKED
    loss, args, kwargs = TraceSGVB_ELBO(), programs.args, programs.kwargs
    stage = clock.stage("check of the training", _STEPS + 2 * _DRAWS, "steps")

    def bounds() -> Tensor:
        losses = []
        for seed in range(_DRAWS):
            stage.check()
            pyro.set_rng_seed(seed)
            losses.append(-loss.loss(programs.model, programs.guide, *args, **kwargs))
            stage.advance()
        return torch.tensor(losses, dtype=torch.float64)

    restore, gradients = undo_training(find_modules(*programs.pair)), dict[Tensor, Tensor | None]()
    try:
        before = bounds()
        with torch.enable_grad(), poutine.trace(param_only=True) as capture:
            loss.differentiable_loss(programs.model, programs.guide, *args, **kwargs)
        sites = capture.trace.nodes.values()
        parameters = {site["value"].unconstrained() for site in sites if site["type"] == "param"}
        trained = [p for p in parameters if p.requires_grad]
        gradients = {p: p.grad for p in trained}
        for p in trained:
            p.grad = None
        optimizer = torch.optim.Adam(trained, lr=_FIRST)
        schedule = torch.optim.lr_scheduler.ExponentialLR(
            optimizer, (_LAST / _FIRST) ** (1 / _STEPS)
        )
        for _ in range(_STEPS):
            stage.check()
            with torch.enable_grad():
                optimizer.zero_grad()
                loss.loss_and_grads(programs.model, programs.guide, *args, **kwargs)
            optimizer.step()
            schedule.step()
            stage.advance()
        rises = bounds() - before
    except OutOfTimeError:
        return Rise(why="the time budget ended")
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return Rise(why=first_line(error))
    finally:
        restore()
        for p, gradient in gradients.items():
            p.grad = gradient
    return Rise(float(rises.mean()), float(rises.std()) / _DRAWS**0.5, weights)
