"""The costs and weights of one run in which discrete sites have several slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pyro.ops import packed
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.discrete.site_options import SiteOptions
from pyro_mcvae.discrete.slot_choice import SiteSlots
from pyro_mcvae.discrete.slots import SLOTS_KEY
from pyro_mcvae.programs import sites
from pyro_mcvae.programs.factors import FactorKey
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.state_sums import StateFactor, inside_sum, pack, sum_states
from pyro_mcvae.programs.support import Choice
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Site


@dataclass
class SlotCost:
    """
    A summand of the ELBO, with a dimension for every slot that it depends on.

    :ivar term: the site that it belongs to; for a sum over states of the model, one of its sites.
    :ivar value: packed, detached, without the plates' N/B.
    :ivar path: what its gradient passes through, packed like ``value``; or 0.
    :ivar scale: N/B.
    :ivar plates: the symbols of the plates around it.
    :ivar keys: the factors that it was computed from.
    """

    term: Term
    value: Tensor
    path: Any
    scale: float | Tensor
    plates: frozenset[str]
    keys: tuple[FactorKey, ...]

    @property
    def dims(self) -> frozenset[str]:
        return frozenset(self.value._pyro_dims)  # type: ignore[attr-defined]


@dataclass
class ScoredSite:
    """
    A guide site whose distribution gets its gradient through log q of its draws.

    :ivar score: log q of each slot, with its gradient, without scale and mask: ``[..., *batch]``.
    :ivar weight: the numbers that multiply what depends on the site, packed like ``score``.
    :ivar symbol: the symbol of the slots' dimension; None where there is one slot.
    :ivar plates: the symbols of the plates around it.
    :ivar dim_of: the batch dim of each symbol.
    """

    name: str
    site: Site
    slots: SiteSlots
    score: Tensor
    weight: Tensor
    symbol: str | None
    plates: frozenset[str]
    dim_of: dict[str, int]

    @property
    def dim(self) -> int | None:
        """The batch dim of the slots; None where there is one slot."""
        return None if self.symbol is None else self.dim_of[self.symbol]

    @property
    def order(self) -> str:
        """The symbols of the dims of ``weight``."""
        return self.weight._pyro_dims  # type: ignore[attr-defined]

    @property
    def dims(self) -> frozenset[str]:
        return frozenset(self.order)

    def sampled(self) -> Tensor:
        """Which slots are draws, ``[S, *batch]``."""
        sampled = self.slots.choice.sampled
        return sampled if self.dim is None else self.first(_slots_to(sampled, self.dim))

    def values(self) -> Tensor:
        """The slots' values, ``[S, *batch, *event]``."""
        value, event_dim = self.site["value"].unsqueeze(0), self.site["fn"].event_dim
        return value if self.dim is None else value.transpose(0, self.dim - event_dim)

    def slots_first(self, value: Tensor) -> Tensor:
        """A packed tensor as ``[S, *batch]``."""
        value = packed.unpack(value, self.dim_of)
        depth = self.score.dim()
        value = value.reshape((1,) * (depth - value.dim()) + value.shape)
        return self.first(value)

    def first(self, value: Tensor) -> Tensor:
        """A tensor in the layout of ``score`` as ``[S, *batch]``, with 1 in place of the slots."""
        value = value.unsqueeze(0)
        return value if self.dim is None else value.transpose(0, self.dim)


@dataclass
class SlotRun:
    """
    The costs and the weights of one execution.

    :ivar run: its terms, as of any other run.
    """

    run: Run
    costs: list[SlotCost]
    scored: dict[str, ScoredSite]


def take_apart(run: Run) -> SlotRun:
    """The costs and the weights of a run."""
    guide, model = run.guide_trace, run.model_trace
    # The guide first: both traces share what a site knows about its dims.
    guide.symbolize_dims()
    scored, costs = {}, []
    for term in run.summands:
        if term.in_guide:
            plates = _plates(term, guide)
            if isinstance(term.score, Tensor):
                scored[term.key.name] = _scored(term, plates)
            costs.append(_guide_cost(term, plates))
    model.symbolize_dims(guide.plate_to_symbol)
    factors = [
        SlotCost(t, *_cost(t, t.log_prob), t.plate_scale, _plates(t, model), (t.key,))
        for t in run.terms
        if not t.in_guide
    ]
    states = {
        c.term.key
        for c in factors
        if c.term.key.name not in guide and "_enumerate_dim" in c.term.site["infer"]
    }
    return SlotRun(run, [*_sum_states(factors, states), *costs], scored)


