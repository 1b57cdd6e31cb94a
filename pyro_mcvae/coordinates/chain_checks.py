"""What chains ask of a guide's draws, looked at once for each structure."""

from __future__ import annotations

from torch import Tensor

from pyro_mcvae.checks.scales import refuse_large_scales
from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.programs.sites import bare
from pyro_mcvae.programs.terms import Term


def check_chain(log_weight: LogWeight, objective: str) -> None:
    """
    Check that chains can move from the first draw, and differentiate it where a bound's gradient
    goes through it.

    :raises ValueError: naming the site.
    """
    # Scales may change from step to step. Those that are numbers can be compared in each.
    refuse_large_scales(_moving_terms(log_weight), objective, reads=False)
    key = check_chain, objective, log_weight.gradient
    if key not in log_weight.plan.looked:
        _check_chain(log_weight, objective)
        log_weight.plan.looked.add(key)


def _check_chain(log_weight: LogWeight, objective: str) -> None:
    check_continuous(log_weight, objective)
    refuse_large_scales(_moving_terms(log_weight), objective, reads=True)
    if log_weight.gradient.keeps_graph:
        _check_reparameterized(log_weight, objective)
        _check_factors(log_weight, objective)


def _moving_terms(log_weight: LogWeight) -> list[Term]:
    """The local factors, without those of discrete draws, which chains leave where they are."""
    sample, moving = log_weight.first.sample, log_weight.plan.moving
    guide = sample.runs[0].guide_trace.nodes
    terms = [t for t in sample.runs[0].terms if sample.is_local(t)]
    return [t for t in terms if t.key.name not in guide or t.key.name in moving]


def _check_reparameterized(log_weight: LogWeight, objective: str) -> None:
    rough = log_weight.unreparameterized
    if rough:
        nodes = log_weight.first.sample.runs[0].guide_trace.nodes
        kinds = ", ".join(type(bare(nodes[n]["fn"])).__name__ for n in rough)
        raise ValueError(
            f"{objective} needs draws with a gradient to the guide's parameters, but the "
            f"guide's site{named(rough)} not reparameterized ({kinds}): use a distribution "
            f"with rsample and without rejections, or TraceIWAE_ELBO, which scores such "
            f"sites"
        )


def _check_factors(log_weight: LogWeight, objective: str) -> None:
    hidden = [
        t.key.name
        for t in log_weight.first.sample.runs[0].terms
        if t.in_guide and t.site["is_observed"] and isinstance(t.score, Tensor)
    ]
    if hidden:
        raise ValueError(
            f"{objective} follows draws along gradients, but the guide's factor '{hidden[0]}' "
            f"says has_rsample=False, that it comes with draws that have none: pass "
            f"has_rsample=True if it is a function of reparameterized draws and parameters, or "
            f"use TraceIWAE_ELBO, which scores it"
        )


def check_continuous(log_weight: LogWeight, objective: str) -> None:
    """
    Check that every latent can be moved along gradients.

    :raises ValueError: naming the discrete sites.
    """
    if log_weight.plan.discrete:
        raise ValueError(
            f"{objective} moves latents along gradients, but the guide's site"
            f"{named(log_weight.plan.discrete)} discrete: sum discrete sites with "
            f"TraceRaoBlackwell_ELBO, weigh them with TraceIWAE_ELBO, or marginalise them "
            f"in the model"
        )


def named(names: tuple[str, ...]) -> str:
    """Sites and their verb, as in "s 'a', 'b' are", to follow "site"."""
    quoted = ", ".join(f"'{n}'" for n in names)
    return f" {quoted} is" if len(names) == 1 else f"s {quoted} are"
