"""Rao-Blackwellized gradients of discrete sites: exact sums over slots and averages over draws."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from pyro.ops import packed
from torch import Tensor
from typing_extensions import Unpack

from pyro_mcvae.chains.annealing import Chain
from pyro_mcvae.discrete.baselines import Baseline
from pyro_mcvae.discrete.site_slots import SiteOptions, is_discrete
from pyro_mcvae.discrete.slot_dims import ScoredSite, SlotCost, SlotRun, SlotSampler
from pyro_mcvae.discrete.slot_rows import SlotDraws, SlotPlanner
from pyro_mcvae.elbos.base import (
    Bounds,
    ELBOOptions,
    Estimate,
    MonteCarloELBO,
    Sum,
    add_up,
    as_scalar,
    times,
)
from pyro_mcvae.elbos.elbo_terms import Cost, averaged_estimate, elbo_bounds, weighted_estimate
from pyro_mcvae.ops.compat import DIM_TO_SYMBOL, dims_of, with_dims
from pyro_mcvae.ops.weights import normalized_weights
from pyro_mcvae.particles.sampler import WeightedParticles
from pyro_mcvae.programs.run import Programs, is_messenger
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import FactorKey, Site

# Averages over the slots of discrete guide sites, and the score functions of these sites.


class OneSlot:
    """
    The average over the rows of a sample without slots, instead of :class:`SlotAverage`.

    :ivar weight: the weight of each slot, ``[P, S, *plates]``; None here.
    :ivar row_weight: the weight of each row, ``[rows, *plates]``.
    """

    weight: Tensor | None = None
    row_weight: Tensor | None = None

    def fold(self, value: Tensor) -> Tensor:
        """Reshape ``[rows, *plates]`` to ``[P, S, *plates]``; without slots return it unchanged."""
        return value

    def each(self, value: Tensor) -> Tensor:
        """Prepare ``[rows, *plates]`` for an average over the first dim and then :meth:`sum`."""
        return value

    def sum(self, value: Tensor) -> Tensor:
        """Sum the average of each slot, ``[S, *plates]``, to ``[*plates]``."""
        return value

    def mean(self, value: Tensor) -> Tensor:
        """Average ``[rows, *plates]`` over slots and particles to ``[*plates]``."""
        return self.sum(self.each(value).mean(0))

    def chain(self, chain: Chain) -> Chain:
        """Concatenate the chains of all slots, with the weights of :meth:`each`."""
        return chain

    def normalized(self, log_weight: Tensor) -> Tensor:
        """Normalize the weights of all rows of a datum to sum to one: ``[rows, *plates]``."""
        return normalized_weights(log_weight)

    def without_entropy(self, surrogate: Tensor) -> Tensor:
        """
        Remove the gradient of log q of the discrete draws from a surrogate ``[*plates]``. Its mean
        is zero.
        """
        return surrogate

    def with_scores(
        self, surrogate: Tensor, cost: Callable[[], Tensor], programs: Programs
    ) -> Tensor:
        """
        Return a scalar surrogate that includes the score-function terms.

        :param cost: returns :math:`L_s`, detached: ``[rows, *plates]``, or ``[S, *plates]`` if
            particles share the slots.
        """
        return surrogate


class SlotAverage(OneSlot):
    r"""
    The weighted sum of the values of all slots:

    .. math:: L = \sum_s w_s L_s, \qquad w_s = q(y_s) \text{ or } q(\bar C) / n,

    where :math:`y_s` are the discrete values of slot s. The gradient estimate

    .. math:: \sum_s w_s \{\nabla L_s + (L_s - b_s) \nabla \log q(y_s)\}

    has the mean :math:`\nabla \sum_y q(y) L(y)`.

    :param sample: a sample whose rows are slots times particles; the rows of a slot are adjacent.
    :param SlotDraws draws: the draws of the slots.
    :param common: whether particles share the slots. Their values can then be combined by any
        function before the sum.
    """

    weight: Tensor
    row_weight: Tensor

    def __init__(self, sample: WeightedParticles, draws: SlotDraws, common: bool) -> None:
        self._sample, self._draws, self._is_common = sample, draws, common
        self._plan = draws.plan
        self._weights = {n: self._slot_field(n, "weight") for n in self._plan.sites}
        blocks = range(len(sample.blocks))
        self.row_weight = sample.join([self._block_weight(b) for b in blocks])
        self.weight = self.fold(self.row_weight)

    @staticmethod
    def of(sample: WeightedParticles, draws: SlotDraws | None, common: bool) -> OneSlot:
        """Return the average of a sample. ``draws`` is None if there are no slots."""
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
        to_go, past = ([self.each(r) for r in parts] for parts in (chain.to_go, chain.past))
        log_weight = self.each(chain.log_weight)
        return replace(chain, log_weight=log_weight, infos=infos, to_go=to_go, past=past)

    def normalized(self, log_weight: Tensor) -> Tensor:
        return normalized_weights(log_weight + self.row_weight.log())

    def without_entropy(self, surrogate: Tensor) -> Tensor:
        names = self._draws.fixed_sites
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
        Return the surrogate of a site's distribution. Shapes are ``[slots, P, slots of earlier
        sites, *plates]``.

        :param cost: the cost of the site's block, ``[P, S, *plates]``.
        """
        plan, site = self._plan, self._plan.sites[name]
        same_block = [
            n for n, other in plan.sites.items() if other.block == site.block and n != name
        ]
        other_weights = self._product([self._weights[n] for n in same_block], cost)
        upstream = self._product([self._weights[n] for n in site.before], cost)
        weight, sampled = self._weights[name], self._slot_field(name, "sampled")
        score = self._of_block(name, lambda t, i: torch.as_tensor(t.score))
        node = self._sample.runs[0].guide_trace.nodes[name]
        return self._draws.slots_of(name)[0].surrogate(
            node,
            programs,
            weight=self._by_slot(name, self._few(weight))[:, :, 0],
            sampled=self._by_slot(name, self._few(sampled))[:, :, 0] > 0,
            score=self._by_slot(name, self._few(score))[:, :, 0],
            cost=self._by_slot(name, _times(other_weights, cost)).sum(2),
            upstream=self._by_slot(name, upstream)[:1, :, 0],
            value=self._by_slot(name, self._few(self._values(name)))[:, :, 0],
        )

    def _values(self, name: str) -> Tensor:
        """Return the values of a site, ``[rows, *batch, *event]``."""
        values = [m.choice.value for m in self._draws.slots_of(name).values()]
        return values[0] if self._sample.runs[0].leading is not None else torch.stack(values)

    def _slot_field(self, name: str, field: str) -> Tensor:
        """Return one field of a site's slots in all rows of its block: ``[rows, *plates]``."""
        slots = self._draws.slots_of(name)
        return self._of_block(
            name, lambda t, i: getattr(slots[i].choice, field).to(t.log_prob.dtype)
        )

    def _of_block(self, name: str, pick: Callable[[Term, int], Tensor]) -> Tensor:
        key = FactorKey("guide", name)
        total = self._sample.local_sum(lambda t, i: pick(t, i) if t.key == key else 0)
        return self._sample.split(total)[self._plan.sites[name].block]

    def _block_weight(self, block: int) -> Tensor:
        """Return the weights of a block, zero for missing slots: ``[rows, *plates]``."""
        like = self._sample.split(self._sample.log_weight.detach())[block]
        slot = torch.arange(len(like), device=like.device) // self._draws.num_particles
        has = (slot < self._plan.size(block)).to(like.dtype)
        weight = has.reshape(-1, *[1] * (like.dim() - 1)).expand(like.shape)
        for name, site_weight in self._weights.items():
            if self._plan.sites[name].block == block:
                weight = weight * site_weight
        return weight

    def _few(self, value: Tensor) -> Tensor:
        """Reshape ``[rows, ...]`` to ``[P, S, ...]``, with P = 1 if all particles are equal."""
        folded = self.fold(value)
        return folded[:1] if self._is_common else folded

    def _product(self, weights: list[Tensor], like: Tensor) -> Tensor:
        total = torch.ones_like(like)
        for weight in weights:
            total = total * self._few(weight)
        return total

    def _by_slot(self, name: str, value: Tensor) -> Tensor:
        """
        Reshape ``[P, S, ...]`` to ``[slots, P, slots of later sites, slots of earlier sites,
        ...]``.
        """
        size = self._plan.size(self._plan.sites[name].block)
        shape = -1, self._plan.counts[name], self._plan.stride(name)
        return value[:, :size].unflatten(1, shape).movedim(2, 0)


