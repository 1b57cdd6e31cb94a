"""Bounds from both sides for truncated posteriors, on simulated data that they search for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pyro_mcvae.evaluation.options import Options
from pyro_mcvae.evaluation.simulation import Simulation, ToArgs, check_density, simulate
from pyro_mcvae.evaluation.state_weights import StateWeights, look_outside
from pyro_mcvae.ops.importance import log_mean_exp
from pyro_mcvae.truncated.guide import new_posterior

__all__ = ["both_ways_of_states"]


def both_ways_of_states(
    user: StateWeights, options: Options, to_args: ToArgs | None, num_steps: int
) -> tuple[Tensor, Tensor]:
    """
    Bounds on the log evidence of one simulated data set, ``[*plates]`` each, from below and above.

    With weights w(z) of mean p(x) under r, the mean of K of them is a lower bound in expectation;
    with one of them at a draw of r w / p(x), an upper one. An exact posterior draw is such a draw
    if it lies outside of the states that are kept; where it is one of these, any draw of r is.

    :param user: the weights on the user's data.
    :param num_steps: of the search for the simulated data.
    :raises ValueError: for a posterior of further latents.
    """
    if user.holds_draws:
        raise ValueError(
            "the TruncatedPosterior has a guide that draws other latents, of which a simulation "
            "has an exact draw that this guide does not begin at: sandwich is for models all of "
            "whose latents are searched; log_evidence estimates the evidence of the data"
        )
    simulation = simulate(user.programs, user.reference, frozenset(user.given), to_args)
    near = _searched(user, simulation, options, num_steps)
    count = options.num_particles
    lower, upper = _weigh(near, count), _weigh(near, count)
    given = {n: v.unsqueeze(0) for n, v in simulation.latents.items()}
    bound = near.posterior.free_energy.unsqueeze(0)
    _, outside, runs = look_outside(near.posterior, 1, given)
    check_density(simulation, runs[0])
    inside = outside.isneginf()
    exact = torch.where(inside, upper[:1], torch.logaddexp(bound, outside))
    return log_mean_exp(lower), log_mean_exp(torch.cat([exact, upper[1:]]))


def _weigh(weights: StateWeights, num_particles: int) -> Tensor:
    found = []
    for count in weights.chunks(num_particles):
        log_weight, runs, _ = weights.weigh(count)
        weights.check(log_weight, runs)
        found.append(log_weight)
    return torch.cat(found)


def _searched(
    user: StateWeights, simulation: Simulation, options: Options, num_steps: int
) -> StateWeights:
    programs = simulation.programs
    guide = new_posterior(user.guide, programs.model)
    guide.fit(*programs.args, num_steps=num_steps, **programs.kwargs)
    return StateWeights(replace(programs, guide=guide.eval()), options, user.progress)
