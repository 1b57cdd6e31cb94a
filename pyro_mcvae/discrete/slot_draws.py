"""The draws of one step whose leading rows are slots of discrete sites times particles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from pyro_mcvae.coordinates.beginning import Beginning
from pyro_mcvae.coordinates.coordinate import Coordinate
from pyro_mcvae.discrete.site_options import SiteOptions, SlotError
from pyro_mcvae.discrete.slot_choice import SiteSlots, choose, single
from pyro_mcvae.discrete.slot_plan import SlotPlan, SlotSite
from pyro_mcvae.ops.shapes import as_shape
from pyro_mcvae.programs.errors import SiteError
from pyro_mcvae.programs.messengers import SampleFn
from pyro_mcvae.programs.sites import changed_draw, reparameterized
from pyro_mcvae.programs.types import Message

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
