"""The possible values of a discrete distribution, and those that a site's slots take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_mcvae.programs.types import Distribution


class Choice(NamedTuple):
    """
    The values of a site's slots.

    :ivar value: shape ``[S, *batch, *event]``, or ``[S, 1, ..., 1, *event]`` where every batch
        element has the same slots, as in an exact sum.
    :ivar weight: shape ``[S, *batch]``; sums to one over the slots.
    :ivar sampled: where the value is a draw, of the same shape.
    """

    value: Tensor
    weight: Tensor
    sampled: Tensor


class Support(ABC):
    """
    The possible values of a discrete distribution.

    :ivar fn: the distribution, without masks.
    :ivar size: how many values there are; infinite for countable supports.
    """

    fn: Distribution
    size: float

    @property
    def too_many(self) -> str:
        """What there is where all values cannot be listed, for an error."""
        return "too many values to list"

    @abstractmethod
    def top_k(self, num_categories: int, num_samples: int) -> Choice:
        """The most probable values and draws from the rest; ``num_categories < size``."""

    @abstractmethod
    def budget(self, budget: int, min_samples: int) -> Choice:
        """As many slots as the budget, divided by Prop. 2 of Liu et al.; ``budget < size``."""

    def all_values(self) -> Choice:
        """Every value, for finite supports."""
        raise NotImplementedError

    def entropy(self) -> Tensor | None:
        r""":math:`-\sum_z q(z) \log q(z)` with its gradient, batch-shaped; None if not known."""
        return None

    def draw(self) -> Tensor:
        """An independent draw, ``[1, *batch, *event]``."""
        with torch.no_grad():
            return self.fn.sample().unsqueeze(0)