def _times(weight: Tensor, value: Tensor) -> Tensor:
    """Multiply by weights; the product is zero at zero weights, for any value."""
    return torch.where(weight > 0, weight * torch.where(weight > 0, value, 0.0), 0.0)


# Expected costs over the slots of discrete sites, and their gradients.


class _Key(NamedTuple):
    dims: frozenset[str]
    members: frozenset[str]
    plates: frozenset[str]


class SlotSums:
    r"""
    The expectation over the slots of a run, :math:`V = \sum_c \sum_s \prod_{i \in R(c)} w_i c`.

    R(c) contains the sites that cost c depends on, directly or through other sites. The weights of
    all other sites sum to one, but their gradients would be noise. V is linear in each weight and
    in each cost. So one backward pass through V gives the expected cost of every slot and the
    weight of every cost.

    :param SlotRun slot_run: an execution.
    :param ancestors: for each factor, the guide sites that it depends on, directly or indirectly.
    """

    def __init__(self, slot_run: SlotRun, ancestors: Mapping[FactorKey, frozenset[str]]) -> None:
        self._scored = slot_run.scored
        self._ancestors = ancestors
        self._owner = {s.symbol: s.name for s in slot_run.scored.values() if s.symbol}
        self._leaves = {n: with_dims(s.weight.detach(), s.order) for n, s in self._scored.items()}
        self._keys = [self._key(cost) for cost in slot_run.costs]
        self._costs = slot_run.costs
        # Costs with the same weights are added first.
        self._alike: dict[tuple[_Key, Hashable], list[SlotCost]] = {}
        for cost, key in zip(self._costs, self._keys, strict=True):
            scale = id(cost.scale) if isinstance(cost.scale, Tensor) else cost.scale
            self._alike.setdefault((key, scale), []).append(cost)
        self._cache: dict[Hashable, Tensor] = {}

    def value(self) -> Tensor:
        """Return V, detached."""
        with torch.no_grad():
            return self._sum(self._masses())

    def expected(self) -> list[Tensor]:
        """
        Return the expectation of each cost over the slots, in the layout of its site's plates.
        """
        values = []
        with torch.no_grad():
            masses = self._masses()
            for cost, key in zip(self._costs, self._keys, strict=True):
                total = masses[key] * _known([cost], masses[key])
                dims = sorted(cost.dims)
                slots = [i for i, d in enumerate(dims) if d not in cost.plates]
                total = total.sum(slots) if slots else total
                kept = "".join(d for d in dims if d in cost.plates)
                symbols = cost.term.site["infer"][DIM_TO_SYMBOL].items()
                values.append(packed.unpack(with_dims(total, kept), {s: d for d, s in symbols}))
        return values

    def differentiate(self, programs: Programs) -> tuple[Tensor, Sum]:
        """Return V, and a scalar with the gradient of the costs and of all distributions."""
        leaves = list(self._leaves.values())
        with torch.enable_grad():
            for leaf in leaves:
                leaf.requires_grad_()
            masses = self._masses()
            value = self._sum(masses)
        path = add_up(_path(c, masses[k].detach()) for (k, _), c in self._alike.items())
        if not (value.requires_grad and leaves):
            return value, path
        behind = torch.autograd.grad(value, leaves, allow_unused=True)
        scores = [
            self._surrogate(self._scored[name], leaf.detach(), grad, programs)
            for (name, leaf), grad in zip(self._leaves.items(), behind, strict=True)
        ]
        return value.detach(), add_up((path, *scores))

    def _surrogate(
        self, site: ScoredSite, weight: Tensor, cost: Tensor | None, programs: Programs
    ) -> Tensor:
        """Return the surrogate of a site, whose ``cost`` includes the weights of its slots."""
        cost = torch.zeros_like(weight) if cost is None else cost
        with torch.no_grad():
            upstream = self._upstream(site)
        return site.slots.surrogate(
            site.site,
            programs,
            weight=site.slots_first(with_dims(weight, site.order)),
            sampled=site.sampled(),
            score=site.first(site.score),
            cost=site.slots_first(with_dims(cost, site.order)),
            upstream=site.slots_first(upstream),
            value=site.values(),
        )

    def _key(self, cost: SlotCost) -> _Key:
        """
        Return the key of a cost. Costs with the same dims, sites and plates have equal weights.
        """
        every = self._scored.keys()
        ancestors = set().union(*(self._ancestors.get(k, every) for k in cost.keys))
        plain = {n for n in ancestors & every if self._scored[n].symbol is None}
        members = self._closure(plain, cost.dims)
        return _Key(cost.dims, members, cost.plates)

    def _closure(self, names: Iterable[str], dims: Iterable[str]) -> frozenset[str]:
        """Return sites, the owners of dims, and the owners of the dims of their weights."""
        closure = set(names)
        waiting = [*dims, *(d for name in closure for d in self._scored[name].dims)]
        while waiting:
            name = self._owner.get(waiting.pop())
            if name is not None and name not in closure:
                closure.add(name)
                waiting.extend(self._scored[name].dims)
        return frozenset(closure)

    def _masses(self) -> dict[_Key, Tensor]:
        self._cache.clear()  # of products without gradients, or of another step
        masses = {}
        for cost, key in zip(self._costs, self._keys, strict=True):
            if key not in masses:
                mass = self._marginal(key.members, key.dims, key.plates)
                masses[key] = _aligned(cost.value.new_ones(()) if mass is None else mass, key.dims)
        return masses

    def _marginal(
        self, members: frozenset[str], dims: frozenset[str], plates: frozenset[str]
    ) -> Tensor | None:
        """
        Return the product of some sites' weights, summed over all dims except ``dims``.

        Sites are multiplied in the order of the guide. A dim is summed as soon as no later site has
        it. Costs along a Markov chain share all steps except the last.
        """
        names = [name for name in self._scored if name in members]
        total: Tensor | None = None
        for i, name in enumerate(names):
            later = dims.union(*(self._scored[n].dims for n in names[i + 1 :]))
            weight = self._weight(name, plates)
            have = frozenset(dims_of(weight))
            if total is not None:
                have |= frozenset(dims_of(total))
            kept = "".join(sorted(have & later))
            # The previous product is identified by its id, because the cache keeps it alive.
            key = id(total), name, dims_of(weight), kept
            if key not in self._cache:
                self._cache[key] = _product(total, weight, kept)
            total = self._cache[key]
        return total

    def _weight(self, name: str, plates: frozenset[str]) -> Tensor:
        leaf, site = self._leaves[name], self._scored[name]
        outside = [i for i, d in enumerate(site.order) if d in site.plates - plates]
        if site.symbol is not None or not outside:
            return leaf
        # If a cost outside a plate depends on draws inside, the whole cost belongs to each draw.
        kept = "".join(d for d in site.order if d not in site.plates - plates)
        return with_dims(1 + (leaf - 1).sum(outside), kept)

    def _upstream(self, site: ScoredSite) -> Tensor:
        dims = site.dims - {site.symbol}
        members = self._closure((), dims) - {site.name}
        marginal = self._marginal(members, dims, site.plates)
        return with_dims(site.weight.new_ones(()), "") if marginal is None else marginal

    def _sum(self, masses: dict[_Key, Tensor]) -> Tensor:
        pairs = ((costs, masses[k]) for (k, _), costs in self._alike.items())
        return as_scalar(
            add_up(times((mass * _known(c, mass)).sum(), c[0].scale) for c, mass in pairs)
        )


