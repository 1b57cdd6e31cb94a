"""
Slots in rows: combinations of values as particles, each with a whole log weight.

Objectives with a logarithm of weights use them, and programs whose slots cannot be in batch dims
(:mod:`~pyro_mcvae.discrete.slot_dims`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from pyro_mcvae.coordinates.coordinate import Beginning, Coordinate
from pyro_mcvae.discrete.baselines import RELAX
from pyro_mcvae.discrete.site_slots import (
    SiteOptions,
    SiteSlots,
    SlotError,
    check_num_slots,
    choose,
    is_discrete,
    single,
)
from pyro_mcvae.ops.checks import WarnOnce
from pyro_mcvae.ops.tensors import as_shape
from pyro_mcvae.particles.sampler import ParticleSampler, WeightedParticles
from pyro_mcvae.programs.messengers import SampleFn
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.sites import changed_draw, is_random, is_scored, reparameterized
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import PARTICLE_PLATE, SLOT_OPTIONS, Message, SiteError, options_of
from pyro_mcvae.structure.marked import dependencies_of

# Plans: the discrete sites with slots in the rows of a step, and the order of the rows.


@dataclass(frozen=True)
class SlotSite:
    """
    The position of a local random site of the guide among the slots.

    :ivar block: the index of its block.
    :ivar before: the discrete sites of the block that the guide draws before it.
    :ivar joined: the batch dims of plates inside the block, whose elements form one variable.
    """

    block: int
    before: tuple[str, ...]
    joined: tuple[int, ...] = ()


@dataclass(frozen=True)
class SlotPlan:
    """
    The slots of a structure.

    The slots of a block's sites are numbered jointly; the first site's index varies fastest.

    :ivar sites: the discrete sites, in the guide's order.
    :ivar continuous: the other local random sites.
    :ivar common: the sites that all particles share.
    :ivar counts: the number of slots of each discrete site.
    """

    sites: Mapping[str, SlotSite]
    continuous: Mapping[str, SlotSite]
    common: frozenset[str]
    counts: Mapping[str, int]

    def stride(self, name: str) -> int:
        """Return the number of slots of the sites before this one."""
        site = self.sites.get(name) or self.continuous[name]
        return math.prod(self.counts[n] for n in site.before)

    def size(self, block: int) -> int:
        """Return the number of slots of a block."""
        return math.prod(self.counts[n] for n, site in self.sites.items() if site.block == block)

    @property
    def num_slots(self) -> int:
        """Return the number of slots of each datum; blocks with fewer slots skip some."""
        return max(self.size(site.block) for site in self.sites.values())

    def fits(self, other: SlotPlan | None) -> bool:
        """Return whether another plan has the same sites."""
        return other is not None and replace(other, counts=self.counts) == self


def make_plan(
    programs: Programs,
    sample: WeightedParticles,
    options: SiteOptions,
    common: bool,
    warn: Callable[[str], object],
) -> SlotPlan | None:
    """
    Return the slot plan of a sample's programs; None if the guide has no discrete local site.

    :param options: the default options of all sites.
    :param common: whether particles share the discrete draws, and the draws these depend on.
    :param warn: called with messages about sites without slots.
    :raises SlotError: naming a site that cannot have the requested slots.
    """
    sites: dict[str, SlotSite] = {}
    continuous: dict[str, SlotSite] = {}
    counts: dict[str, int] = {}
    for term in sample.runs[0].terms:
        if not term.in_guide or not is_random(term.site):
            continue
        name, block = term.key.name, sample.block_of[0][term.key]
        if block is None:
            _warn_global(term, warn)
            continue
        before = tuple(n for n, site in sites.items() if site.block == block)
        if not is_discrete(term.site):
            continuous[name] = SlotSite(block, before)
            continue
        sites[name] = SlotSite(block, before, _joined(term, sample.blocks[block].dims))
        counts[name] = _count(term, options, sites[name].joined, warn)
        check_num_slots(name, math.prod(counts[n] for n in (*before, name)))
    if not sites:
        return None
    for observed in sample.runs[0].guide_data:
        raise SlotError(
            f"the guide observes site '{observed.key.name}', whose density is not part of a "
            f"weight, and discrete sites have slots: observe it in the model, or use "
            f"TraceRaoBlackwell_ELBO, for programs that run with several of their values at once"
        )
    shared = _common(programs, sample, sites, continuous) if common else frozenset()
    return SlotPlan(sites, continuous, shared, counts)


def _joined(term: Term, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims inside the block, of plates and outside plates."""
    frames, batch = term.site["cond_indep_stack"], term.site["fn"].batch_shape
    leads = {f.dim for f in frames if f.name == PARTICLE_PLATE}
    inner = set(range(-len(batch), 0)) - set(dims) - leads
    return tuple(sorted(d for d in inner if batch[d] > 1))


