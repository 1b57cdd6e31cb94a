"""Slots in rows: combinations of values as particles, for models without room for more dims."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
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
from pyro_mcvae.programs.isolation import isolated, rewindable
from pyro_mcvae.programs.messengers import SampleFn
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.sites import changed_draw, is_random, is_scored, reparameterized
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import LEADING, SLOT_OPTIONS, Message, SiteError, options_of
from pyro_mcvae.structure.dependencies import find_dependencies

# Which discrete sites of a guide have slots in the rows of a step, and how the rows count them.


@dataclass(frozen=True)
class SlotSite:
    """
    The place of a local random site of the guide among the slots.

    :ivar block: the index of its block.
    :ivar before: the discrete sites of the block that the guide draws before it.
    :ivar joined: the batch dims of plates inside the block, whose elements are one variable.
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
    """The dims inside the block: of plates, and those that lie in no plate."""
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


# The draws of one step whose leading rows are slots of discrete sites times particles.

# The number of one row, or of several.
Row = TypeVar("Row", int, Tensor)


class SlotsChangedError(SiteError):
    """
    A site has other slots than planned.

    :ivar plan: another plan; None to begin without one.
    """

    def __init__(self, name: str, plan: SlotPlan | None) -> None:
        super().__init__(f"guide site '{name}' has changed between two runs")
        self.plan = plan


