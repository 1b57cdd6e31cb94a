"""The values of discrete distributions, finite or truncated."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_mcvae.ops.slots import (
    CountLaw,
    SlotCount,
    Slots,
    categorical_slots,
    count_slots,
    one_hot,
    product_slots,
    top_k_slots,
)
from pyro_mcvae.programs.methods import has_methods_of
from pyro_mcvae.programs.types import Distribution

# The possible values of a discrete distribution, and the values of a site's slots.


class Choice(NamedTuple):
    """
    The values of a site's slots.

    :ivar value: shape ``[S, *batch, *event]``, or ``[S, 1, ..., 1, *event]`` if every batch element
        has the same slots, as in an exact sum.
    :ivar weight: shape ``[S, *batch]``; sums to one over the slots.
    :ivar sampled: whether each value is a draw, shape ``[S, *batch]``.
    """

    value: Tensor
    weight: Tensor
    sampled: Tensor


class Support(ABC):
    """
    The possible values of a discrete distribution.

    :ivar fn: the distribution, without masks.
    :ivar size: the number of values; infinite for countable supports.
    """

    fn: Distribution
    size: float

    @property
    def too_many(self) -> str:
        """Describe why not all values can be listed, for an error message."""
        return "too many values to list"

    @abstractmethod
    def slots(self, count: SlotCount) -> Choice:
        """Return some of the most probable values, and draws from all others."""

    def all_values(self) -> Choice:
        """Return every value of a finite support."""
        raise NotImplementedError

    def entropy(self) -> Tensor | None:
        r"""Return :math:`-\sum_z q(z) \log q(z)` with its gradient, batch-shaped, or None."""
        return None

    def draw(self) -> Tensor:
        """Return an independent draw, ``[1, *batch, *event]``."""
        with torch.no_grad():
            return self.fn.sample().unsqueeze(0)


# The supports of countable distributions: Poisson and Geometric.


def count_law(fn: Distribution) -> CountLaw | None:
    """
    Return the functions that slots of a countable distribution need; None for other distributions.

    :param fn: Poisson or Geometric, not wrapped.
    """
    if has_methods_of(fn, dist.Poisson):
        return _poisson(fn)
    if has_methods_of(fn, dist.Geometric):
        return _geometric(fn)
    return None


def _poisson(fn: Distribution) -> CountLaw:
    rate = fn.rate.detach()

    def cdf(x: Tensor) -> Tensor:
        return torch.where(x < 0, 0.0, torch.special.gammaincc(x.clamp_min(0) + 1, rate))

    def tail(x: Tensor) -> Tensor:
        return torch.where(x < 0, 1.0, torch.special.gammainc(x.clamp_min(0) + 1, rate))

    return CountLaw(fn.log_prob, cdf, tail, rate.floor())


def _geometric(fn: Distribution) -> CountLaw:
    log_failure = torch.log1p(-fn.probs.detach())

    def log_tail(x: Tensor) -> Tensor:
        return (x + 1) * log_failure

    def cdf(x: Tensor) -> Tensor:
        return torch.where(x < 0, 0.0, -torch.expm1(log_tail(x)))

    def tail(x: Tensor) -> Tensor:
        return torch.where(x < 0, 1.0, log_tail(x).exp())

    return CountLaw(fn.log_prob, cdf, tail, torch.zeros_like(log_failure))


# The categories of discrete distributions: their log probabilities, and values by number.

# Independent variables are flattened to one variable up to this many categories.
_MAX_JOINT = 1024


class Categories(Support):
    """Finitely many values, numbered."""

    def __init__(self, fn: Distribution) -> None:
        self.fn = fn
        self.log_q = self._log_q().detach()
        self.size = self.log_q.shape[-1]

    @property
    def logits(self) -> Tensor:
        """Return the log probabilities with their gradient, shape ``[*batch, K]``."""
        return self._log_q()

    def _log_q(self) -> Tensor:
        values = self._values()
        return self.fn.log_prob(values).movedim(0, -1)

    def _values(self) -> Tensor:
        """Return all values, shape ``[K, 1, ..., 1, *event]``."""
        return self.fn.enumerate_support(expand=False)

    def value(self, index: Tensor) -> Tensor:
        """Map category numbers ``[S, *batch]`` to values ``[S, *batch, *event]``."""
        values = self._values()
        return values.reshape(values.shape[:1] + self.fn.event_shape)[index]

    def category(self, value: Tensor) -> Tensor:
        """Map values ``[S, *batch, *event]`` to category numbers."""
        values = self._values()
        values = values.reshape(values.shape[:1] + self.fn.event_shape)
        hit = value.unsqueeze(-1 - self.fn.event_dim) == values
        for _ in range(self.fn.event_dim):
            hit = hit.all(-1)
        return hit.to(torch.uint8).argmax(-1)

    def slots(self, count: SlotCount) -> Choice:
        return self._choice(categorical_slots(self.log_q, count))

    def all_values(self) -> Choice:
        weight = self.log_q.movedim(-1, 0).exp()
        return Choice(self._values(), weight, torch.zeros_like(weight, dtype=torch.bool))

    def entropy(self) -> Tensor:
        r"""Return :math:`-\sum_z q(z) \log q(z)` with its gradient, batch-shaped."""
        logits = self.logits
        possible = ~logits.isneginf()
        finite = torch.where(possible, logits, 0.0)
        return -torch.where(possible, finite.exp() * finite, 0.0).sum(-1)

    def _choice(self, slots: Slots) -> Choice:
        return Choice(self.value(slots.index), slots.weight, slots.sampled)


class _Indices(Categories):
    def _log_q(self) -> Tensor:
        return self.fn.logits

    def value(self, index: Tensor) -> Tensor:
        return index

    def category(self, value: Tensor) -> Tensor:
        return value.long()


class _OneHot(Categories):
    # The support as one-hot vectors is K x K, and its log_prob K x B x K.
    def _log_q(self) -> Tensor:
        return self.fn.logits

    def value(self, index: Tensor) -> Tensor:
        # Networks compute on dense vectors in fewer operations.
        return one_hot(index.contiguous(), self.fn.event_shape[0]).to(self.fn.logits.dtype)

    def category(self, value: Tensor) -> Tensor:
        return value.argmax(-1)


class _Binary(Categories):
    def _log_q(self) -> Tensor:
        logits = self.fn.logits
        return torch.stack([logsigmoid(-logits), logsigmoid(logits)], -1)

    def value(self, index: Tensor) -> Tensor:
        return index.to(self.fn.logits.dtype)

    def category(self, value: Tensor) -> Tensor:
        return value.long()


class _Counts(Categories):
    """Binomial counts; the number of trials may differ between batch elements."""

    def _values(self) -> Tensor:
        # The number of trials is data, and determines a shape.
        trials = int(self.fn.total_count.max())
        values = torch.arange(1 + trials, dtype=self.fn.logits.dtype, device=self.fn.logits.device)
        return values.reshape((-1,) + (1,) * len(self.fn.batch_shape))

    def _log_q(self) -> Tensor:
        values = self._values()
        possible = values <= self.fn.total_count
        log_q = self.fn.log_prob(torch.where(possible, values, 0.0))
        return torch.where(possible, log_q, -math.inf).movedim(0, -1)

    def all_values(self) -> Choice:
        # Impossible counts must not reach log_prob.
        slots = top_k_slots(self.log_q, int(self.size), 0)
        return self._choice(slots)


class _Joint(Categories):
    """A vector of independent finite variables as one variable."""

    def __init__(self, fn: Distribution, parts: Categories) -> None:
        self.parts = parts
        self.shape = parts.log_q.shape[len(fn.batch_shape) : -1]
        super().__init__(fn)

    def _log_q(self) -> Tensor:
        logits = self.parts.logits
        each = logits.reshape(*self.fn.batch_shape, -1, logits.shape[-1])
        joint = each[..., 0, :]
        for d in range(1, each.shape[-2]):
            joint = (joint.unsqueeze(-1) + each[..., d, :].unsqueeze(-2)).flatten(-2)
        return joint

    def _values(self) -> Tensor:
        batch = self.fn.batch_shape
        index = torch.arange(self.size, device=self.log_q.device)
        return self.value(index.reshape((-1,) + (1,) * len(batch)))

    def value(self, index: Tensor) -> Tensor:
        base, count = int(self.parts.size), math.prod(self.shape)
        power = torch.tensor([base**d for d in reversed(range(count))], device=index.device)
        digits = (index.unsqueeze(-1) // power) % base
        return self.parts.value(digits.reshape(index.shape + self.shape))

    def category(self, value: Tensor) -> Tensor:
        base, count = int(self.parts.size), math.prod(self.shape)
        power = torch.tensor([base**d for d in reversed(range(count))], device=value.device)
        digits = self.parts.category(value)
        return (digits.flatten(digits.dim() - len(self.shape)) * power).sum(-1)


class Product(Support):
    """
    Independent finite variables as one variable over their product.

    :param parts: the values of each variable.
    :param axes: the batch dims of ``parts`` that are joined, counted from the left.
    :param bool in_batch: whether the joined dims are batch dims of the product, in which weights
        have size 1; otherwise they are event dims.
    """

    def __init__(self, fn: Distribution, parts: Categories, axes: list[int], in_batch: bool):
        self.fn, self.parts, self._joined, self._in_batch = fn, parts, axes, in_batch
        depth = parts.log_q.dim() - 1
        separate_axes = [a for a in range(depth) if a not in axes]
        self._order = [*separate_axes, *axes]
        self._sizes = [parts.log_q.shape[a] for a in self._order]
        log_p = parts.log_q.permute(*self._order, depth)
        self.log_p = log_p.reshape(*self._sizes[: len(separate_axes)], -1, log_p.shape[-1])
        every = int(parts.size) ** self.log_p.shape[-2]
        self.size = every if every <= _MAX_JOINT else math.inf

    @property
    def too_many(self) -> str:
        if not self._in_batch:
            return super().too_many
        count, each = self.log_p.shape[-2], int(self.parts.size)
        return (
            f"{super().too_many} in the {count} elements that share a weight: together "
            f"{each}^{count}, but at most {_MAX_JOINT} are summed"
        )

    def slots(self, count: SlotCount) -> Choice:
        return self._choice(product_slots(self.log_p, count))

    def all_values(self) -> Choice:
        num_values, num_elements = self.log_p.shape[-1], self.log_p.shape[-2]
        index = torch.arange(int(self.size), device=self.log_p.device)
        power = [num_values**d for d in range(num_elements)]
        digits = index.unsqueeze(-1) // torch.tensor(power, device=index.device) % num_values
        each = self.log_p[..., torch.arange(num_elements, device=index.device), digits]
        weight = each.sum(-1).exp().movedim(-1, 0)
        likeliest = self.log_p.argmax(-1).expand(*weight.shape, num_elements)
        digits = digits.reshape(len(index), *[1] * (weight.dim() - 1), num_elements)
        # Impossible values are not evaluated.
        digits = torch.where(weight.unsqueeze(-1) > 0, digits, likeliest)
        return self._choice(Slots(digits, weight, torch.zeros_like(weight, dtype=torch.bool)))

    def entropy(self) -> Tensor | None:
        if self._in_batch:
            return None
        return self.parts.entropy().flatten(len(self.fn.batch_shape)).sum(-1)

    def _choice(self, slots: Slots) -> Choice:
        index = slots.index.reshape(slots.index.shape[0], *self._sizes)
        back = [1 + self._order.index(a) for a in range(len(self._order))]
        value = self.parts.value(index.permute(0, *back))
        return Choice(value, self._spread(slots.weight), self._spread(slots.sampled))

    def _spread(self, value: Tensor) -> Tensor:
        """Insert the joined batch dims with size 1 into a tensor ``[S, *others]``."""
        for axis in self._joined if self._in_batch else ():
            value = value.unsqueeze(1 + axis)
        return value


def joined_plates(parts: Categories, dims: tuple[int, ...]) -> Support:
    """Join the independent elements of some plates into one variable; ``dims`` < 0."""
    depth = parts.log_q.dim() - 1
    return Product(parts.fn, parts, [depth + d for d in sorted(dims)], in_batch=True)


class _Countable(Support):
    """Counts without an upper bound."""

    size = math.inf

    def __init__(self, fn: Distribution, law: CountLaw) -> None:
        self.fn = fn
        self.law = law

    def slots(self, count: SlotCount) -> Choice:
        return Choice(*count_slots(self.law, count))


def unmasked(fn: Distribution) -> Distribution:
    """Return a distribution without its own masks."""
    while isinstance(fn, MaskedDistribution):
        fn = fn.base_dist
    return fn


def support_of(fn: Distribution) -> Support | None:
    """
    Return the values of a discrete distribution; None if they cannot be listed.

    :param fn: Categorical, OneHotCategorical, Bernoulli, Binomial, everything else with a finite
        ``enumerate_support``, vectors of independent variables of these, and Poisson and Geometric.
    """
    fn = unmasked(fn)
    if has_methods_of(fn, dist.OneHotCategorical):
        return _OneHot(fn)
    if has_methods_of(fn, dist.Categorical):
        return _Indices(fn)
    if has_methods_of(fn, dist.Bernoulli):
        return _Binary(fn)
    if has_methods_of(fn, dist.Binomial):
        return _Counts(fn)
    law = count_law(fn)
    if law is not None:
        return _Countable(fn, law)
    if has_methods_of(fn, torch.distributions.Independent):
        return _independent(fn)
    if isinstance(fn, ExpandedDistribution) and unmasked(fn.base_dist) is not fn.base_dist:
        return support_of(unmasked(fn.base_dist).expand(fn.batch_shape))
    if getattr(fn, "has_enumerate_support", False):
        try:
            return Categories(fn)
        except NotImplementedError:
            return None
    return None


def _independent(fn: Distribution) -> Support | None:
    base = unmasked(fn.base_dist)
    if fn.reinterpreted_batch_ndims == 0:
        return support_of(base)
    plain = fn if base is fn.base_dist else dist.Independent(base, fn.reinterpreted_batch_ndims)
    parts = support_of(base)
    if not isinstance(parts, Categories):
        return None
    count = math.prod(base.batch_shape[len(plain.batch_shape) :])
    if parts.size**count <= _MAX_JOINT:
        return _Joint(plain, parts)
    return Product(plain, parts, [*range(len(plain.batch_shape), parts.log_q.dim() - 1)], False)