def _count(
    term: Term, options: SiteOptions, joined: tuple[int, ...], warn: Callable[[str], object]
) -> int:
    baseline = options.of(term.site).baseline
    if isinstance(baseline, RELAX):
        raise SlotError(
            f"{type(baseline).__name__} relaxes guide site '{term.key.name}', whose slots here "
            f"are particles: use IndependentDraw, LeaveOneOut, SummedMean or NVIL, or, for "
            f"programs that run with several of its values at once, TraceRaoBlackwell_ELBO"
        )
    slots = choose(term.site, options, warn, joined)
    if slots is None:
        return 1
    why = "its slots are rows, each with its full weight, which includes log q"
    slots.warn_entropy(term.key.name, why, warn)
    return len(slots)


def _warn_global(term: Term, warn: Callable[[str], object]) -> None:
    if not is_discrete(term.site):
        return
    site_options, name = options_of(term.site), term.key.name
    if site_options.keys() & SLOT_OPTIONS:
        raise SlotError(
            f"guide site '{name}' is shared by all data, so it is drawn once a step, and "
            f"infer['mcvae'] = {site_options} has no effect. Remove it, or pass joint=True and the "
            f"full data, or sum the site with TraceRaoBlackwell_ELBO, which needs programs that "
            f"run with several of its values at once"
        )
    warn(
        f"guide site '{name}' is shared by all data, so it has no slots: it is drawn once a step, "
        f"with the score function as its gradient. TraceRaoBlackwell_ELBO sums it if the programs "
        f"run with several of its values at once"
    )


def _common(
    programs: Programs,
    sample: WeightedParticles,
    sites: Mapping[str, SlotSite],
    continuous: Mapping[str, SlotSite],
) -> frozenset[str]:
    """Return the discrete sites, and the sites they depend on."""
    order = [t.key.name for t in sample.runs[0].terms if t.key.name in {*sites, *continuous}]
    last = max(order.index(n) for n in sites)
    before = frozenset(order[:last])
    if not before & continuous.keys():
        return frozenset(sites)
    names = frozenset(order)
    traced = dependencies_of(programs, names, sample.runs[0])
    ancestors = traced.ancestors(names)
    return frozenset(sites).union(*(ancestors[n] for n in sites)) & (before | sites.keys())


# The draws of one step, whose leading rows are slots of discrete sites times particles.

# The index of one row, or of several.
Row = TypeVar("Row", int, Tensor)


class SlotsChangedError(SiteError):
    """
    A site's slots differ from the plan.

    :ivar plan: the new plan; None to restart without one.
    """

    def __init__(self, name: str, plan: SlotPlan | None) -> None:
        super().__init__(f"guide site '{name}' has changed between two runs")
        self.plan = plan