def _product(left: Tensor | None, right: Tensor, kept: str) -> Tensor:
    """Multiply two packed tensors, and sum over all dims except ``kept``."""
    pair = [t for t in (left, right) if t is not None]
    names = list(map(dims_of, pair))
    number = {d: i for i, d in enumerate(dict.fromkeys("".join(names)))}
    operands = [
        part for t, n in zip(pair, names, strict=True) for part in (t, [number[d] for d in n])
    ]
    return with_dims(torch.einsum(*operands, [number[d] for d in kept]), kept)


def _aligned(value: Tensor, dims: Iterable[str]) -> Tensor:
    """Sort the dims of a packed tensor, with size 1 for missing ones."""
    dims_of_value, target = dims_of(value) if value.dim() else "", sorted(dims)
    order = [dims_of_value.index(d) for d in target if d in dims_of_value]
    sizes = [value.shape[dims_of_value.index(d)] if d in dims_of_value else 1 for d in target]
    return value.permute(order).reshape(sizes)


def _known(costs: list[SlotCost], mass: Tensor) -> Tensor:
    """Return the value of costs, with zero instead of infinity where the weight is zero."""
    value = torch.as_tensor(add_up(_aligned(c.value, c.dims) for c in costs))
    return value.masked_fill((value - value != 0) & (mass <= 0), 0.0)


