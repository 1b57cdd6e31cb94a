"""How much of its momentum a chain keeps between transitions: given, or learned."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from pyro_mcvae.chains.step_size_base import checked_value
from pyro_mcvae.chains.transitions import begin_with, of_transition

__all__ = ["FixedMomentum", "LearnedMomentum", "Momentum", "as_momentum"]

# With all of it kept, the gradient of sqrt(1 - momentum**2) would be infinite.
_MOST = 0.999


class Momentum(nn.Module, ABC):
    r"""
    Base class: a module whose call returns the share :math:`\mu` of the momentum that is kept.

    Before a transition the momentum becomes :math:`\mu\, p + \sqrt{1 - \mu^2}\, u` with
    :math:`u \sim N(0, I)`.
    :class:`LearnedMomentum` has an example.

    :ivar num_transitions: for how many transitions there is a value each; None for one value that
        serves them all.

    Example::

        >>> class Rising(Momentum):
        ...     def forward(self, transition=-1):
        ...         return torch.tensor(0.9 if transition else 0.5)
        >>> from pyro_mcvae import TraceSIS_ELBO, UnderdampedLangevin
        >>> elbo = TraceSIS_ELBO(5, UnderdampedLangevin(momentum=Rising()))
    """

    num_transitions: int | None = None

    @abstractmethod
    def forward(self, transition: int = -1) -> Tensor:
        """
        The share that is kept, a scalar.

        :param int transition: of which transition of a chain, from 0; the last by default.
        """

    def __call__(self, *transition: int) -> Tensor:
        """
        The share that is kept before a transition, the last by default.

        :raises ValueError: for what is no tensor without dims, or of shape ``[D]``.
        """
        return checked_value(self, super().__call__(*transition), most=1)


class FixedMomentum(Momentum):
    """
    A share that stays as it is.

    :param float value: at least 0 and less than 1.
    :raises ValueError: if it is not.

    Example::

        >>> FixedMomentum(0.5)()
        tensor(0.5000)
    """

    value: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(
                f"momentum must be at least 0 and less than 1, got {value!r}; LearnedMomentum() "
                f"is trained"
            )
        # It is what it was given for, and no part of a checkpoint.
        self.register_buffer("value", torch.tensor(float(value)), persistent=False)

    def forward(self, transition: int = -1) -> Tensor:
        return self.value


class LearnedMomentum(Momentum):
    r"""
    A share that is trained with the bound, by its gradient: one for all transitions, or one for
    each.

    .. math:: \mu_k = 0.999\, \text{sigmoid}(a_k) .

    It needs the full gradient. A chain's first transition draws its momentum anew, so the first of
    several values is not used.

    :param initial: more than 0 and less than 0.999, a number or a tensor of shape
        ``[num_transitions]``.
    :param int num_transitions: one value for each of so many transitions, the ``num_steps`` of the
        objective; None for one that serves them all.
    :raises ValueError: for values outside of these ranges.

    Example::

        >>> LearnedMomentum(0.9)()
        tensor(0.9000, grad_fn=<MulBackward0>)
        >>> LearnedMomentum(0.9, num_transitions=5).logit.shape
        torch.Size([5])
    """

    def __init__(self, initial: float | Tensor = 0.9, num_transitions: int | None = None) -> None:
        super().__init__()
        self.num_transitions = num_transitions
        start = begin_with("initial", _inside(initial), num_transitions, per_coordinate=False)
        self.logit = nn.Parameter((start / _MOST).logit())

    def forward(self, transition: int = -1) -> Tensor:
        logit = of_transition("momentum", self.logit, self.num_transitions, transition)
        return _MOST * logit.sigmoid()


def as_momentum(value: float | Momentum) -> Momentum:
    """A number as a momentum that stays as it is."""
    return value if isinstance(value, Momentum) else FixedMomentum(value)


def _inside(value: float | Tensor) -> Tensor:
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise ValueError(f"initial must be a number or a tensor, got {value!r}")
    # A number takes the default precision, a tensor keeps its own.
    start = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if not bool(((start > 0) & (start < _MOST)).all()):
        raise ValueError(f"initial must be more than 0 and less than {_MOST}, got {value!r}")
    return start.detach().clone()
