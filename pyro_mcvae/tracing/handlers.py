"""Pyro messengers: the plate of the particles, and values supplied to a run of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro.poutine.broadcast_messenger import BroadcastMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame, IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_mcvae.tracing.sites import (
    LEADING,
    is_masked,
    is_random,
    is_straight_through,
    reparameterized,
)

__all__ = ["LeadingPlate", "ScoreFunctionSites", "Supply"]


class LeadingPlate(IndepMessenger):
    """
    The outermost plate that adds the leading dimension to every site but those of ``skip``.

    Unlike :class:`pyro.plate` it leaves global sites alone: they are drawn once for all particles.

    :ivar unbatched: the sites whose distribution had no leading dimension of its own.
    """

    def __init__(self, size: int, dim: int, skip: frozenset[str] = frozenset()) -> None:
        super().__init__(LEADING, size, dim)
        self.depth = dim
        self.skip = skip
        self.unbatched: set[str] = set()

    def _process_message(self, msg: Any) -> None:
        if msg["type"] != "sample" or site_is_subsample(msg) or msg["name"] in self.skip:
            return
        if self.dim is not None and len(getattr(msg["fn"], "batch_shape", ())) < -self.dim:
            self.unbatched.add(msg["name"])
        frame = CondIndepStackFrame(self.name, self.dim, self.size, self.counter)
        msg["cond_indep_stack"] = (frame, *msg["cond_indep_stack"])
        BroadcastMessenger._pyro_sample(msg)


class Supply(Messenger):
    """
    Supplies values to sites of a run, and keeps the minibatch that the run draws.

    Every further run of a step enters the same object, so that it sees the same minibatch.

    :param values: a value for each site to be fixed, by name.
    :param draw: called for the other random sites, returns a value or None to let Pyro draw.
    """

    def __init__(
        self,
        subsamples: dict[str, Tensor],
        values: Mapping[str, Tensor] | None = None,
        draw: Callable[[Any], Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        self.subsamples = subsamples
        self.values = values or {}
        self.draw = draw

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            if msg["name"] in self.subsamples:
                msg["value"], msg["done"] = self.subsamples[msg["name"]], True
        elif msg["done"] or msg["is_observed"] or msg["value"] is not None:
            return
        elif msg["name"] in self.values:
            msg["value"], msg["done"] = self.values[msg["name"]], True
        elif self.draw is not None and is_random(msg):
            value = self.draw(msg)
            if value is not None:
                msg["value"], msg["done"] = value, True

    def _pyro_post_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) and msg["name"] not in self.subsamples:
            if len(msg["value"]) == 0:
                raise ValueError(
                    f"plate '{msg['name']}' has an empty minibatch (0 of {msg['fn'].size} data); "
                    f"pass at least one datum, for example by dropping an empty last batch"
                )
            self.subsamples[msg["name"]] = msg["value"]


class ScoreFunctionSites(Messenger):
    """
    Takes reparameterization away from the guide's random sites but those of ``skip``.

    Says so in ``infer={"mcvae": {"score_function": True}}``: wrapped distributions do not let
    ``has_rsample`` be set.
    """

    def __init__(self, skip: frozenset[str]) -> None:
        super().__init__()
        self.skip = skip

    def _pyro_sample(self, msg: Any) -> None:
        if msg["done"] or not is_random(msg) or msg["name"] in self.skip:
            return
        # A distribution that masks itself would mask the score too; it keeps its own gradient.
        if reparameterized(msg) and not is_masked(msg["fn"]) and not is_straight_through(msg["fn"]):
            # A clone: flows cache the inverse of the very tensor that they drew, without a
            # gradient path to their parameters, which the score function needs.
            with torch.no_grad():
                msg["value"] = msg["fn"].sample().clone()
            msg["done"] = True
            own = {**msg["infer"].get("mcvae", {}), "score_function": True}
            msg["infer"] = {**msg["infer"], "mcvae": own}
