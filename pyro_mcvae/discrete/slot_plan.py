"""Which discrete sites of a guide have slots in the rows of a step, and how the rows count them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pyro_mcvae.discrete.relaxed_control_variates import RELAX
from pyro_mcvae.discrete.site_options import SiteOptions, SlotError
from pyro_mcvae.discrete.slot_choice import check_num_slots, choose, is_discrete
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.annotations import SLOT_OPTIONS, options_of
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.plates import LEADING
from pyro_mcvae.programs.sites import is_random
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.structure.dependencies import find_dependencies


@dataclass(frozen=True)
class SlotSite:
    """
    The place of a local random site of the guide among the slots.

    :ivar block: the index of its block.
    :ivar before: the discrete sites of the block that the guide draws before it.
    :ivar joined: the batch dims of plates inside of the block, whose elements are one variable.
    """

    block: int
    before: tuple[str, ...]
    joined: tuple[int, ...] = ()


@dataclass(frozen=True)
class SlotPlan:
    """
    The slots of a structure.

    The slots of a block's sites are counted together, those of its first site fastest.

    :ivar sites: the discrete sites, in the guide's order.
    :ivar others: the other local random sites.
    :ivar common: the sites that all particles share.
    :ivar counts: how many slots each discrete site has.
    """

    sites: Mapping[str, SlotSite]
    others: Mapping[str, SlotSite]
    common: frozenset[str]
    counts: Mapping[str, int]

    def stride(self, name: str) -> int:
        """How many slots the sites before this one have."""
        site = self.sites.get(name) or self.others[name]
        return math.prod(self.counts[n] for n in site.before)

    def size(self, block: int) -> int:
        """How many slots a block has."""
        return math.prod(self.counts[n] for n, site in self.sites.items() if site.block == block)

    @property
    def num_slots(self) -> int:
        """How many slots each datum has; blocks with fewer leave some out."""
        return max(self.size(site.block) for site in self.sites.values())

    def fits(self, other: SlotPlan | None) -> bool:
        """Whether another plan has the same sites."""
        return other is not None and replace(other, counts=self.counts) == self


def make_plan(
    programs: Programs,
    sample: WeightedParticles,
    options: SiteOptions,
    common: bool,
    tell: Callable[[str], object],
) -> SlotPlan | None:
    """
    The slots of programs that a sample shows; None where the guide draws no discrete local site.

    :param options: for all sites that do not say otherwise.
    :param common: whether particles share the discrete draws, and what these depend on.
    :param tell: called with messages about sites that get no slots.
    :raises SlotError: naming a site that cannot have the slots that are asked for.
    """
    sites: dict[str, SlotSite] = {}
    others: dict[str, SlotSite] = {}
    counts: dict[str, int] = {}
    for term in sample.runs[0].terms:
        if not term.in_guide or not is_random(term.site):
            continue
        name, block = term.key.name, sample.block_of[0][term.key]
        if block is None:
            _look_at_global(term, tell)
            continue
        before = tuple(n for n, site in sites.items() if site.block == block)
        if not is_discrete(term.site):
            others[name] = SlotSite(block, before)
            continue
        sites[name] = SlotSite(block, before, _joined(term, sample.blocks[block].dims))
        counts[name] = _count(term, options, sites[name].joined, tell)
        check_num_slots(name, math.prod(counts[n] for n in (*before, name)))
    if not sites:
        return None
    for observed in sample.runs[0].guide_data:
        raise SlotError(
            f"the guide observes site '{observed.key.name}', whose density is no part of a weight, "
            f"beside discrete sites with slots: observe it in the model, or use "
            f"TraceRaoBlackwell_ELBO, for programs that run with several of their values at once"
        )
    shared = _common(programs, sample, sites, others) if common else frozenset()
    return SlotPlan(sites, others, shared, counts)


def _joined(term: Term, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The dims inside of the block: of plates, and those that lie in no plate."""
    frames, batch = term.site["cond_indep_stack"], term.site["fn"].batch_shape
    leads = {f.dim for f in frames if f.name == LEADING}
    own = set(range(-len(batch), 0)) - set(dims) - leads
    return tuple(sorted(d for d in own if batch[d] > 1))


def _count(
    term: Term, options: SiteOptions, joined: tuple[int, ...], tell: Callable[[str], object]
) -> int:
    baseline = options.of(term.site).baseline
    if getattr(baseline, "relaxed", False) or isinstance(baseline, RELAX):
        raise SlotError(
            f"{type(baseline).__name__} relaxes guide site '{term.key.name}', whose slots here "
            f"stand among the particles: use IndependentDraw, LeaveOneOut, SummedMean or NVIL, or, "
            f"for programs that run with several of its values at once, TraceRaoBlackwell_ELBO"
        )
    slots = choose(term.site, options, tell, joined)
    if slots is None:
        return 1
    why = "its slots stand in rows, each with all of its weight, of which log q is a part"
    slots.tell_entropy(term.key.name, why, tell)
    return len(slots)


def _look_at_global(term: Term, tell: Callable[[str], object]) -> None:
    if not is_discrete(term.site):
        return
    own, name = options_of(term.site), term.key.name
    if own.keys() & SLOT_OPTIONS:
        raise SlotError(
            f"guide site '{name}' is shared by all data, so that it is drawn once a step, and has "
            f"no use for infer['mcvae'] = {own}: remove that, sum the site with "
            f"TraceRaoBlackwell_ELBO, in programs that run with several of its values at once, or, "
            f"on the full data, weigh it with them by joint=True"
        )
    tell(
        f"guide site '{name}' is shared by all data, so it has no slots: it is drawn once a step, "
        f"with the score function as its gradient; TraceRaoBlackwell_ELBO sums it, in programs "
        f"that run with several of its values at once"
    )


def _common(
    programs: Programs,
    sample: WeightedParticles,
    sites: Mapping[str, SlotSite],
    others: Mapping[str, SlotSite],
) -> frozenset[str]:
    """The discrete sites, and what they depend on."""
    order = [t.key.name for t in sample.runs[0].terms if t.key.name in {*sites, *others}]
    last = max(order.index(n) for n in sites)
    before = frozenset(order[:last])
    if not before & others.keys():
        return frozenset(sites)
    names = frozenset(order)
    found = find_dependencies(programs, names, sample.subsamples)
    above = found.ancestors(names)
    return frozenset(sites).union(*(above[n] for n in sites)) & (before | sites.keys())
