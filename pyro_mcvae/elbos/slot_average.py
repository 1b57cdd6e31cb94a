"""Averages over the slots of a guide's discrete sites, and the score functions of these sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pyro_mcvae.chains.annealing import Chain
from pyro_mcvae.discrete.slot_draws import SlotDraws
from pyro_mcvae.elbos.estimate import add_up
from pyro_mcvae.ops.importance import normalized_weights
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.terms import Term


class OneSlot:
    """
    The average over the rows of a sample without slots, in the place of :class:`SlotAverage`.

    :ivar weight: the weight of each slot, ``[P, S, *plates]``; None here.
    :ivar row_weight: the same for each row, ``[rows, *plates]``.
    """

    weight: Tensor | None = None
    row_weight: Tensor | None = None

    def fold(self, value: Tensor) -> Tensor:
        """``[rows, *plates]`` as ``[P, S, *plates]``; without slots as it is."""
        return value

    def each(self, value: Tensor) -> Tensor:
        """``[rows, *plates]`` to be averaged over the first dim, and then given to :meth:`sum`."""
        return value

    def sum(self, value: Tensor) -> Tensor:
        """The average of each slot, ``[S, *plates]``, summed over them: ``[*plates]``."""
        return value

    def mean(self, value: Tensor) -> Tensor:
        """``[rows, *plates]`` averaged over slots and particles: ``[*plates]``."""
        return self.sum(self.each(value).mean(0))

    def chain(self, chain: Chain) -> Chain:
        """The chains of each slot side by side, with what they are worth as of :meth:`each`."""
        return chain

    def normalized(self, log_weight: Tensor) -> Tensor:
        """The weights of all rows of a datum, to sum to one: ``[rows, *plates]``."""
        return normalized_weights(log_weight)

    def without_entropy(self, surrogate: Tensor) -> Tensor:
        """
        A surrogate, ``[*plates]``, without the gradient that log q of the discrete draws has inside
        of the weights, whose mean is zero.
        """
        return surrogate

    def with_scores(
        self, surrogate: Tensor, cost: Callable[[], Tensor], programs: Programs
    ) -> Tensor:
        """
        A scalar surrogate, and the score-function part of the gradient.

        :param cost: gives :math:`L_s`, detached: ``[rows, *plates]``, or where particles share the
            slots ``[S, *plates]``.
        """
        return surrogate


class SlotAverage(OneSlot):
    r"""
    The sum over slots of what the rows of a sample are worth:

    .. math:: L = \sum_s w_s L_s, \qquad w_s = q(y_s) \text{ or } q(\text{rest}) / n,

    where :math:`y_s` are the discrete values of slot s. With

    .. math:: \sum_s w_s \{\nabla L_s + (L_s - b_s) \nabla \log q(y_s)\}

    its gradient has the mean of that of :math:`\sum_y q(y) L(y)`.

    :param sample: whose rows are slots times particles, those of one slot side by side.
    :param SlotDraws draws: what they are.
    :param common: whether particles share the slots: then they may be averaged in another way than
        by their mean before the sum.
    """

    weight: Tensor
    row_weight: Tensor

    def __init__(self, sample: WeightedParticles, draws: SlotDraws, common: bool) -> None:
        self._sample, self._draws, self._is_common = sample, draws, common
        self._plan = draws.plan
        self._weights = {n: self._made(n, "weight") for n in self._plan.sites}
        blocks = range(len(sample.blocks))
        self.row_weight = sample.join([self._block_weight(b) for b in blocks])
        self.weight = self.fold(self.row_weight)

    @staticmethod
    def of(sample: WeightedParticles, draws: SlotDraws | None, common: bool) -> OneSlot:
        """The average of a sample; ``draws`` is None for one without slots."""
        return OneSlot() if draws is None else SlotAverage(sample, draws, common)

    def fold(self, value: Tensor) -> Tensor:
        return value.unflatten(0, (-1, self._draws.num_particles)).transpose(0, 1)

    def each(self, value: Tensor) -> Tensor:
        folded = self.fold(value)
        return folded if self._is_common else _times(self.weight, folded)

    def sum(self, value: Tensor) -> Tensor:
        return (_times(self.weight[0], value) if self._is_common else value).sum(0)

    def chain(self, chain: Chain) -> Chain:
        infos = [
            i if i.log_prob is None else i._replace(log_prob=self.fold(i.log_prob))
            for i in chain.infos
        ]
        rest, past = ([self.each(r) for r in parts] for parts in (chain.rest, chain.past))
        log_weight = self.each(chain.log_weight)
        return replace(chain, log_weight=log_weight, infos=infos, rest=rest, past=past)

    def normalized(self, log_weight: Tensor) -> Tensor:
        return normalized_weights(log_weight + self.row_weight.log())

    def without_entropy(self, surrogate: Tensor) -> Tensor:
        names = self._draws.held
        log_q = self._sample.local_sum(
            lambda t, i: t.log_prob if t.in_guide and t.key.name in names else 0
        )
        return surrogate + self.mean(log_q)

    def with_scores(
        self, surrogate: Tensor, cost: Callable[[], Tensor], programs: Programs
    ) -> Tensor:
        folded = cost().unsqueeze(0) if self._is_common else self.fold(cost())
        parts = self._sample.split(folded * self._sample.scale)
        sites = self._plan.sites.items()
        scores = (self._surrogate(name, parts[site.block], programs) for name, site in sites)
        return surrogate + add_up(scores) / len(folded)

    def _surrogate(self, name: str, cost: Tensor, programs: Programs) -> Tensor:
        """
        Of a site's distribution. Shapes are ``[slots, P, slots of sites before, *plates]``.

        :param cost: of the site's block, ``[P, S, *plates]``.
        """
        plan, site = self._plan, self._plan.sites[name]
        beside = [n for n, other in plan.sites.items() if other.block == site.block and n != name]
        others = self._product([self._weights[n] for n in beside], cost)
        upstream = self._product([self._weights[n] for n in site.before], cost)
        weight, sampled = self._weights[name], self._made(name, "sampled")
        score = self._of_block(name, lambda t, i: torch.as_tensor(t.score))
        node = self._sample.runs[0].guide_trace.nodes[name]
        return self._draws.made(name)[0].surrogate(
            node,
            programs,
            weight=self._by_slot(name, self._few(weight))[:, :, 0],
            sampled=self._by_slot(name, self._few(sampled))[:, :, 0] > 0,
            score=self._by_slot(name, self._few(score))[:, :, 0],
            cost=self._by_slot(name, _times(others, cost)).sum(2),
            upstream=self._by_slot(name, upstream)[:1, :, 0],
            value=self._by_slot(name, self._few(self._values(name)))[:, :, 0],
        )

    def _values(self, name: str) -> Tensor:
        """``[rows, *batch, *event]``."""
        values = [m.choice.value for m in self._draws.made(name).values()]
        return values[0] if self._sample.runs[0].leading is not None else torch.stack(values)

    def _made(self, name: str, field: str) -> Tensor:
        """The weights of a site, or which are draws: of its block, ``[rows, *plates]``."""
        made = self._draws.made(name)
        return self._of_block(
            name, lambda t, i: getattr(made[i].choice, field).to(t.log_prob.dtype)
        )

    def _of_block(self, name: str, pick: Callable[[Term, int], Tensor]) -> Tensor:
        key = FactorKey("guide", name)
        total = self._sample.local_sum(lambda t, i: pick(t, i) if t.key == key else 0)
        return self._sample.split(total)[self._plan.sites[name].block]

    def _block_weight(self, block: int) -> Tensor:
        """The weights of a block, zero for slots that it does not have: ``[rows, *plates]``."""
        like = self._sample.split(self._sample.log_weight.detach())[block]
        slot = torch.arange(len(like), device=like.device) // self._draws.num_particles
        has = (slot < self._plan.size(block)).to(like.dtype)
        weight = has.reshape(-1, *[1] * (like.dim() - 1)).expand(like.shape)
        for name, own in self._weights.items():
            if self._plan.sites[name].block == block:
                weight = weight * own
        return weight

    def _few(self, value: Tensor) -> Tensor:
        """``[rows, ...]`` as ``[P, S, ...]``, one particle where they are all alike."""
        folded = self.fold(value)
        return folded[:1] if self._is_common else folded

    def _product(self, weights: list[Tensor], like: Tensor) -> Tensor:
        total = torch.ones_like(like)
        for weight in weights:
            total = total * self._few(weight)
        return total

    def _by_slot(self, name: str, value: Tensor) -> Tensor:
        """``[P, S, ...]`` as ``[slots, P, slots of sites behind, slots of sites before, ...]``."""
        size = self._plan.size(self._plan.sites[name].block)
        shape = -1, self._plan.counts[name], self._plan.stride(name)
        return value[:, :size].unflatten(1, shape).movedim(2, 0)


def _times(weight: Tensor, value: Tensor) -> Tensor:
    """A product that is zero where the weight is, whatever the value."""
    return torch.where(weight > 0, weight * torch.where(weight > 0, value, 0.0), 0.0)
