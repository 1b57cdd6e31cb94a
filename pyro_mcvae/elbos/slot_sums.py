"""Expected costs over the slots of discrete sites, and their gradients."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

import torch
from pyro.ops import packed
from torch import Tensor

from pyro_mcvae.discrete.enumerated import ScoredSite, SlotCost, SlotRun
from pyro_mcvae.elbos.estimate import Sum, add_up, as_scalar, times
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.factors import FactorKey


class _Key(NamedTuple):
    dims: frozenset[str]
    members: frozenset[str]
    plates: frozenset[str]


class SlotSums:
    r"""
    The expectation over the slots of a run, :math:`V = \sum_c \sum_s \prod_{i \in R(c)} w_i c`.

    R(c) holds the sites that cost c depends on, and those that these depend on, and no others:
    the weights of the others sum to one, but their gradients are noise. V is linear in each weight
    and in each cost, so one backward pass through it gives the expected cost behind every slot
    and the weight of every cost.

    :param SlotRun slot_run: an execution.
    :param ancestors: for each factor the guide sites that it depends on, directly or not.
    """

    def __init__(self, slot_run: SlotRun, ancestors: Mapping[FactorKey, frozenset[str]]) -> None:
        self._scored = slot_run.scored
        self._ancestors = ancestors
        self._owner = {s.symbol: s.name for s in slot_run.scored.values() if s.symbol}
        self._leaves = {n: _named(s.weight.clone(), s.order) for n, s in self._scored.items()}
        self._keys = [self._key(cost) for cost in slot_run.costs]
        self._costs = slot_run.costs
        self._cache: dict[Hashable, Tensor] = {}

    def value(self) -> Tensor:
        """V, detached."""
        with torch.no_grad():
            return self._sum(self._masses())

    def expected(self) -> list[Tensor]:
        """The expectation of each cost over the slots, in the layout of its site's plates."""
        found = []
        with torch.no_grad():
            masses = self._masses()
            for cost, key in zip(self._costs, self._keys, strict=True):
                total = masses[key] * _known(cost, masses[key])
                dims = sorted(cost.dims)
                slots = [i for i, d in enumerate(dims) if d not in cost.plates]
                total = total.sum(slots) if slots else total
                kept = "".join(d for d in dims if d in cost.plates)
                symbols = cost.term.site["infer"]["_dim_to_symbol"].items()
                found.append(packed.unpack(_named(total, kept), {s: d for d, s in symbols}))
        return found

    def differentiate(self, programs: Programs) -> tuple[Tensor, Sum]:
        """V, and a scalar with the gradient of the costs and of all sites' distributions."""
        leaves = list(self._leaves.values())
        with torch.enable_grad():
            for leaf in leaves:
                leaf.requires_grad_()
            masses = self._masses()
            value = self._sum(masses)
        path = add_up(
            _path(c, masses[k].detach())
            for c, k in zip(self._costs, self._keys, strict=True)
            if isinstance(c.path, Tensor)
        )
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
        """Of a site's distribution; ``cost`` is what its slots' weights multiply."""
        cost = torch.zeros_like(weight) if cost is None else cost
        with torch.no_grad():
            upstream = self._upstream(site)
        return site.slots.surrogate(
            site.site,
            programs,
            weight=site.slots_first(_named(weight, site.order)),
            sampled=site.sampled(),
            score=site.first(site.score),
            cost=site.slots_first(_named(cost, site.order)),
            upstream=site.slots_first(upstream),
            value=site.values(),
        )

    def _key(self, cost: SlotCost) -> _Key:
        """Costs of the same dims, sites and plates share the weights that multiply them."""
        every = self._scored.keys()
        ancestors = set().union(*(self._ancestors.get(k, every) for k in cost.keys))
        plain = {n for n in ancestors & every if self._scored[n].symbol is None}
        members = self._closure(plain, cost.dims)
        return _Key(cost.dims, members, cost.plates)

    def _closure(self, names: Iterable[str], dims: Iterable[str]) -> frozenset[str]:
        """Sites, the owners of dims, and the owners of the dims of their weights."""
        found = set(names)
        waiting = [*dims, *(d for name in found for d in self._scored[name].dims)]
        while waiting:
            name = self._owner.get(waiting.pop())
            if name is not None and name not in found:
                found.add(name)
                waiting.extend(self._scored[name].dims)
        return frozenset(found)

    def _masses(self) -> dict[_Key, Tensor]:
        self._cache.clear()  # of products without gradients, or of another step
        found = {}
        for cost, key in zip(self._costs, self._keys, strict=True):
            if key not in found:
                mass = self._marginal(key.members, key.dims, key.plates)
                found[key] = _aligned(cost.value.new_ones(()) if mass is None else mass, key.dims)
        return found

    def _marginal(
        self, members: frozenset[str], dims: frozenset[str], plates: frozenset[str]
    ) -> Tensor | None:
        """
        The product of some sites' weights, summed over all dims but ``dims``.

        One site after the other, in the guide's order; a dim is summed as soon as no site that
        follows has it. Costs along a chain share all steps but their last.
        """
        names = [name for name in self._scored if name in members]
        total: Tensor | None = None
        for i, name in enumerate(names):
            later = dims.union(*(self._scored[n].dims for n in names[i + 1 :]))
            own = self._weight(name, plates)
            have = frozenset(own._pyro_dims)  # type: ignore[attr-defined]
            if total is not None:
                have |= frozenset(total._pyro_dims)  # type: ignore[attr-defined]
            kept = "".join(sorted(have & later))
            # The previous product, by its identity: the cache keeps it alive.
            key = id(total), name, own._pyro_dims, kept  # type: ignore[attr-defined]
            if key not in self._cache:
                self._cache[key] = _product(total, own, kept)
            total = self._cache[key]
        return total

    def _weight(self, name: str, plates: frozenset[str]) -> Tensor:
        leaf, site = self._leaves[name], self._scored[name]
        outside = [i for i, d in enumerate(site.order) if d in site.plates - plates]
        if site.symbol is not None or not outside:
            return leaf
        # Many draws inside of a plate before one cost outside: each has all of it for its cost.
        kept = "".join(d for d in site.order if d not in site.plates - plates)
        return _named(1 + (leaf - 1).sum(outside), kept)

    def _upstream(self, site: ScoredSite) -> Tensor:
        dims = site.dims - {site.symbol}
        members = self._closure((), dims) - {site.name}
        found = self._marginal(members, dims, site.plates)
        return _named(site.weight.new_ones(()), "") if found is None else found

    def _sum(self, masses: dict[_Key, Tensor]) -> Tensor:
        pairs = ((c, masses[k]) for c, k in zip(self._costs, self._keys, strict=True))
        return as_scalar(
            add_up(times((mass * _known(c, mass)).sum(), c.scale) for c, mass in pairs)
        )


