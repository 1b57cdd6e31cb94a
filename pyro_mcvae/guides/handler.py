"""One handler around the model of a truncated posterior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_mcvae.tracing.handlers import Minibatch
from pyro_mcvae.tracing.precision import full_precision, without_autocast
from pyro_mcvae.tracing.sites import is_random

__all__ = ["StatesHandler"]


class StatesHandler(Messenger):
    """
    Supplies states, the guide's draws and the minibatch, and records the sites.

    What ``Supply`` around Pyro's ``trace`` and ``replay`` does, at the cost of one handler: the
    model runs several times in a step, often on few data, and each handler sees every message.

    :param guide_trace: the draws of the latents that have no states.
    :param subsamples: the minibatch; completed by what the model draws.
    :param draw: called for the other random sites, returns a value or None to let Pyro draw.
    :ivar trace: the sites of the run.
    """

    def __init__(
        self, guide_trace: Trace, subsamples: Minibatch, draw: Callable[[Any], Tensor | None]
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self._given = guide_trace.nodes
        self._subsamples, self._draw = subsamples, draw

    def _process_message(self, msg: Any) -> None:
        if msg["type"] != "sample":
            return
        if site_is_subsample(msg):
            self._subsamples.supply(msg)
            return
        msg["fn"] = full_precision(msg["fn"])
        if msg["is_observed"]:
            return
        given = self._given.get(msg["name"])
        if given is not None:
            if given["type"] != "sample" or given["is_observed"]:
                kind = "observed" if given["type"] == "sample" else f"a {given['type']}"
                raise RuntimeError(
                    f"site '{msg['name']}' is drawn by the model, and is {kind} in guide=: draw it "
                    f"there too, by pyro.sample without obs=, or give it another name"
                )
            msg["value"], msg["infer"], msg["done"] = given["value"], given["infer"], True
        elif not msg["done"] and msg["value"] is None and is_random(msg):
            with without_autocast():
                value = self._draw(msg)
            if value is not None:
                msg["value"], msg["done"] = value, True

    def _postprocess_message(self, msg: Any) -> None:
        if msg["type"] != "sample":
            return
        if site_is_subsample(msg):
            self._subsamples.keep(msg)
        if not msg["infer"].get("_do_not_trace"):
            self.trace.add_node(msg["name"], **msg)
