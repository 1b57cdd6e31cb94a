"""A model that draws what it observes."""

from __future__ import annotations

from pyro.poutine.uncondition_messenger import UnconditionMessenger

from pyro_mcvae.programs.sites import is_record
from pyro_mcvae.programs.types import Message


class Unconditioned(UnconditionMessenger):
    """
    Observed sites are drawn, as by Pyro's ``uncondition``; but what is computed stays what it is:
    inside of a plate Pyro's would draw it once for each element, with a dim too many.
    """

    def _pyro_sample(self, msg: Message) -> None:
        if not is_record(msg):
            super()._pyro_sample(msg)
