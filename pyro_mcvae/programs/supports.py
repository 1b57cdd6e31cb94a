"""The categories of discrete distributions: their log probabilities, and values by number."""

from __future__ import annotations

import math

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_mcvae.ops.countable import CountLaw, count_slots
from pyro_mcvae.ops.gumbel import one_hot
from pyro_mcvae.ops.product import product_slots
from pyro_mcvae.ops.top_k import Slots, budget_slots, top_k_slots
from pyro_mcvae.programs.counts import count_law
from pyro_mcvae.programs.support import Choice, Support
from pyro_mcvae.programs.types import Distribution

# A vector of independent variables is flattened to one variable up to this many categories.
_MAX_JOINT = 1024


class Categories(Support):
    """Finitely many values, numbered."""

    def __init__(self, fn: Distribution) -> None:
        self.fn = fn
        self.log_q = self._log_q().detach()
        self.size = self.log_q.shape[-1]

    @property
    def logits(self) -> Tensor:
        """The log probabilities with their gradient, shape ``[*batch, K]``."""
        return self._log_q()

    def _log_q(self) -> Tensor:
        values = self._values()
        return self.fn.log_prob(values).movedim(0, -1)

    def _values(self) -> Tensor:
        """Shape ``[K, 1, ..., 1, *event]``."""
        return self.fn.enumerate_support(expand=False)

    def value(self, index: Tensor) -> Tensor:
        """Category numbers ``[S, *batch]`` to values ``[S, *batch, *event]``."""
        values = self._values()
        return values.reshape(values.shape[:1] + self.fn.event_shape)[index]

    def category(self, value: Tensor) -> Tensor:
        """Values ``[S, *batch, *event]`` to category numbers."""
        values = self._values()
        values = values.reshape(values.shape[:1] + self.fn.event_shape)
        hit = value.unsqueeze(-1 - self.fn.event_dim) == values
        for _ in range(self.fn.event_dim):
            hit = hit.all(-1)
        return hit.to(torch.uint8).argmax(-1)

    def top_k(self, num_categories: int, num_samples: int) -> Choice:
        return self._choice(top_k_slots(self.log_q, num_categories, num_samples))

    def budget(self, budget: int, min_samples: int) -> Choice:
        return self._choice(budget_slots(self.log_q, budget, min_samples))

    def all_values(self) -> Choice:
        weight = self.log_q.movedim(-1, 0).exp()
        return Choice(self._values(), weight, torch.zeros_like(weight, dtype=torch.bool))

    def entropy(self) -> Tensor:
        r""":math:`-\sum_z q(z) \log q(z)` with its gradient, batch-shaped."""
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
    # Its support as one-hot vectors is K x K, and log_prob of it K x B x K.
    def _log_q(self) -> Tensor:
        return self.fn.logits

    def value(self, index: Tensor) -> Tensor:
        return one_hot(index, self.fn.event_shape[0]).to(self.fn.logits.dtype)

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
    """Binomial, also where the number of trials differs between batch elements."""

    def _values(self) -> Tensor:
        # The number of trials is data, and decides a shape.
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


class _Product(Support):
    """A vector of independent finite variables, too many to list."""

    def __init__(self, fn: Distribution, parts: Categories) -> None:
        self.fn = fn
        self.parts = parts
        self.shape = parts.log_q.shape[len(fn.batch_shape) : -1]
        self.log_p = parts.log_q.reshape(*fn.batch_shape, -1, parts.log_q.shape[-1])

    size = math.inf

    def top_k(self, num_categories: int, num_samples: int) -> Choice:
        return self._choice(product_slots(self.log_p, num_categories, num_samples))

    def budget(self, budget: int, min_samples: int) -> Choice:
        return self._choice(product_slots(self.log_p, 0, 0, budget, min_samples))

    def entropy(self) -> Tensor:
        return self.parts.entropy().flatten(len(self.fn.batch_shape)).sum(-1)

    def _choice(self, slots: Slots) -> Choice:
        digits = slots.index.reshape(slots.index.shape[:-1] + self.shape)
        return Choice(self.parts.value(digits), slots.weight, slots.sampled)


class _Countable(Support):
    """Counts without a largest one."""

    size = math.inf

    def __init__(self, fn: Distribution, law: CountLaw) -> None:
        self.fn = fn
        self.law = law

    def top_k(self, num_categories: int, num_samples: int) -> Choice:
        return Choice(*count_slots(self.law, num_categories, num_samples, None, 1))

    def budget(self, budget: int, min_samples: int) -> Choice:
        return Choice(*count_slots(self.law, 0, 0, budget, min_samples))


def unmasked(fn: Distribution) -> Distribution:
    """A distribution without the masks that it puts on itself."""
    while isinstance(fn, MaskedDistribution):
        fn = fn.base_dist
    return fn


def support_of(fn: Distribution) -> Support | None:
    """
    The values of a discrete distribution; None where they cannot be listed.

    :param fn: Categorical, OneHotCategorical, Bernoulli, Binomial, everything else with a finite
        ``enumerate_support``, vectors of independent ones of these, and Poisson, Geometric and
        NegativeBinomial.
    """
    fn = unmasked(fn)
    if isinstance(fn, dist.OneHotCategorical):
        return _OneHot(fn)
    if isinstance(fn, dist.Categorical):
        return _Indices(fn)
    if isinstance(fn, dist.Bernoulli):
        return _Binary(fn)
    if isinstance(fn, dist.Binomial):
        return _Counts(fn)
    law = count_law(fn)
    if law is not None:
        return _Countable(fn, law)
    if isinstance(fn, torch.distributions.Independent):
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
    return _Product(plain, parts)