class SlotDraws(Beginning):
    r"""
    Values for the guide's random sites in each row of a step.

    Row :math:`s P + p` is slot s of particle p. Its discrete values are those of the slot. The
    slots of a discrete site share the draws before it: each row uses the draw of the first row that
    shares it. So the weights of a site's slots sum to one.

    :param SlotPlan plan: the plan of a structure.
    :param options: the default options of all sites.
    :param num_particles: P.
    :param warn: called with messages about sites without slots.
    """

    def __init__(
        self,
        plan: SlotPlan,
        options: SiteOptions,
        num_particles: int,
        warn: Callable[[str], object],
    ) -> None:
        self.plan, self.num_particles = plan, num_particles
        self.count: int = plan.num_slots * num_particles
        self.fixed_sites = frozenset(plan.sites)
        self._options, self._warn = options, warn
        self._chosen: dict[tuple[str, int], SiteSlots] = {}
        # Of each discrete site, by the first row of a run: one entry if all rows run together, and
        # one entry for each row, without the first batch dim, if they run separately.
        self._slots: dict[str, dict[int, SiteSlots]] = {name: {} for name in plan.sites}
        self._drawn: dict[tuple[str, int], Tensor] = {}

    def begin(self, msg: Message, rows: range, coordinate: Coordinate) -> Tensor:
        """Return the value of a discrete site, or a draw of another site, shared between rows."""
        value = self.draw(msg, rows)
        return self.shared(msg, coordinate.draw(), rows) if value is None else value

    def draw(self, msg: Message, rows: range) -> Tensor | None:
        """
        Return the value of a discrete site; None for another site.

        :param rows: all rows, in the first batch dim, or one row, without this dim.
        :raises SlotsChangedError: if the site has more slots than planned.
        """
        name = msg["name"]
        site = self.plan.sites.get(name)
        if site is None:
            return None
        slots = self._choose(msg, site, rows)
        device = slots.choice.value.device
        row = rows.start if len(rows) == 1 else torch.arange(self.count, device=device)
        digit = row // self.num_particles // self.plan.stride(name) % self.plan.counts[name]
        at = (digit, self._first(name, row)) if isinstance(row, Tensor) else (digit,)
        if rows.start == 0:
            self._slots[name].clear()
        row_slots = self._slots[name][rows.start] = slots.at(at)
        return row_slots.choice.value

    def make_sample_fn(self, rows: range, shared: frozenset[str]) -> SampleFn:
        """
        Return a sample function with the values of discrete sites, and shared draws of others.

        It raises a :class:`SlotError` for a shared site without reparameterization.
        """

        def give(msg: Message) -> Tensor | None:
            value = self.draw(msg, rows)
            name = msg["name"]
            if value is not None or name not in self.plan.continuous or self._is_independent(name):
                return value
            if not reparameterized(msg):
                raise SlotError(
                    f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) is drawn before a "
                    f"discrete site with slots, and not reparameterized: draw it afterwards, or "
                    f"use a distribution with rsample"
                )
            return self.shared(msg, msg["fn"](), rows)

        return give

    def shared(self, msg: Message, at: Tensor, rows: range) -> Tensor:
        """Return a draw of another site, or that of the first row that shares it."""
        name, row = msg["name"], rows.start
        if name not in self.plan.continuous:
            return at
        if len(rows) > 1:
            self._check_rows(msg)
            first = self._first(name, torch.arange(self.count, device=at.device))
            return at if self._is_independent(name) else changed_draw(lambda v: v[first], at)
        self._drawn[name, row] = at
        first_row = self._first(name, row)
        return at if first_row == row else changed_draw(Tensor.clone, self._drawn[name, first_row])

    def fixed_coordinate(self, msg: Message, rows: range) -> Tensor | None:
        """
        Return the stored value of a discrete site; None for another site.

        A further run may have its rows together where the first had them separately, or vice versa.
        """
        slots = self._slots.get(msg["name"])
        if slots is None:
            return None
        values, together = [m.choice.value for m in slots.values()], len(rows) > 1
        if len(values) == self.count:  # separately
            value = torch.stack(values) if together else values[rows.start]
        else:
            value = values[0] if together else values[0][rows.start]
        return as_shape(value, msg["fn"].shape())

    def slots_of(self, name: str) -> dict[int, SiteSlots]:
        """Return the slots of a discrete site, by the first row of each run."""
        return self._slots[name]

    def _choose(self, msg: Message, site: SlotSite, rows: range) -> SiteSlots:
        """Choose the slots; each row uses those of the first row that shares them."""
        name = msg["name"]
        if len(rows) > 1:
            self._check_rows(msg)
            return self._new(msg, site)
        first = self._first(name, rows.start)
        if first == rows.start:
            self._chosen[name, first] = self._new(msg, site)
        return self._chosen[name, first]

    def _check_rows(self, msg: Message) -> None:
        """Check that a planned site has a dim for rows; with other minibatches it may not."""
        if msg["fn"].batch_shape[:1] != (self.count,):
            raise SlotsChangedError(msg["name"], None)

    def _new(self, msg: Message, site: SlotSite) -> SiteSlots:
        slots = choose(msg, self._options, self._warn, site.joined)
        slots = single(msg, self._options) if slots is None else slots
        count = self.plan.counts[msg["name"]]
        if len(slots) > count:
            counts = {**self.plan.counts, msg["name"]: len(slots)}
            raise SlotsChangedError(msg["name"], replace(self.plan, counts=counts))
        # A support may depend on earlier sites, and have fewer values.
        return slots.spread(msg["fn"], site.joined).possible().padded(count)

    def _first(self, name: str, row: Row) -> Row:
        """Return the first row that shares the draws of a site and of the sites before."""
        slot, particle = row // self.num_particles, row % self.num_particles
        if name in self.plan.common:
            particle = particle * 0
        return slot % self.plan.stride(name) * self.num_particles + particle

    def _is_independent(self, name: str) -> bool:
        """Return whether each row has a separate draw."""
        separate = self.num_particles == 1 or name not in self.plan.common
        return separate and self.plan.stride(name) == self.plan.num_slots


# Determine the slots of the programs of a step, and cache them.

_logger = logging.getLogger(__name__)

# The cache keys of the slot plan, and of whether it changes between steps, for example if data
# determine the names of sites.
_PLAN, _CHANGING = ("slot plan",), ("slots change",)