def _product(left: Tensor | None, right: Tensor, kept: str) -> Tensor:
    """Two packed tensors multiplied, and summed over all dims but ``kept``."""
    pair = [t for t in (left, right) if t is not None]
    names = [t._pyro_dims for t in pair]  # type: ignore[attr-defined]
    number = {d: i for i, d in enumerate(dict.fromkeys("".join(names)))}
    operands = [
        part for t, n in zip(pair, names, strict=True) for part in (t, [number[d] for d in n])
    ]
    return _named(torch.einsum(*operands, [number[d] for d in kept]), kept)


def _named(value: Tensor, dims: str) -> Tensor:
    """A packed tensor, whose dims have names."""
    value._pyro_dims = dims  # type: ignore[attr-defined]
    return value


def _aligned(value: Tensor, dims: Iterable[str]) -> Tensor:
    """A packed tensor with its dims sorted, and one of size 1 for each that it has not."""
    own, target = getattr(value, "_pyro_dims", ""), sorted(dims)
    order = [own.index(d) for d in target if d in own]
    sizes = [value.shape[own.index(d)] if d in own else 1 for d in target]
    return value.permute(order).reshape(sizes)


def _known(cost: SlotCost, mass: Tensor) -> Tensor:
    """A cost's value, zero where it is infinite but has no weight (0 * inf is NaN)."""
    value = _aligned(cost.value, cost.dims)
    return torch.where(value.isfinite() | (mass > 0), value, 0.0)


def _path(cost: SlotCost, mass: Tensor) -> Tensor:
    path = _aligned(cost.path, cost.dims)
    return times((mass * torch.where(mass > 0, path, 0.0)).sum(), cost.scale)
