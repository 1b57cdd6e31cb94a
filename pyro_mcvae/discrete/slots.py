"""Slots for the discrete sites of a guide: several values of a site in one run of the programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.enum_messenger import EnumMessenger
from torch import Tensor

from pyro_mcvae.discrete.site_options import SITE_OPTIONS, SiteOptions, SlotError
from pyro_mcvae.programs.precision import site_in_full_precision
from pyro_mcvae.programs.relaxed import relaxed_sample
from pyro_mcvae.programs.sites import RELAXED, is_random, known_support, reparameterized
from pyro_mcvae.programs.support import Choice, Support
from pyro_mcvae.programs.supports import support_of
from pyro_mcvae.programs.types import Constraint, Distribution, Message

__all__ = ["SLOTS", "SiteSlots", "SlotMessenger"]

# Where a guide site's slots are kept: site["infer"][SLOTS].
SLOTS = "_mcvae_slots"
# Torch's limit is 64; views in between take a few.
_MAX_DIMS = 60
# How many slots of a datum the slots of earlier sites may lead to.
_MAX_NESTED = 10_000


@dataclass(frozen=True)
class SiteSlots:
    """
    The slots of one site, its slot dimension first.

    :ivar dim: the batch dim of the slots in the site's value; None where there is one slot.
    :ivar weight: shape ``[S, *batch]``, zero for slots that serve a baseline alone; None for one
        slot.
    :ivar sampled: where the slot is a draw, of the same shape; None for one slot.
    :ivar extra: whether the last slot is an independent draw.
    :ivar exact: whether the slots are all values.
    """

    options: SiteOptions
    support: Support | None
    dim: int | None
    weight: Tensor | None = None
    sampled: Tensor | None = None
    extra: bool = False
    exact: bool = False


class _StandIn(dist.TorchDistribution):
    """Hands slots to Pyro's enumeration in place of a distribution's support."""

    arg_constraints: ClassVar[dict[str, Constraint]] = {}

    def __init__(self, fn: Distribution, value: Tensor) -> None:
        super().__init__(fn.batch_shape, fn.event_shape, validate_args=False)
        self.value = value

    def enumerate_support(self, expand: bool = False) -> Tensor:
        return self.value


class _Chosen(NamedTuple):
    options: SiteOptions
    support: Support | None
    slots: Choice
    extra: bool = False
    exact: bool = False


class SlotMessenger(EnumMessenger):
    """
    Gives the guide's discrete sites their slots, each site in a batch dim of its own.

    Pyro's enumeration keeps track of the dims, also through ``pyro.markov``; what stands in them
    are not a distribution's values but the slots chosen for each batch element.

    :param options: for all sites that do not say otherwise.
    :param int first_available_dim: the first batch dim that belongs to no plate.
    :param tell: called with a message for sites that are sampled though slots were asked for.
    """

    def __init__(
        self, options: SiteOptions, first_available_dim: int, tell: Callable[[str], object]
    ) -> None:
        super().__init__(first_available_dim)
        self.options = options
        self.tell = tell
        self.slotted = 0

    def _pyro_sample(self, msg: Message) -> None:
        fn = msg["fn"]
        if msg["done"] or msg["is_observed"] or not isinstance(fn, TorchDistributionMixin):
            super()._pyro_sample(msg)
            return
        choice = self._choose(msg)
        # A copy: users share these dicts between runs and sites.
        infer = {k: v for k, v in msg["infer"].items() if k not in ("enumerate", "num_samples")}
        msg["infer"] = infer
        if choice is None:
            super()._pyro_sample(msg)
            return
        options, support, slots, extra, exact = choice
        if slots.value.shape[0] == 1:
            # One slot takes no dim of its own: the site is a plain draw.
            msg["value"] = slots.value[0].expand(fn.batch_shape + fn.event_shape)
            super()._pyro_sample(msg)
            infer[SLOTS] = SiteSlots(options, support, None)
            return
        self._check_nested(msg, slots.value.shape[0])
        infer["enumerate"] = "parallel"
        value = slots.value
        if infer.get("expand"):
            # As the program asks, for operators such as cat that do not broadcast.
            value = value.expand(value.shape[:1] + fn.batch_shape + fn.event_shape)
        msg["fn"] = _StandIn(fn, value)
        super()._pyro_sample(msg)
        msg["fn"] = fn
        del infer["enumerate"]
        dim = infer["_enumerate_dim"]
        self.slotted += 1
        if -dim + fn.event_dim > _MAX_DIMS:
            raise SlotError(
                f"guide site '{msg['name']}' is the {self.slotted}th with slots, and each takes a "
                f"dimension: enclose sequences in pyro.markov, use a vectorised plate, or sample "
                f"sites plainly by infer={{'mcvae': {{'num_categories': 0, 'num_samples': 1}}}}"
            )
        infer[SLOTS] = SiteSlots(
            options,
            support,
            dim,
            slots.weight.expand(slots.weight.shape[:1] + fn.batch_shape),
            slots.sampled.expand(slots.weight.shape[:1] + fn.batch_shape),
            extra,
            exact,
        )

    def _check_nested(self, msg: Message, count: int) -> None:
        assert self.first_available_dim is not None
        batch = msg["fn"].batch_shape
        upstream = math.prod(batch[: max(0, len(batch) + 1 + self.first_available_dim)])
        if upstream > 1 and upstream * count > _MAX_NESTED:
            raise SlotError(
                f"guide site '{msg['name']}' would take {upstream * count} slots of each datum, "
                f"because every slot of the sites that it depends on has {count} slots of its own. "
                f"In long sequences sum the sites exactly under pyro.markov (num_categories="
                f"math.inf: the values are the same for all slots before), or sample them plainly "
                f"by infer={{'mcvae': {{'num_categories': 0, 'num_samples': 1}}}}"
            )

    def _choose(self, msg: Message) -> _Chosen | None:
        asked = bool(msg["infer"].get("mcvae", {}).keys() & SITE_OPTIONS)
        kind = msg["infer"].get("enumerate")
        if kind == "sequential" or (kind == "parallel" and "num_samples" in msg["infer"]):
            raise SlotError(
                f"guide site '{msg['name']}' is marked for enumeration ({kind}, num_samples="
                f"{msg['infer'].get('num_samples')}), of which this objective does the exact sum "
                f"in parallel: mark it infer={{'mcvae': {{'num_categories': math.inf}}}} for "
                f"that, or infer={{'mcvae': {{'num_samples': n}}}} for draws"
            )
        if not is_random(msg):
            return None
        site_in_full_precision(msg)
        if reparameterized(msg) or not known_support(msg["fn"]).is_discrete:
            if asked:
                raise SlotError(
                    f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) is continuous, so "
                    f"it has no categories to sum: remove infer['mcvae'] = {msg['infer']['mcvae']}"
                )
            return None
        options = self.options.of(msg)
        if getattr(options.baseline, "relaxed", False):
            return self._relaxed(msg, options)
        if options.plain:
            return self._single(msg, options)
        support = support_of(msg["fn"])
        if support is None:
            message = (
                f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) has a support that "
                f"cannot be listed"
            )
            if asked:
                raise SlotError(
                    f"{message}: pass infer={{'mcvae': {{'num_categories': 0, 'num_samples': 1}}}}"
                )
            self.tell(f"{message}, so it is sampled, with the score function as its gradient")
            return None
        return self._slots(msg, options, support)

    @staticmethod
    def _relaxed(msg: Message, options: SiteOptions) -> _Chosen:
        value = relaxed_sample(msg["fn"], options.baseline.temperature, options.baseline.hard)
        if value is None:
            raise SlotError(
                f"{type(options.baseline).__name__} relaxes OneHotCategorical and Bernoulli sites, "
                f"but guide site '{msg['name']}' is a {type(msg['fn']).__name__}: use "
                f"OneHotCategorical in both programs, or another baseline"
            )
        msg["infer"] = {**msg["infer"], RELAXED: True}
        nothing = value.new_empty(0)
        return _Chosen(options, support_of(msg["fn"]), Choice(value.unsqueeze(0), nothing, nothing))

    @staticmethod
    def _single(msg: Message, options: SiteOptions) -> _Chosen:
        with torch.no_grad():
            value = msg["fn"].sample().unsqueeze(0)
        nothing = value.new_empty(0)
        return _Chosen(options, support_of(msg["fn"]), Choice(value, nothing, nothing))

    @staticmethod
    def _slots(msg: Message, options: SiteOptions, support: Support) -> _Chosen:
        with torch.no_grad():
            if options.budget is not None and options.budget < support.size:
                choice = support.budget(options.budget, options.min_samples)
            elif options.budget is not None or options.num_categories >= support.size:
                if support.size == math.inf:
                    raise SlotError(
                        f"guide site '{msg['name']}' ({type(msg['fn']).__name__}) has too "
                        f"many values to list, got num_categories={options.num_categories}: "
                        f"pass a finite one and num_samples >= 1"
                    )
                return _Chosen(options, support, support.all_values(), exact=True)
            else:
                if options.num_samples == 0:
                    raise SlotError(
                        f"guide site '{msg['name']}' has {support.size} values, of which "
                        f"num_categories={options.num_categories} are summed, and num_samples=0 "
                        f"leaves the others out: pass num_samples >= 1, or num_categories=math.inf"
                    )
                choice = support.top_k(int(options.num_categories), options.num_samples)
            if not options.extra_draw:
                return _Chosen(options, support, choice)
            none = torch.zeros_like(choice.weight[:1])
            wider = Choice(
                torch.cat([choice.value, support.draw().to(choice.value)]),
                torch.cat([choice.weight, none]),
                torch.cat([choice.sampled, none.bool()]),
            )
            return _Chosen(options, support, wider, extra=True)
