"""What an objective says of a pair of programs, once, or refuses."""

from __future__ import annotations

import logging

from torch import Tensor

from pyro_mcvae.checks.angles import unwound
from pyro_mcvae.checks.copied_parameters import collects_parameters, refuse_copied_parameters
from pyro_mcvae.ops.notices import WarnOnce
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.run import Run
from pyro_mcvae.structure.cache import PairCache

__all__ = ["Notices", "refuse_scores"]

_logger = logging.getLogger(__name__)


_BASELINE = (
    "infer={'baseline': ...} of the guide's site '%s' is for pyro.infer.TraceGraph_ELBO, and has "
    "no effect here: pass baseline= to TraceRaoBlackwell_ELBO, such as IndependentDraw() or "
    "NVIL(network)"
)
_OBSERVED = (
    "site '%s' of the guide is observed: its log density is added to the loss, as by Pyro, so that "
    "training lowers it, and is in no weight and no evidence. To train a network that predicts it, "
    "subtract its log_prob from differentiable_loss instead"
)


class Notices:
    """What is logged once of the guides of one objective."""

    def __init__(self) -> None:
        self._looked: PairCache[set[bool]] = PairCache(set)
        self._warn = WarnOnce(_logger)

    def look(self, programs: Programs, runs: list[Run]) -> None:
        """Log, or refuse, what of programs has another effect than their user may think."""
        looked, collected = self._looked.of(programs), collects_parameters()
        if collected not in looked:
            self._look(programs, runs[:1], collected)
            looked.add(collected)

    def _look(self, programs: Programs, runs: list[Run], collected: bool) -> None:
        for run in runs if collected else ():
            refuse_copied_parameters(programs, run)
        for why in (why for run in runs for why in unwound(run)):
            self._warn(why)
        for term in (t for run in runs for t in run.terms if t.in_guide):
            if term.site["infer"].get("baseline"):
                self._warn(_BASELINE % term.key.name)
        for term in (t for run in runs for t in run.guide_data):
            self._warn(_OBSERVED % term.key.name)


def refuse_scores(objective: str, runs: list[Run]) -> None:
    """
    Refuse draws without reparameterization.

    A score-function term that is left out is a wrong gradient, which nothing else would show.

    :raises ValueError: naming such a draw.
    """
    for term in (t for run in runs for t in run.terms if isinstance(t.score, Tensor)):
        raise ValueError(
            f"the guide's draws of site '{term.key.name}' are not reparameterized "
            f"({type(term.site['fn']).__name__}), and the estimate of {objective} "
            f"does not say that its gradient has their score function: make it by local_estimate "
            f"or elbo_estimate, or add the terms and pass Estimate(..., scored=True)"
        )