class SlotDraws(Beginning):
    r"""
    Values for the guide's random sites in each row of a step.

    Row :math:`s P + p` is slot s of particle p. Its discrete values are those of the slot. What is
    drawn before a discrete site is common to its slots: each row takes the draw of the first row
    that it has that in common with. So the weights of a site's slots sum to one.

    :param SlotPlan plan: of a structure.
    :param options: for all sites that do not say otherwise.
    :param num_particles: P.
    :param tell: called with messages about sites that get no slots.
    """

    def __init__(
        self,
        plan: SlotPlan,
        options: SiteOptions,
        num_particles: int,
        tell: Callable[[str], object],
    ) -> None:
        self.plan, self.num_particles = plan, num_particles
        self.count: int = plan.num_slots * num_particles
        self.held = frozenset(plan.sites)
        self._options, self._tell = options, tell
        self._chosen: dict[tuple[str, int], SiteSlots] = {}
        self._made: dict[str, dict[int, SiteSlots]] = {name: {} for name in plan.sites}
        self._drawn: dict[tuple[str, int], Tensor] = {}

    def begin(self, msg: Message, rows: range, coordinate: Coordinate) -> Tensor:
        """The value of a discrete site; a draw of another one, with what rows have in common."""
        value = self.draw(msg, rows)
        return self.shared(msg, coordinate.draw(), rows) if value is None else value

    def draw(self, msg: Message, rows: range) -> Tensor | None:
        """
        The value of a discrete site; None for another one.

        :param rows: all of them, in the first batch dim, or one, without that.
        :raises SlotsChangedError: if the site has more slots than planned.
        """
        name = msg["name"]
        site = self.plan.sites.get(name)
        if site is None:
            return None
        slots = self._choose(msg, site, rows)
        row = self._rows(rows, slots.choice.value.device)
        digit = row // self.num_particles // self.plan.stride(name) % self.plan.counts[name]
        at = (digit, self._first(name, row)) if isinstance(row, Tensor) else (digit,)
        if rows.start == 0:
            self._made[name].clear()
        made = self._made[name][rows.start] = slots.at(at)
        return made.choice.value

    def make_sample_fn(self, rows: range, shared: frozenset[str]) -> SampleFn:
        """
        Gives discrete sites their values, and others what rows have in common, in one run.

        Its function raises a :class:`SlotError` for a site without reparameterization that rows
        have in common.
        """

        def give(msg: Message) -> Tensor | None:
            value = self.draw(msg, rows)
            if value is not None or not self.is_shared(msg["name"]):
                return value
            if not reparameterized(msg):
                raise SlotError(
                    f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) is drawn before a "
                    f"discrete site with slots, and not reparameterized: draw it behind, or use "
                    f"a distribution with rsample"
                )
            return self.shared(msg, msg["fn"](), rows)

        return give

    def shared(self, msg: Message, at: Tensor, rows: range) -> Tensor:
        """A draw of another site, or that of the first row that it is common with."""
        name, row = msg["name"], rows.start
        if name not in self.plan.others:
            return at
        if len(rows) > 1:
            self._check_rows(msg)
            first = self._first(name, torch.arange(self.count, device=at.device))
            return at if self._is_own(name) else changed_draw(lambda v: v[first], at)
        self._drawn[name, row] = at
        first_row = self._first(name, row)
        return at if first_row == row else changed_draw(Tensor.clone, self._drawn[name, first_row])

    def is_shared(self, name: str) -> bool:
        """Whether rows have the draws of a continuous site in common."""
        return name in self.plan.others and not self._is_own(name)

    def again(self, msg: Message, rows: range) -> Tensor | None:
        """The value that a discrete site has; None for another one."""
        made = self._made.get(msg["name"])
        if made is None:
            return None
        if rows.start in made and (len(rows) > 1) == (len(made) == 1):
            return made[rows.start].choice.value
        if self.count == 1:
            return made[0].choice.value
        one_by_one = [m.choice.value for m in made.values()]
        value = one_by_one[0][rows.start] if len(rows) == 1 else torch.stack(one_by_one)
        return as_shape(value, msg["fn"].shape())

    def made(self, name: str) -> dict[int, SiteSlots]:
        """What a discrete site has, by the first row of each run."""
        return self._made[name]

    def _choose(self, msg: Message, site: SlotSite, rows: range) -> SiteSlots:
        """A choice of the slots, of which each row takes that of the first in common."""
        name = msg["name"]
        if len(rows) > 1:
            self._check_rows(msg)
            return self._new(msg, site)
        first = self._first(name, rows.start)
        if first == rows.start:
            self._chosen[name, first] = self._new(msg, site)
        return self._chosen[name, first]

    def _check_rows(self, msg: Message) -> None:
        """A site of the plan that all rows share now, as around other minibatches, has none."""
        if msg["fn"].batch_shape[:1] != (self.count,):
            raise SlotsChangedError(msg["name"], None)

    def _new(self, msg: Message, site: SlotSite) -> SiteSlots:
        slots = choose(msg, self._options, self._tell, site.joined)
        slots = single(msg, self._options) if slots is None else slots
        count = self.plan.counts[msg["name"]]
        if len(slots) > count:
            counts = {**self.plan.counts, msg["name"]: len(slots)}
            raise SlotsChangedError(msg["name"], replace(self.plan, counts=counts))
        # A support may depend on the sites before, and have fewer values.
        return slots.spread(msg["fn"], site.joined).possible().padded(count)

    def _rows(self, rows: range, device: torch.device) -> Tensor | int:
        """The numbers of all rows, or that of one."""
        return rows.start if len(rows) == 1 else torch.arange(self.count, device=device)

    def _first(self, name: str, row: Row) -> Row:
        """The first row that has the draws before a site, and the site's, in common."""
        slot, particle = row // self.num_particles, row % self.num_particles
        if name in self.plan.common:
            particle = particle * 0
        return slot % self.plan.stride(name) * self.num_particles + particle

    def _is_own(self, name: str) -> bool:
        """Whether each row has a draw of its own."""
        alone = self.num_particles == 1 or name not in self.plan.common
        return alone and self.plan.stride(name) == self.plan.num_slots


# Finds out which slots the programs of a step have, and keeps it.

_logger = logging.getLogger(__name__)

# The slots of the programs, and whether these change from one step to the next, as where data name
# the sites.
_PLAN, _CHANGING = ("slot plan",), ("slots change",)

