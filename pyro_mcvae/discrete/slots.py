"""Slots for the discrete sites of a guide: several values of a site in one run of the programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from pyro import distributions as dist
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.enum_messenger import EnumMessenger
from torch import Tensor

from pyro_mcvae.discrete.site_options import SiteOptions
from pyro_mcvae.discrete.slot_choice import check_num_slots, choose
from pyro_mcvae.programs.types import Constraint, Distribution, Message

# Where a guide site's slots are kept: site["infer"][SLOTS_KEY].
SLOTS_KEY = "_mcvae_slots"


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

    def _pyro_sample(self, msg: Message) -> None:
        fn = msg["fn"]
        if msg["done"] or msg["is_observed"] or not isinstance(fn, TorchDistributionMixin):
            super()._pyro_sample(msg)
            return
        slots = choose(msg, self.options, self.tell)
        # A copy: users share these dicts between runs and sites.
        infer = {k: v for k, v in msg["infer"].items() if k not in ("enumerate", "num_samples")}
        msg["infer"] = infer
        if slots is None:
            super()._pyro_sample(msg)
            return
        infer[SLOTS_KEY] = slots.spread(fn)
        if len(slots) == 1:
            # One slot takes no dim of its own: the site is a plain draw.
            msg["value"] = infer[SLOTS_KEY].choice.value[0]
            super()._pyro_sample(msg)
            return
        self._check_nested(msg, len(slots))
        infer["enumerate"] = "parallel"
        # As the program asks, for operators such as cat that do not broadcast.
        expand = self.expand or infer.get("expand")
        msg["fn"] = _StandIn(fn, (infer[SLOTS_KEY] if expand else slots).choice.value)
        super()._pyro_sample(msg)
        msg["fn"] = fn
        del infer["enumerate"]

    def _check_nested(self, msg: Message, count: int) -> None:
        assert self.first_available_dim is not None
        batch = msg["fn"].batch_shape
        upstream = math.prod(batch[: max(0, len(batch) + 1 + self.first_available_dim)])
        if upstream > 1:
            check_num_slots(msg["name"], upstream * count)
