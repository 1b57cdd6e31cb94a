"""Slots for the discrete sites of a guide: several values of a site in one run of the programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from pyro import distributions as dist
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.enum_messenger import EnumMessenger
from torch import Tensor

from pyro_mcvae.discrete.site_options import SiteOptions, SlotError
from pyro_mcvae.discrete.slot_choice import choose
from pyro_mcvae.programs.support import Support
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


class SlotMessenger(EnumMessenger):
    """
    Gives the guide's discrete sites their slots, each site in a batch dim of its own.

    Pyro's enumeration keeps track of the dims, also through ``pyro.markov``; what stands in them
    are not a distribution's values but the slots chosen for each batch element.

    :param options: for all sites that do not say otherwise.
    :param int first_available_dim: the first batch dim that belongs to no plate.
    :param tell: called with a message for sites that are sampled though slots were asked for.
    :param bool expand: values have the sizes of the plates also where all elements have the same.
    """

    def __init__(
        self,
        options: SiteOptions,
        first_available_dim: int,
        tell: Callable[[str], object],
        expand: bool = False,
    ) -> None:
        super().__init__(first_available_dim)
        self.expand = expand
        self.options = options
        self.tell = tell
        self.slotted = 0

    def _pyro_sample(self, msg: Message) -> None:
        fn = msg["fn"]
        if msg["done"] or msg["is_observed"] or not isinstance(fn, TorchDistributionMixin):
            super()._pyro_sample(msg)
            return
        choice = choose(msg, self.options, self.tell)
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
        if self.expand or infer.get("expand"):
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