# How often a step is begun again when its discrete sites turn out to be others than assumed.
_MAX_ATTEMPTS = 4
_UNSTEADY = (
    f"the guide shows other discrete sites in each of {_MAX_ATTEMPTS} runs, so that their values "
    f"make no slots: draw them always, and mask them where they do not count, or weigh whole draws "
    f"with TraceIWAE_ELBO"
)

T = TypeVar("T")

# Makes what a step begins with, at given slots or without, and a sample that shows its sites.
Make = Callable[["SlotDraws | None"], tuple[T, WeightedParticles]]


class SlotPlanner:
    """
    The slots of one objective's programs, found out from a step without slots.

    :param options: for all sites that do not say otherwise.
    :param common: whether particles share the discrete draws, and what these depend on.
    """

    def __init__(self, options: SiteOptions, common: bool) -> None:
        self.options, self.common = options, common
        self._tell = WarnOnce(_logger)

    def sample(
        self, sampler: ParticleSampler, programs: Programs
    ) -> tuple[WeightedParticles, SlotDraws | None]:
        """
        A sample whose rows are slots times particles.

        :raises SlotError: as :meth:`begin`, and for other sites without reparameterization.
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
        Begin a step; again, where its discrete sites are others than assumed.

        :returns: that, and its draws; None for programs without discrete local sites.
        :raises SlotError: naming a site that cannot have the slots that are asked for.
        """
        analysis = sampler.analyses.of(programs)
        known, plan = analysis.get(_PLAN, False) is not False, analysis.get(_PLAN)
        with rewindable(not known or analysis.get(_CHANGING)) as rewind:
            for _ in range(_MAX_ATTEMPTS):
                draws = plan and SlotDraws(plan, self.options, sampler.num_particles, self._tell)
                try:
                    found, sample = make(draws)
                    if draws is not None and len(sample.runs) > 1:
                        _check_rows(sample)
                    shown = self._plan_of(programs, sample)
                    if shown.fits(plan) if shown else plan is None:
                        analysis.put(_PLAN, plan)
                        return found, draws
                except SlotsChangedError as changed:
                    shown = changed.plan
                analysis.put(_PLAN, plan := shown)
                if not rewind():  # The next runs would have other minibatches, with other sites.
                    analysis.put(_CHANGING, True)
                    return self.begin(sampler, programs, make)
        raise SlotError(_UNSTEADY)

    def _plan_of(self, programs: Programs, sample: WeightedParticles) -> SlotPlan | None:
        """The plan of a structure, which is made once."""
        notes: dict[Hashable, SlotPlan | None] = sample.structure.notes
        if make_plan not in notes:
            with isolated(programs.owners):  # slots are chosen to be counted, and draws with them
                made = make_plan(programs, sample, self.options, self.common, self._tell)
            notes[make_plan] = made
        return notes[make_plan]


def _check_rows(sample: WeightedParticles) -> None:
    """
    Check that all rows that were run by themselves have the same discrete sites.

    :raises SlotError: naming a site that comes and goes with the values of others.
    """
    nodes = [run.guide_trace.nodes for run in sample.runs]
    names = [{n for n, s in found.items() if is_scored(s) and is_discrete(s)} for found in nodes]
    for name in sorted(set().union(*names) - set.intersection(*names)):
        raise SlotError(
            f"guide site '{name}' is drawn for some values of other discrete sites and not for "
            f"others, so that its values make no slots: draw it always, and mask it where it does "
            f"not count, or use TraceSGVB_ELBO or TraceIWAE_ELBO, which draw whole executions"
        )


def _check_scores(sample: WeightedParticles, draws: SlotDraws) -> None:
    """Refuse other sites without reparameterization beside slots."""
    for term in sample.runs[0].terms:
        rough = isinstance(term.score, Tensor) and term.key.name not in draws.held
        if rough and sample.is_local(term):
            raise SlotError(
                f"guide site '{term.key.name}' ({type(term.site['fn']).__name__}) is not "
                f"reparameterized, beside discrete sites that are summed: use a distribution with "
                f"rsample, or leave out num_categories, num_samples and budget"
            )
