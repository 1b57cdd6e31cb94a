"""A model that draws what it observes."""

from __future__ import annotations

from pyro.poutine.uncondition_messenger import UnconditionMessenger

from pyro_mcvae.programs.types import Message

__all__ = ["Unconditioned"]


class Unconditioned(UnconditionMessenger):
    """
    Observed sites are drawn, as by Pyro's ``uncondition``; but ``pyro.deterministic`` stays what it
    is: inside of a plate Pyro's would draw it once for each element, with a dim too many.
    """

    def _pyro_sample(self, msg: Message) -> None:
        if not msg["infer"].get("_deterministic"):
            super()._pyro_sample(msg)