def _plates(term: Term, trace: Trace) -> frozenset[str]:
    frames = term.site["cond_indep_stack"]
    return frozenset(trace.plate_to_symbol[f.name] for f in frames if f.vectorized)


def _guide_cost(term: Term, plates: frozenset[str]) -> SlotCost:
    entropy = _exact_entropy(term)
    if entropy is not None:
        return SlotCost(term, *_cost(term, entropy), term.plate_scale, plates, (term.key,))
    path: Tensor | int
    value, path = _cost(term, -term.log_prob)
    if not isinstance(term.entropy, Tensor):
        path = 0
    elif term.entropy is not term.log_prob:
        path = _pack(term, -term.entropy)
    return SlotCost(term, value, path, term.plate_scale, plates, (term.key,))


def _pack(term: Term, value: Tensor) -> Tensor:
    return pack(term.site, term.key.program, value)


def _cost(term: Term, value: Tensor) -> tuple[Tensor, Tensor]:
    return _detached(_pack(term, value))


def _detached(path: Tensor) -> tuple[Tensor, Tensor]:
    """A packed tensor without and with its gradient."""
    value = path.detach()
    value._pyro_dims = path._pyro_dims  # type: ignore[attr-defined]
    return value, path


def _scored(term: Term, plates: frozenset[str]) -> ScoredSite:
    site, score = term.site, torch.as_tensor(term.score)
    slots = site["infer"].get(SLOTS_KEY)
    if slots is None:
        one = torch.ones_like(score).unsqueeze(0)
        slots = SiteSlots(SiteOptions(0, 1), None, Choice(site["value"], one, one > 0))
    weight, dim = slots.choice.weight.to(score.dtype), site["infer"].get("_enumerate_dim")
    weight = weight[0] if dim is None else _slots_to(weight, dim)
    symbol = site["infer"].get("_enumerate_symbol")
    dim_of = {s: d for d, s in site["infer"]["_dim_to_symbol"].items()}
    weight = pack(site, term.key.program, weight.detach(), sums=False)
    return ScoredSite(term.key.name, site, slots, score, weight, symbol, plates, dim_of)


def _slots_to(value: Tensor, dim: int) -> Tensor:
    """Move slots from the front, ``[S, *batch]``, to a batch dim, as Pyro does with values."""
    front = -value.dim()
    if dim < front:
        return value.reshape(value.shape[:1] + (1,) * (front - dim) + value.shape[1:])
    return value.transpose(dim, front)


def _exact_entropy(term: Term) -> Tensor | None:
    slots: SiteSlots | None = term.site["infer"].get(SLOTS_KEY)
    entropy = None if slots is None or term.left_out else slots.entropy(term.site["fn"])
    return None if entropy is None else sites.masked(term.site, entropy)


def _sum_states(model: list[SlotCost], states: set[FactorKey]) -> list[SlotCost]:
    """Sum over the states of the model's own enumerated sites, inside of the logarithm."""
    dims = {c.term.site["infer"]["_enumerate_symbol"] for c in model if c.term.key in states}
    inside: list[SlotCost] = []
    costs: list[SlotCost] = []
    for c in model:
        found = inside if c.term.key in states or not dims.isdisjoint(c.dims) else costs
        found.append(c)
    for s in sum_states([_state_factor(c, c.term.key in states) for c in inside], dims):
        own = [inside[i] for i in s.members]
        home = next((c.term for c in own if c.plates == s.plates), own[0].term)
        value, path = _detached(s.log_prob)
        costs.append(SlotCost(home, value, path, s.scale, s.plates, tuple(c.term.key for c in own)))
    return costs


def _state_factor(cost: SlotCost, is_state: bool) -> StateFactor:
    site = cost.term.site
    return StateFactor(site, pack(site, "model", inside_sum(site, is_state)), cost.plates)
