"""What to try next, after what was found."""

from __future__ import annotations

from pyro_mcvae.evaluation.findings import Findings

__all__ = ["advise"]

# Nats per weight that are close enough, and shares of weights with heavy tails.
_CLOSE, _FEW, _SOME = 0.1, 0.05, 0.25
# Nats that a bound of many draws may leave, and those of the ELBO that such a bound halves at best
# (docs/choose.md, measured on nine models).
_MANY, _TENS = 10.0, 20.0
# Losses whose advice would be to use them: the ELBO, and the bounds of several draws.
_ELBOS = "TraceSGVB_ELBO", "Trace_ELBO", "TraceMeanField_ELBO", "TraceGraph_ELBO"
_WEIGHTED = "TraceIWAE_ELBO", "RenyiELBO", "TraceRenyi_ELBO"
_CHAINS = "TraceSIS_ELBO", "TraceAIS_ELBO"
_SWAP = (
    "TraceSIS_ELBO(10, num_particles=8, multi_sample=True), or first better coordinates (latents "
    "that are independent a priori)"
)


def advise(report: Findings) -> str:
    """A sentence or two."""
    if report.states is not None:
        return _of_states(report)
    if report.misses:
        return _missed(report)
    if _is_close(report):
        return _close(report)
    heavy = _heavy(report)
    if report.discrete:
        return _discrete(report, heavy)
    if _was(report, _CHAINS):
        return _after_chains(report, heavy)
    return " ".join(
        filter(None, (_by_gap(report, heavy), _undecided(report), _too_low(report, heavy)))
    )


def _of_states(report: Findings) -> str:
    assert report.states is not None
    n, gap = report.states, float(report.gap.mean())
    heavy = _heavy(report) > _FEW
    if report.misses:
        return (
            f"Draws of the prior find more than the {n} states: the search misses a part of the "
            f"posterior. Let it begin there (proposals=PriorDraws()), or keep more states "
            f"(num_states={4 * n})."
        )
    if gap < _CLOSE and bool(report.guide.pareto_k.isnan().any()):
        return (
            f"The {n} states of a datum hold nearly all that was found, by too few draws to tell "
            f"what lies outside: draw more (num_particles=)."
        )
    if gap < _CLOSE and not heavy:
        return f"The {n} states of a datum hold nearly all of its posterior: they are enough."
    if gap < _CLOSE:
        return (
            f"The {n} states of a datum hold nearly all that was found, but some draws near them "
            f"weigh heavily, so that more may lie outside: draw more (num_particles=), or keep "
            f"more states (num_states={4 * n})."
        )
    return (
        f"{gap:.2f} nats per weight lie outside of the {n} states: search on (guide.fit(..., "
        f"num_steps=100)), and where that finds no better ones keep more (num_states={4 * n})."
        + (" Some draws near them weigh heavily: this evidence is an underestimate." * heavy)
    )


def _missed(report: Findings) -> str:
    where = f"for {int(report.missed.sum())} of {report.gap.numel()}"
    return (
        f"The chains find more than the guide's weights "
        f"{where if bool(report.missed.any()) else 'in total'}, where Pareto k is good: the "
        f"guide misses a part of the posterior, such as a mode. Begin its training "
        f"elsewhere, or try a richer guide ({_richer(report)})."
    )


def _is_close(report: Findings) -> bool:
    return _heavy(report) <= _FEW and float(report.gap.mean()) < _CLOSE


def _close(report: Findings) -> str:
    trained = report.trained
    if trained is None:
        return "The guide is close to the posterior: the ELBO (TraceSGVB_ELBO) is tight enough."
    return f"The guide is close to the posterior: no loss gains on {_name(report)}."


