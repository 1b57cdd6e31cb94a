"""How much of its momentum a chain keeps between transitions, learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyro_mcvae.chains.transitions import begin_with, of_transition

# With all of it kept, the gradient of sqrt(1 - momentum**2) would be infinite.
_MOST = 0.999


class LearnedMomentum(nn.Module):
    r"""
    The share :math:`\mu` of the momentum that a chain keeps, trained with the bound by its
    gradient: one for all transitions, or one for each.

    .. math:: \mu_k = 0.999\, \text{sigmoid}(a_k) .

    It needs the full gradient. A chain's first transition draws its momentum anew, so the first of
    several values is not used.

    :param initial: more than 0 and less than 0.999, a number or a tensor without dims.
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
        start = begin_with(_inside(initial), num_transitions)
        self.logit = nn.Parameter((start / _MOST).logit())

    def forward(self, transition: int = -1) -> Tensor:
        """
        Return the share that is kept before a transition, a scalar.

        :param int transition: of which transition of a chain, from 0; the last by default.
        """
        logit = of_transition("momentum", self.logit, self.num_transitions, transition)
        return _MOST * logit.sigmoid()


def _inside(value: float | Tensor) -> Tensor:
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise ValueError(f"initial must be a number or a tensor, got {value!r}")
    # A number takes the default precision, a tensor keeps its own.
    start = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if start.dim() or not 0 < start < _MOST:
        raise ValueError(f"initial must be more than 0 and less than {_MOST}, got {value!r}")
    return start.detach().clone()
