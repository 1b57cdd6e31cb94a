"""One handler around the model of a truncated posterior."""

from __future__ import annotations

from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample

from pyro_mcvae.programs.messengers import Recorder, SampleFn
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.precision import without_autocast
from pyro_mcvae.programs.sites import is_random
from pyro_mcvae.programs.types import Site

__all__ = ["StatesHandler"]


class StatesHandler(Recorder):
    """
    Supplies states too, and completes the minibatch.

    :param guide_trace: the draws of the latents that have no states.
    :param subsamples: the minibatch; completed by what the model draws.
    :param draw: called for the other random sites, returns a value or None to let Pyro draw.
    """

    def __init__(self, guide_trace: Trace, subsamples: Minibatch, draw: SampleFn) -> None:
        super().__init__(guide_trace, subsamples)
        self._draw = draw

    def fill(self, msg: Site, drawn: Site | None) -> None:
        if drawn is not None:
            if drawn["type"] != "sample" or drawn["is_observed"]:
                kind = "observed" if drawn["type"] == "sample" else f"a {drawn['type']}"
                raise RuntimeError(
                    f"site '{msg['name']}' is drawn by the model, and is {kind} in guide=: draw it "
                    f"there too, by pyro.sample without obs=, or give it another name"
                )
            super().fill(msg, drawn)
        elif not msg["done"] and msg["value"] is None and is_random(msg):
            with without_autocast():
                value = self._draw(msg)
            if value is not None:
                msg["value"], msg["done"] = value, True

    def _postprocess_message(self, msg: Site) -> None:
        if msg["type"] == "sample" and site_is_subsample(msg):
            self.subsamples.keep(msg)
        super()._postprocess_message(msg)
