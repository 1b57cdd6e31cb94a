"""What one step of an objective comes to: its value, its gradient, and its value per datum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pyro_mcvae.programs.contract import nonfinite_sites
from pyro_mcvae.programs.run import Run

# A sum of tensors, or a number where it had no summands.
Sum: TypeAlias = Tensor | float


class Bounds(NamedTuple):
    r"""
    An objective's value before it is summed: ``total = shared + (scale * per_datum).sum()``.

    :ivar ~torch.Tensor per_datum: the bound on log p(x_n) of each datum of the minibatch, in nats,
        not scaled by N/B; shape ``[*plates]``, or ``[elements]`` for programs with several
        separate plates.
    :ivar scale: N/B of the subsampled plates: a number, or a tensor like ``per_datum``.
    :ivar ~torch.Tensor shared: what belongs to no single datum: the global latents'
        log p - log q and the factors outside of the data's plates, scaled; a scalar.
    :ivar plates: the names of the plates of ``per_datum``, leftmost dimension first.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", 6, subsample=torch.tensor([1, 4])):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", 6, subsample=torch.tensor([1, 4])):
        ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))
        >>> bounds = TraceIWAE_ELBO(2).bounds(model, guide, torch.zeros(2))
        >>> bounds.per_datum, bounds.scale, bounds.plates
        (tensor([-1.2655, -1.2655]), 3.0, ('data',))
    """

    per_datum: Tensor
    scale: float | Tensor
    shared: Tensor
    plates: tuple[str, ...]

    @property
    def total(self) -> Tensor:
        """The bound on the log evidence of the full data set, in nats: minus the loss."""
        return self.shared + (self.scale * self.per_datum).sum()


@dataclass(slots=True)
class Estimate:
    """
    One step's value and gradient. :class:`MonteCarloELBO` has an example.

    :ivar value: the bound, a detached scalar.
    :ivar surrogate: a scalar whose gradient is the bound's gradient estimate.
    :ivar runs: the executions behind it, to name a site where the value is not finite.
    :ivar scored: whether the surrogate has the score-function terms of draws without
        reparameterization; a training step with such draws is refused otherwise.
    :ivar averaged: whether latents that were to be weighed are averaged over, as in the plain ELBO.
    :ivar overflow: what to say where the value is not finite though every site is.
    :ivar causes: finds what made it so before any site is looked at, a line each.
    :ivar remedy: what to add where it is not finite.
    :ivar finish: what to do after a training step that succeeded, such as adapting.
    :ivar bounds: returns the value per datum; None where an objective has no such value.
    """

    value: Tensor
    surrogate: Tensor
    runs: list[Run]
    scored: bool = False
    averaged: bool = False
    overflow: str = "every site is finite: their sum overflows"
    causes: Callable[[], list[str]] = list
    remedy: str = ""
    finish: Callable[[], None] | None = None
    bounds: Callable[[], Bounds] | None = None


def add_up(summands: Iterable[Sum]) -> Sum:
    """Their sum, without the operations that adding the number of no summands would cost."""
    tensors = [s for s in summands if isinstance(s, Tensor)]
    return sum(tensors[1:], tensors[0]) if tensors else 0.0


def times(value: Tensor, factor: float | Tensor) -> Tensor:
    """Their product, without an operation where the factor is the number 1."""
    return value if not isinstance(factor, Tensor) and factor == 1 else value * factor


def as_scalar(value: Sum) -> Tensor:
    """A sum as a tensor, also where it had no summands."""
    return value if isinstance(value, Tensor) else torch.tensor(float(value))


def finite_loss(estimate: Estimate) -> float:
    """
    Minus the bound, in nats.

    :raises ValueError: naming the sites where a log density is not finite.
    """
    loss = -estimate.value.item()
    if not math.isfinite(loss):
        raise _nonfinite(estimate, loss)
    return loss


def _nonfinite(estimate: Estimate, loss: float) -> ValueError:
    lines = estimate.causes() or nonfinite_sites(estimate.runs) or [estimate.overflow]
    if estimate.remedy:
        lines.append(estimate.remedy)
    return ValueError(f"the loss is {loss}, because of\n  " + "\n  ".join(lines))
