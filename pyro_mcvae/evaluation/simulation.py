"""Data simulated from a model, with the latents that they came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_mcvae.checks.masks import is_transported
from pyro_mcvae.evaluation.arguments import as_arguments
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.masks import is_flat
from pyro_mcvae.programs.messengers import Recorder, Substitutes
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import (
    inner_scale,
    is_factor,
    is_latent,
    is_random,
    is_scored,
)
from pyro_mcvae.programs.substitute import substitute
from pyro_mcvae.programs.terms import model_term
from pyro_mcvae.programs.types import Site
from pyro_mcvae.programs.unconditioned import Unconditioned

ToArgs = Callable[[dict[str, Tensor]], object]


@dataclass(frozen=True)
class Simulation:
    """
    :ivar programs: model and guide on the simulated data.
    :ivar latents: the latents that these came from, by the model's site: an exact posterior draw.
    :ivar trace: the model's execution that drew both.
    """

    programs: Programs
    latents: dict[str, Tensor]
    trace: Trace


def simulate(
    programs: Programs, reference: WeightedParticles, held: frozenset[str], to_args: ToArgs | None
) -> Simulation:
    """
    Draw latents from the prior, then observations.

    :param reference: an execution on the user's data, for its minibatch and its held latents.
    :param held: latents that keep the reference's values.
    :param to_args: maps the observations, by site, to the programs' arguments. None: the observed
        tensors are replaced where the arguments hold them.
    :raises ValueError: for models that no data can be drawn from, naming the site; and where it is
        not clear how the data reach the programs.
    """
    nodes = reference.runs[0].model_trace.nodes
    for name, site in nodes.items():
        if is_scored(site):
            _check_generative(name, site)
    for name in (n for n, s in nodes.items() if is_latent(s) and is_flat(s["fn"])):
        raise ValueError(
            f"site '{name}' of the model says .mask(False), so that the model has no prior of it "
            f"that data could be drawn from: leave the mask out"
        )
    values = {n: nodes[n]["value"] for n in held if n in nodes}
    with Recorder(Substitutes(reference.subsamples, values)) as recorder, Unconditioned():
        programs.model(*programs.args, **programs.kwargs)
    drawn = {n: s["value"] for n, s in recorder.trace.nodes.items() if is_scored(s)}
    data = {n: drawn[n] for n, s in nodes.items() if is_scored(s) and s["is_observed"]}
    latents = {n: v for n, v in drawn.items() if n not in data}
    if to_args is not None:
        args, kwargs = as_arguments(to_args(data))
        found = replace(programs, args=args, kwargs=kwargs)
    else:
        remedy = (
            f"pass to_args=..., which maps a dict of the simulated observations {sorted(data)} to "
            f"the arguments (to_args=lambda data: args, if guide and model do not read the data "
            f"from them)"
        )
        found = substitute(programs, nodes, data, reference.subsamples, remedy)
    found = replace(found, model=poutine.condition(found.model, data=data))
    return Simulation(found, latents, recorder.trace)


def check_density(simulation: Simulation, run: Run) -> None:
    """
    Check that the model on the simulated data is the one that drew them.

    :param run: an execution at the simulated latents.
    :raises ValueError: naming a site whose density is another one.
    """
    for term in run.terms:
        site = simulation.trace.nodes.get(term.key.name)
        if term.in_guide or site is None:
            continue
        expected = model_term(site).log_prob.sum()
        leads = run.leading is not None and term.log_prob.dim() > run.nesting
        found = term.log_prob.sum() / (len(term.log_prob) if leads else 1)
        if not torch.allclose(found, expected.to(found), rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"the density of site '{term.key.name}' of the model is {float(found):.4g} on the "
                f"simulated data, but was {float(expected):.4g} when they were drawn: the model "
                f"reads its data other than through obs=, or its arguments were not replaced; pass "
                f"to_args=..., which maps the simulated observations to all arguments"
            )


def follows_data(programs: Programs, simulation: Simulation, subsamples: Minibatch) -> bool:
    """
    Whether a guide draws other latents for simulated data than for the user's; or those of the
    prior, which follow no data.

    :param subsamples: the minibatch of both.
    """
    with Recorder(Substitutes(subsamples)) as here:
        programs.guide(*programs.args, **programs.kwargs)
    sites = {n: s for n, s in here.trace.nodes.items() if is_latent(s) and is_random(s)}
    values = {n: s["value"] for n, s in sites.items()}
    with Recorder(Substitutes(subsamples, values)) as there:
        simulation.programs.guide(*simulation.programs.args, **simulation.programs.kwargs)
    return _all_same(sites, simulation.trace) or not _all_same(sites, there.trace)


def _all_same(sites: dict[str, Site], trace: Trace) -> bool:
    return all(n in trace.nodes and _same(site, trace.nodes[n]) for n, site in sites.items())


def _same(site: Site, other: Site) -> bool:
    """Whether two sites have one density, at the value of the first."""
    value = site["value"]
    mine = site["fn"].log_prob(value)
    try:
        theirs = other["fn"].log_prob(value)
    except (ValueError, RuntimeError):  # of another shape, or another support
        return False
    return mine.shape == theirs.shape and torch.allclose(mine, theirs)


def _check_generative(name: str, site: Site) -> None:
    if is_factor(site["fn"]):
        raise ValueError(
            f"site '{name}' of the model is a pyro.factor, which no data can be drawn from: write "
            f"it as a distribution with obs="
        )
    if is_transported(site):
        raise ValueError(
            f"site '{name}' of the model is a point mass with a density of its own, as "
            f"NeuTraReparam makes it, which no data can be drawn from: pass the model that was "
            f"reparameterized, with a guide of its latents"
        )
    scale = inner_scale(site)
    if bool(torch.as_tensor(scale != 1.0).any()):
        raise ValueError(
            f"site '{name}' of the model is scaled by poutine.scale, so that the model is no "
            f"distribution that data can be drawn from: leave the scale out"
        )