def _path(costs: list[SlotCost], mass: Tensor) -> Sum:
    """Return a surrogate with the gradient of the costs, detached from the weights."""
    paths = (_aligned(c.path, c.dims) for c in costs if isinstance(c.path, Tensor))
    if not isinstance(path := add_up(paths), Tensor):
        return 0
    return times((mass * path.masked_fill(mass <= 0, 0.0)).sum(), costs[0].scale)


# Rao-Blackwellized gradients for discrete sites.


class TraceRaoBlackwell_ELBO(MonteCarloELBO, torch.nn.Module):
    r"""
    The ELBO, with the k most probable values of each discrete guide site summed [1]:

    .. math::
        E_{q(z)}[g(z)] \approx \sum_{z \in C} q(z) g(z)
            + q(\bar C) \frac{1}{n} \sum_{j=1}^n g(v_j), \qquad
        v_j \sim q(\cdot \mid \bar C),

    where C contains the k most probable values of each datum. The estimate is used for values and
    for gradients. It has the mean of the plain estimator, and at most :math:`q(\bar C)` times its
    variance. ``k = 0`` is the plain estimator. If k is at least the number of values, the sum is
    exact, as in :class:`~pyro.infer.TraceEnum_ELBO`.

    The guide needs no annotation. Sites may depend on each other, and reparameterized sites may
    depend on them. All factors that depend on a site are evaluated at its k + n slots. The slots
    are in a separate batch dim, as in Pyro's parallel enumeration, or under ``vmap`` if the model
    does not broadcast. If a factor depends on several sites outside ``pyro.markov``, the numbers of
    their slots multiply. Sites of the model that are marked ``infer={"enumerate": "parallel"}`` and
    are not in the guide are summed inside the logarithm. A cost is multiplied by the weights of the
    sites that it depends on. One run determines these sites.

    Some programs cannot evaluate several slots in one run (an ``nn.GRU``, Python code that reads a
    value). Some factors depend on several elements of a plate. In these cases the slots are rows,
    as in the chains of :class:`~pyro_mcvae.TraceSIS_ELBO`. The numbers of slots of all sites of a
    datum multiply, dependent elements are one variable, and each slot has all costs of its datum.
    The mean and the exact sums are the same, but the gradient is noisier. The reason is logged.

    * **Supports**: Categorical, OneHotCategorical, Bernoulli, Binomial and everything else with a
      finite ``enumerate_support``. Vectors of these by ``to_event`` are one variable over their
      product. Poisson and Geometric are supported, too. Other discrete sites are sampled, with the
      score function as their gradient and a log message.
    * **Options per site**: ``infer={"mcvae": {"num_categories": 5, "num_samples": 2}}``. The keys
      ``"budget"``, ``"baseline"`` and ``"exact_entropy"`` are also accepted. A guide site marked
      ``infer={"enumerate": "parallel"}`` (or ``"sequential"``) is summed exactly; if it also has
      ``"num_samples": n``, n values are drawn.
    * **Baselines** (``baseline=``) do not change the expected gradient. None is REINFORCE,
      :class:`~pyro_mcvae.IndependentDraw` is REINFORCE+, and :class:`~pyro_mcvae.LeaveOneOut`
      compares draws. :class:`~pyro_mcvae.SummedMean` uses the cost of the summed categories and
      needs no further evaluation. :class:`~pyro_mcvae.NVIL`, :class:`~pyro_mcvae.REBAR` and
      :class:`~pyro_mcvae.RELAX` have parameters. SVI trains them, and ``elbo(model, guide)`` has
      them as its parameters.

    :param num_categories: k, the number of values to sum; 1 by default, ``math.inf`` for all.
    :param int num_samples: n, the number of draws from the other values; 1 by default.
    :param budget: N = k + n. The k of each datum is chosen by Prop. 2 of [1], so that the variance
        is at most that of N draws.
    :param baseline: a :class:`~pyro_mcvae.Baseline`, or None.
    :param entropy: ``"exact"`` sums the entropy of each discrete site over all values;
        ``"sampled"`` evaluates it at the slots. Slots in rows, masked distributions and infinite
        supports always use ``"sampled"``, with a log message.
    :param int num_particles: the number of independent repetitions, which are averaged.
    :param options: ``max_plate_nesting``, ``vectorize_particles``, ``strict_enumeration_warning``
        and ``retain_graph``, as in Pyro; see :class:`MonteCarloELBO`.
    :raises ValueError: for counts out of range, a baseline without the draws that it needs, and
        sites without categories.
    :raises LeadingDimsError: with ``vectorize_particles=True``, if slots have to run one by one.

    [1] Liu, Regier, Tripuraneni, Jordan, McAuliffe (2019), *Rao-Blackwellized Stochastic Gradients
    for Discrete Distributions*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro_mcvae import TraceRaoBlackwell_ELBO
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         y = pyro.sample("y", dist.Categorical(torch.ones(10)))
        ...         pyro.sample("x", dist.Normal(y.float(), 1.0), obs=x)
        >>> def guide(x):
        ...     logits = pyro.param("logits", torch.zeros(len(x), 10))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Categorical(logits=logits))
        >>> elbo = TraceRaoBlackwell_ELBO(num_categories=2, num_samples=1)
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=elbo)
        >>> losses = [svi.step(torch.tensor([2.0, 7.0])) for _ in range(300)]
        >>> pyro.param("logits").argmax(-1)
        tensor([2, 7])
    """

    # nn.Module would register it as a submodule.
    vectorize_particles: bool | None

    def __init__(
        self,
        num_categories: float | None = None,
        num_samples: int | None = None,
        *,
        budget: int | None = None,
        baseline: Baseline | None = None,
        entropy: Literal["sampled", "exact"] = "sampled",
        num_particles: int = 1,
        **options: Unpack[ELBOOptions],
    ) -> None:
        self._check_options(options)
        torch.nn.Module.__init__(self)
        super().__init__(num_particles, **options)
        if entropy not in ("sampled", "exact"):
            raise ValueError(f"entropy must be 'sampled' or 'exact', got {entropy!r}")
        self.baseline, self.entropy = baseline, entropy
        self.num_categories, self.num_samples, self.budget = num_categories, num_samples, budget
        self._site_options = SiteOptions(
            num_categories, num_samples, budget, baseline, entropy == "exact"
        )
        # A site that is marked for enumeration has a slot for each of its values.
        self.sampler.runner.strict_enumeration = False
        self._slots = SlotSampler(self.sampler, self._site_options)
        self._rows = SlotPlanner(self._site_options, common=False)

    def _weighs(self, site: Site) -> bool:
        return False

    def estimate(self, programs: Programs) -> Estimate:
        if is_messenger(programs):
            return averaged_estimate(self._without_slots(programs))
        by_rows = partial(self._rows.sample, self.sampler, programs)
        slot_runs = self._slots.runs_or(programs, by_rows)
        if isinstance(slot_runs, tuple):
            return self._estimate_by_rows(programs, *slot_runs)
        sums = [SlotSums(run, self._slots.ancestors(programs, run)) for run in slot_runs]
        wanted = torch.is_grad_enabled()
        parts = [s.differentiate(programs) if wanted else (s.value(), 0.0) for s in sums]
        value, surrogate = map(as_scalar, map(add_up, zip(*parts, strict=True)))
        each = 1 / self.sampler.num_particles
        value, surrogate = times(value, each), times(surrogate, each)
        runs = [r.run for r in slot_runs]
        bounds = partial(self._bounds, programs, slot_runs, sums)
        return Estimate(value, surrogate, runs, scored=True, bounds=bounds)

    def _bounds(self, programs: Programs, slot_runs: list[SlotRun], sums: list[SlotSums]) -> Bounds:
        """Return the value per datum: the expected costs of its sites."""
        costs = []
        for slot_run, slot_sums in zip(slot_runs, sums, strict=True):
            summands = slot_run.run.summands
            values: dict[FactorKey, Tensor | int] = {t.key: 0 for t in summands}
            for c, value in zip(slot_run.costs, slot_sums.expected(), strict=True):
                values[c.term.key] = values[c.term.key] + value * (c.scale / c.term.plate_scale)
            costs.append([Cost(t, values[t.key], 0) for t in summands])
        sample = self.sampler.arrange(programs, [r.run for r in slot_runs])
        return elbo_bounds(sample, costs)

    def _estimate_by_rows(
        self, programs: Programs, sample: WeightedParticles, draws: SlotDraws | None
    ) -> Estimate:
        """Estimate with whole weights, for models and guides whose slots cannot be in dims."""
        slots = SlotAverage.of(sample, draws, common=False)
        if slots.weight is None:
            return averaged_estimate(sample)
        log_weight = sample.log_weight
        bound, surrogate = slots.mean(log_weight.detach()), slots.mean(log_weight)
        estimate = weighted_estimate(sample, bound, slots.without_entropy(surrogate))
        if torch.is_grad_enabled():
            scores = slots.with_scores(estimate.surrogate, log_weight.detach, programs)
            estimate.surrogate = scores
        return estimate

    def _without_slots(self, programs: Programs) -> WeightedParticles:
        sample = self.sampler.arrange(programs, self.sampler.independent(programs))
        for term in sample.runs[0].terms:
            if term.in_guide and is_discrete(term.site):
                raise ValueError(
                    f"guide site '{term.key.name}' ({type(term.site['fn']).__name__}) can have no "
                    f"slots, because this guide is a messenger, which runs model and guide "
                    f"together: write the guide as a separate function or module"
                )
        return sample