def _discrete(report: Findings, heavy: float) -> str:
    sites = ", ".join(report.discrete)
    if heavy > _SOME:
        return (
            f"The guide misses values of {sites} that matter: let its sites depend on each other, "
            f"or use TruncatedPosterior with TraceTruncated_ELBO."
        )
    quieter = f"for less noise in the gradients of {sites} use TraceRaoBlackwell_ELBO."
    if _was(report, ("TraceRaoBlackwell_ELBO",)):
        return f"TraceIWAE_ELBO(num_particles=10) tightens the bound of {_name(report)}."
    if _was(report, _WEIGHTED):
        return f"{_more(report)}; {quieter}"
    return f"TraceIWAE_ELBO(num_particles=10) tightens the bound; {quieter}"


def _by_gap(report: Findings, heavy: float) -> str:
    """
    The rule of ``docs/choose.md``: what a bound of many draws leaves decides, and of the ELBO's gap
    how much these are likely to leave.
    """
    if report.trained is None or _was(report, _ELBOS):
        gap = float(report.gap.mean())
        if gap > _TENS:
            return f"{gap:.0f} nats are more than draws alone make up for: take {_SWAP}."
        count = 100 if report.gap.numel() == 1 else 10
        if heavy <= _SOME:
            return (
                f"{_covers(report)}: TraceIWAE_ELBO(num_particles={count}) gains most of the gap."
            )
        return (
            f"The weights' tails are heavy, and the gap is small: train on with "
            f"TraceIWAE_ELBO(num_particles={count}), and judge again (loss=...). Where more than "
            f"{_MANY:.0f} nats are left then, {_SWAP}."
        )
    left = _left(report)
    if left < _CLOSE:
        return _tight(report)
    richer = f"a richer guide ({_richer(report)})"
    if not _was(report, _WEIGHTED):
        return f"{_covers(report)}: next to {_name(report)}, try {richer}."
    if left > _MANY:
        return (
            f"{_name(report)} leaves {left:.0f} nats, which more draws hardly make up for: take "
            f"{_SWAP}, or {richer}."
        )
    return f"{_covers(report)}: {_more(report)}, or {richer}."


def _after_chains(report: Findings, heavy: float) -> str:
    if _left(report) < _CLOSE:
        return _tight(report)
    richer = f"a richer guide ({_richer(report)})"
    if heavy > _SOME:
        return f"The weights' tails are heavy: more steps than {_name(report)} has, or {richer}."
    return f"{_covers(report)}: next to {_name(report)}, try {richer}."


def _left(report: Findings) -> float:
    """What the bound of the loss that was trained by leaves."""
    assert report.trained is not None
    return float(report.evidence.mean) - report.trained.bound


def _tight(report: Findings) -> str:
    return f"The bound of {_name(report)} is within {_CLOSE} nats of the evidence: it will do."


def _more(report: Findings) -> str:
    assert report.trained is not None
    name, count = report.trained.name, 4 * report.trained.num_particles
    return f"{name} with {count} particles tightens the bound"


def _too_low(report: Findings, heavy: float) -> str:
    if heavy <= _SOME or report.evidence is not report.guide:
        return ""
    return "This evidence is an underestimate: pass schedule=10 for one by chains."


def _undecided(report: Findings) -> str:
    """Of a single weight whose k-hat may be on either side of 0.7."""
    if report.gap.numel() > 1:
        return ""
    k, error = float(report.guide.pareto_k), float(report.guide.pareto_k_error)
    if not abs(k - 0.7) < error:
        return ""
    return (
        f"Whether weights can repair this guide is open (Pareto k {k:.2f} ± {error:.2f}): "
        f"num_particles={10 * report.guide.num_particles} tells more."
    )


def _covers(report: Findings) -> str:
    if not report.looked or not report.trusted:
        return "Where the guide draws, it follows the posterior, but not closely"
    return "The guide covers the posterior, but not closely"


def _heavy(report: Findings) -> float:
    """The share of weights with heavy tails."""
    return float(report.guide.unreliable.double().mean())


def _was(report: Findings, names: tuple[str, ...]) -> bool:
    return report.trained is not None and report.trained.name in names


def _name(report: Findings) -> str:
    assert report.trained is not None
    return report.trained.label


def _richer(report: Findings) -> str:
    one = report.gap.dim() == 0
    return "AutoMultivariateNormal or a flow" if one else "full covariances or a flow"
