"""What an objective says of a pair of programs, once, or refuses."""

from __future__ import annotations

import logging

from torch import Tensor

from pyro_mcvae.checks.angles import unwound
from pyro_mcvae.checks.copied_parameters import collects_parameters, refuse_copied_parameters
from pyro_mcvae.ops.notices import WarnOnce
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.plates import plate_frames
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import inner_scale
from pyro_mcvae.structure.cache import Analyses

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
_TEMPERED = (
    "poutine.scale multiplies all sites in plates by %g, inside of the weights, which it tempers: "
    "the objective is %s bound on %g log p(x) then. Multiply the loss instead; a minibatch is "
    "pyro.plate(name, size, subsample_size=...), whose N/B stays outside of the weights"
)


class Notices:
    """What is logged once of the guides of one objective."""

    def __init__(self, analyses: Analyses) -> None:
        self._analyses = analyses
        self._warn = WarnOnce(_logger)

    def look(self, programs: Programs, runs: list[Run], weighs: bool) -> None:
        """
        Log, or refuse, what of programs has another effect than their user may think.

        :param bool weighs: whether the objective is more than a mean of log densities.
        """
        collected = collects_parameters()
        self._analyses.of(programs).once(
            ("notices", collected), lambda: self._look(programs, runs[:1], collected, weighs)
        )

    def _look(self, programs: Programs, runs: list[Run], collected: bool, weighs: bool) -> None:
        for run in runs if collected else ():
            refuse_copied_parameters(programs, run)
        for scale in map(_common_scale, runs if weighs else ()):
            if scale is not None:
                self._warn(_TEMPERED % (scale, "no" if scale > 1 else "a loose", scale))
        for why in (why for run in runs for why in unwound(run)):
            self._warn(why)
        for term in (t for run in runs for t in run.terms if t.in_guide):
            if term.site["infer"].get("baseline"):
                self._warn(_BASELINE % term.key.name)
        for term in (t for run in runs for t in run.guide_data):
            self._warn(_OBSERVED % term.key.name)


def _common_scale(run: Run) -> float | None:
    """The user's own scale of all sites in plates, if it is one that says something."""
    scales = {inner_scale(t.site) for t in run.terms if plate_frames(t.site)}
    scale = scales.pop() if len(scales) == 1 else None
    return scale if isinstance(scale, float) and scale != 1.0 else None


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
