"""The values of a discrete site in all elements of some of its plates, as one variable."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_mcvae.ops.product import product_slots
from pyro_mcvae.ops.top_k import Slots
from pyro_mcvae.programs.support import Choice, Support
from pyro_mcvae.programs.supports import Categories

# Up to so many values all of them are listed.
_MAX_LISTED = 1024


class JoinedSupport(Support):
    """
    The elements of some plates, independent of each other, as one variable over their product.

    :param parts: the values of each element.
    :param dims: the plates' batch dims, negative; weights have size 1 there.
    """

    def __init__(self, parts: Categories, dims: tuple[int, ...]) -> None:
        self.fn, self.parts = parts.fn, parts
        depth = parts.log_q.dim() - 1
        self._joined = [depth + d for d in sorted(dims)]
        rest = [a for a in range(depth) if a not in self._joined]
        self._order = [*rest, *self._joined]
        self._sizes = [parts.log_q.shape[a] for a in self._order]
        self._num_rest = len(rest)
        log_p = parts.log_q.permute(*self._order, depth)
        self.log_p = log_p.reshape(*self._sizes[: len(rest)], -1, log_p.shape[-1])
        every = int(parts.size) ** self.log_p.shape[-2]
        self.size = every if every <= _MAX_LISTED else math.inf

    @property
    def too_many(self) -> str:
        count, each = self.log_p.shape[-2], int(self.parts.size)
        return (
            f"{super().too_many} in the {count} elements that share a weight: together "
            f"{each}^{count}, of which at most {_MAX_LISTED} are summed"
        )

    def top_k(self, num_categories: int, num_samples: int) -> Choice:
        return self._choice(product_slots(self.log_p, num_categories, num_samples))

    def budget(self, budget: int, min_samples: int) -> Choice:
        return self._choice(product_slots(self.log_p, 0, 0, budget, min_samples))

    def all_values(self) -> Choice:
        num_values, num_elements = self.log_p.shape[-1], self.log_p.shape[-2]
        index = torch.arange(int(self.size), device=self.log_p.device)
        power = [num_values**d for d in range(num_elements)]
        digits = index.unsqueeze(-1) // torch.tensor(power, device=index.device) % num_values
        each = self.log_p[..., torch.arange(num_elements, device=index.device), digits]
        weight = each.sum(-1).exp().movedim(-1, 0)
        likeliest = self.log_p.argmax(-1).expand(*weight.shape, num_elements)
        digits = digits.reshape(len(index), *[1] * (weight.dim() - 1), num_elements)
        # What is impossible is not evaluated.
        digits = torch.where(weight.unsqueeze(-1) > 0, digits, likeliest)
        return self._choice(Slots(digits, weight, torch.zeros_like(weight, dtype=torch.bool)))

    def _choice(self, slots: Slots) -> Choice:
        lead = slots.index.shape[0]
        index = slots.index.reshape(lead, *self._sizes)
        back = [1 + self._order.index(a) for a in range(len(self._order))]
        value = self.parts.value(index.permute(0, *back))
        return Choice(value, self._spread(slots.weight), self._spread(slots.sampled))

    def _spread(self, value: Tensor) -> Tensor:
        """``[S, *rest]`` with size 1 in the plates' dims."""
        for axis in self._joined:
            value = value.unsqueeze(1 + axis)
        return value
