"""What an objective says of a pair of programs, once, or refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from pyro_mcvae.checks.angles import unwound
from pyro_mcvae.checks.copied_parameters import collects_parameters, refuse_copied_parameters
from pyro_mcvae.checks.masks import counted_by_guide_alone
from pyro_mcvae.checks.scales import common_scale, scaled_latents
from pyro_mcvae.checks.unweighed import check_unweighed
from pyro_mcvae.ops.notices import WarnOnce
from pyro_mcvae.ops.recording import is_recording
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.nesting import single_run
from pyro_mcvae.programs.plates import is_subsampled, plate_frames
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_latent, is_random
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Site
from pyro_mcvae.structure.cache import Analyses

_logger = logging.getLogger(__name__)

Weighs = Callable[[Site], bool]


_BASELINE = (
    "infer={'baseline': ...} of the guide's site '%s' is for pyro.infer.TraceGraph_ELBO, and has "
    "no effect here: pass baseline= to TraceRaoBlackwell_ELBO, such as IndependentDraw() or "
    "NVIL(network)"
)
_UNLIMITED = (
    "a mask takes entries of latent '%s' out of the model's density and not of the guide's, so "
    "that their entropy counts and no prior limits it: the objective is no bound on log p(x), and "
    "rises as long as the guide trains. Put the same poutine.mask around the site in the guide "
    "(~mask for x_unobserved of obs_mask=mask), or mask the observations alone"
)
_POINTS = (
    "the guide draws no random latent (its site '%s' is a point mass): all particles are equal, "
    "and the objective is log p(x, z) at the point, which is no bound on log p(x). TraceSGVB_ELBO "
    "has the same value with one particle; for a bound use a guide that draws, such as AutoNormal"
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
_AVERAGED = (
    "no latent is weighed per datum, because %s: the particles are averaged as in the plain ELBO, "
    "which is a bound too. For weights pass the full data, or put the latents into the data's plate"
)
_SCALED = (
    "poutine.scale multiplies the log density of latent '%s' by %g in the model and %g in the "
    "guide, inside of the weights: the loss is no bound on the log evidence, but one on the "
    "logarithm of the integral of p(x | z) p(z)^%g q(z)^(1 - %g), which %s. It bounds the evidence "
    "once the scales are 1, as at the end of annealing. TraceSGVB_ELBO has the objective of a "
    "beta-VAE; scaling the observations by 1 / beta instead has a bound for every beta"
)


class Notices:
    """What is logged once of the guides of one objective."""

    def __init__(self, analyses: Analyses) -> None:
        self._analyses = analyses
        self._warn = WarnOnce(_logger)
        self._scaled: set[tuple[str, bool]] = set()

    def look(self, programs: Programs, runs: list[Run], weighs: Weighs) -> None:
        """
        Log, or refuse, what of programs has another effect than their user may think.

        Masks and scales may change, so each analysis of the programs checks them again.

        :param runs: of the step; none where its caller has none, as of bounds per datum.
        :param weighs: whether a site of the guide is part of a weight, of which the objective is
            more than a mean of logarithms.
        """
        if is_recording():
            return  # the plain steps before were looked at
        collected = collects_parameters()

        def look() -> None:
            self._look(programs, runs[:1] or [single_run(programs)], collected, weighs)

        self._analyses.of(programs).once(("notices", collected), look)

    def _look(self, programs: Programs, runs: list[Run], collected: bool, weighs: Weighs) -> None:
        for run in runs if collected else ():
            refuse_copied_parameters(programs, run)
        for run in runs:
            if not any(t.in_guide and weighs(t.site) for t in run.terms):
                continue
            drawn = [t for t in run.terms if t.in_guide and is_latent(t.site)]
            if drawn and not any(is_random(t.site) for t in drawn):
                self._warn(_POINTS % drawn[0].key.name)
            check_unweighed(programs, run, weighs)
            scale = common_scale(run.terms)
            if scale is not None:
                self._warn(_TEMPERED % (scale, "no" if scale > 1 else "a loose", scale))
            else:
                self._tell_scales(run)
        for why in (why for run in runs for why in unwound(run)):
            self._warn(why)
        for name in (n for run in runs for n in counted_by_guide_alone(programs, run)):
            self._warn(_UNLIMITED % name)
        for term in (t for run in runs for t in run.terms if t.in_guide):
            if term.site["infer"].get("baseline"):
                self._warn(_BASELINE % term.key.name)
        for term in (t for run in runs for t in run.guide_data):
            self._warn(_OBSERVED % term.key.name)

    def tell_averaged(self, programs: Programs, run: Run, weighs: Weighs) -> None:
        """Warn once for a pair of programs that no latent is weighed, and name the cause."""
        drawn = {t.key.name: t for t in run.terms if t.in_guide and is_random(t.site)}
        if is_recording() or not any(weighs(t.site) for t in drawn.values()):
            return
        self._analyses.of(programs).once(
            ("averaged",), lambda: self._warn(_AVERAGED % _why_averaged(run, drawn))
        )

    def _tell_scales(self, run: Run) -> None:
        """Warn of each latent that is scaled inside of the weights, and again above 1."""
        plated = any(plate_frames(t.site) for t in run.terms if t.in_guide)
        local = [t for t in run.terms if plate_frames(t.site) or not plated]
        for name, scales in scaled_latents(local).items():
            key = name, any(s > 1 for s in scales)
            if key not in self._scaled:
                self._scaled.add(key)
                what = "exists for few models only" if key[1] else "is that of another prior"
                _logger.warning(_SCALED, name, *scales, *scales, what)


def _why_averaged(run: Run, drawn: Mapping[str, Term]) -> str:
    plates = {f: None for t in run.terms for f in plate_frames(t.site) if is_subsampled(f)}
    for plate in plates:
        what = f"the subsampled plate '{plate.name}' ({plate.size} of {plate.full_size})"
        outside = [n for n, t in drawn.items() if plate not in plate_frames(t.site)]
        if outside:
            return f"data of {what} depend on the guide's {', '.join(map(repr, outside))} outside"
    return "elements of a subsampled plate depend on each other's latents"


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
