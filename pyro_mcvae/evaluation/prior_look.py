"""A look at a posterior that does not begin where the guide draws: chains from the prior."""

from __future__ import annotations

import warnings
from dataclasses import replace

from pyro import poutine
from pyro.poutine.util import site_is_subsample

from pyro_mcvae.chains.hmc import HMC
from pyro_mcvae.chains.step_size import AdaptiveStepSize
from pyro_mcvae.evaluation.annealing import DEFAULT_STEPS, make_annealing
from pyro_mcvae.evaluation.evidence import LogEvidence, estimate
from pyro_mcvae.evaluation.weights import Weights
from pyro_mcvae.programs.errors import first_line
from pyro_mcvae.programs.sites import is_latent
from pyro_mcvae.programs.types import Site

__all__ = ["look_from_prior"]

# Chains: enough for one datum, and of many data, whose evidence is compared in total, fewer each.
_CHAINS, _FEWEST, _WARMUP = 200, 50, 4
# Of the prior's own spread: a chain that begins with small steps would need a longer warm-up.
_FIRST_STEP = 0.5


def look_from_prior(weights: Weights, num_particles: int) -> LogEvidence | str:
    """
    The evidence by chains that are annealed from draws of the model's own prior.

    It is unbiased as the guide's is, and reaches modes that the prior draws. Where it finds more,
    beyond its error, the guide has missed something; where the prior is far from the posterior it
    finds less, and tells nothing. Discrete latents are drawn from the prior and weighed.

    :param weights: those of the guide, whose minibatch is taken.
    :param num_particles: the most chains of each datum.
    :returns: the evidence, or why there is none.
    """
    if weights.given:
        return f"{', '.join(weights.given)} are held, and the prior draws them"
    run = weights.reference.runs[0]
    nodes = run.model_trace.nodes
    # What the guide leaves to be summed is summed here, too.
    drawn = frozenset(n for n, s in nodes.items() if is_latent(s) and n in run.guide_trace)
    prior_of = poutine.block(weights.programs.model, hide_fn=lambda s: _is_hidden(s, drawn))
    programs = replace(weights.programs, guide=prior_of)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prior = weights.on(programs, joint=weights.elements == 1)
            if not prior.discrete:
                num_particles = min(num_particles, max(_FEWEST, _CHAINS // weights.elements))
                kernel = HMC(AdaptiveStepSize(_FIRST_STEP), num_leapfrog=2)
                prior.annealing = make_annealing(DEFAULT_STEPS, kernel, "noise", _WARMUP)
            return estimate(prior, num_particles, all_labellings=False)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        # A look is extra: what cannot be looked at is said, and the report stands without.
        return first_line(error)


def _is_hidden(site: Site, drawn: frozenset[str]) -> bool:
    return site["type"] == "sample" and not site_is_subsample(site) and site["name"] not in drawn