# The number of attempts of a step whose discrete sites differ from the assumed ones.
_MAX_ATTEMPTS = 4
_UNSTABLE = (
    f"the guide has different discrete sites in each of {_MAX_ATTEMPTS} runs, so their values "
    f"cannot be slots: draw them always, and mask them if they are not used, or use "
    f"TraceIWAE_ELBO, which weighs whole draws"
)

T = TypeVar("T")

# Makes the initial object of a step, with or without slots, and a sample of its sites.
Make = Callable[["SlotDraws | None"], tuple[T, WeightedParticles]]


class SlotPlanner:
    """
    The slots of one objective's programs, determined from a step without slots.

    :param options: the default options of all sites.
    :param common: whether particles share the discrete draws, and the draws these depend on.
    """

    def __init__(self, options: SiteOptions, common: bool) -> None:
        self.options, self.common = options, common
        self._warn = WarnOnce(_logger)

    def sample(
        self, sampler: ParticleSampler, programs: Programs
    ) -> tuple[WeightedParticles, SlotDraws | None]:
        """
        Return a sample whose rows are slots times particles.

        :raises SlotError: as in :meth:`begin`, and for other sites without reparameterization.
        """

        def make(draws: SlotDraws | None) -> tuple[WeightedParticles, WeightedParticles]:
            if draws is None:
                sample = sampler.sample(programs)
            else:
                sample = sampler.sample(programs, draws.make_sample_fn, count=draws.count)
            return sample, sample

        sample, draws = self.begin(sampler, programs, make)
        if draws is not None:
            _check_scores(sample, draws)
        return sample, draws

    def begin(
        self, sampler: ParticleSampler, programs: Programs, make: Make[T]
    ) -> tuple[T, SlotDraws | None]:
        """
        Begin a step, again if its discrete sites differ from the assumed ones.

        :returns: the result of ``make``, and its draws; None without discrete local sites.
        :raises SlotError: naming a site that cannot have the requested slots.
        """
        analysis = sampler.analyses.of(programs)
        may_repeat = analysis.get(_PLAN, False) is False or bool(analysis.get(_CHANGING))
        # A fresh analysis begins with the rows of the last one, whose operations it compares.
        plan = analysis.latest(_PLAN)
        with sampler.analyses.rewindable(programs, may_repeat) as rewind:
            for _ in range(_MAX_ATTEMPTS):
                draws = plan and SlotDraws(plan, self.options, sampler.num_particles, self._warn)
                try:
                    result, sample = make(draws)
                    analysis = sampler.analyses.of(programs)  # the runs may have begun another
                    if draws is not None and len(sample.runs) > 1:
                        _check_same_sites(sample)
                    key = "slot plan of", sample.runs[0].signature
                    new_plan = analysis.cached(key, partial(self._plan, programs, sample))
                    if new_plan.fits(plan) if new_plan else plan is None:
                        analysis.put(_PLAN, plan)
                        return result, draws
                except SlotsChangedError as changed:
                    new_plan = changed.plan
                analysis.put(_PLAN, plan := new_plan)
                if not rewind():  # The next runs would have other minibatches, with other sites.
                    analysis.put(_CHANGING, True)
                    return self.begin(sampler, programs, make)
        raise SlotError(_UNSTABLE)

    def _plan(self, programs: Programs, sample: WeightedParticles) -> SlotPlan | None:
        with programs.isolated():  # counting the slots also draws
            return make_plan(programs, sample, self.options, self.common, self._warn)


def _check_same_sites(sample: WeightedParticles) -> None:
    """
    Check that all rows that were run separately have the same discrete sites.

    :raises SlotError: naming a site that only some rows have.
    """
    nodes = [run.guide_trace.nodes for run in sample.runs]
    names = [{n for n, s in sites.items() if is_scored(s) and is_discrete(s)} for sites in nodes]
    for name in sorted(set().union(*names) - set.intersection(*names)):
        raise SlotError(
            f"guide site '{name}' is drawn for some values of other discrete sites and not for "
            f"others, so its values cannot be slots: draw it always, and mask it if it is not "
            f"used, or use TraceSGVB_ELBO or TraceIWAE_ELBO, which draw whole executions"
        )


def _check_scores(sample: WeightedParticles, draws: SlotDraws) -> None:
    """Check that the sites without slots are reparameterized."""
    for term in sample.runs[0].terms:
        unreparameterized = (
            isinstance(term.score, Tensor) and term.key.name not in draws.fixed_sites
        )
        if unreparameterized and sample.is_local(term):
            raise SlotError(
                f"guide site '{term.key.name}' ({type(term.site['fn']).__name__}) is not "
                f"reparameterized, but other discrete sites are summed: use a distribution with "
                f"rsample, or leave out num_categories, num_samples and budget"
            )
