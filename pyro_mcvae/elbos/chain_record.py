"""What the chains of one step did."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_mcvae.chains.annealing import Chain
from pyro_mcvae.elbos.slot_average import OneSlot
from pyro_mcvae.ops.importance import effective_sample_size


@dataclass(frozen=True, slots=True)
class ChainRecord:
    r"""
    What the chains of one step did; nothing of it carries a graph, or has left the device.

    :ivar ~torch.Tensor acceptance: the mean acceptance probability of each transition, shape
        ``[transitions]``; for unadjusted kernels the one that their moves would have had.
    :ivar ~torch.Tensor step_size: the step size that was used, a scalar or shape ``[D]``; one row
        for each transition where they differ.
    :ivar ~torch.Tensor betas: the schedule, shape ``[num_steps + 1]``.
    :ivar ~torch.Tensor log_weight: the chains' log weights W, shape ``[num_particles, *plates]``;
        of guides with discrete sites ``[num_particles, slots, *plates]``.
    :ivar slot_weight: of these the weight of each slot, of the same shape; None elsewhere.
    """

    acceptance: Tensor
    step_size: Tensor
    betas: Tensor
    log_weight: Tensor
    slot_weight: Tensor | None = None

    @classmethod
    def of(cls, chain: Chain, step_size: Tensor, betas: Tensor, slots: OneSlot) -> ChainRecord:
        """The record of a chain."""
        log_weight = slots.fold(chain.log_weight.detach())
        means = [chain.mean(info.acceptance) for info in chain.infos]
        acceptance = torch.stack(means) if means else log_weight.new_zeros(0)
        return cls(acceptance, step_size, betas, log_weight, slots.weight)

    @property
    def effective_sample_size(self) -> Tensor:
        """Kish's effective number of chains per datum, shape ``[*plates]``."""
        if self.slot_weight is None:
            return effective_sample_size(self.log_weight)
        return effective_sample_size((self.log_weight + self.slot_weight.log()).flatten(0, 1))
