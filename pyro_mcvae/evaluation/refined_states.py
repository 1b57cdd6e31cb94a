"""Posterior draws around the states of a truncated posterior."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_mcvae.evaluation.draws import SiteDraws, site_draws
from pyro_mcvae.evaluation.resampling import choose, take_chosen
from pyro_mcvae.evaluation.state_weights import StateWeights, look_outside
from pyro_mcvae.evaluation.weight_summary import WeightSummary
from pyro_mcvae.truncated.search import Population, take_rows

__all__ = ["RefinedStates"]


class RefinedStates:
    """
    One chunk of draws: of each datum's candidates one is a draw of q, with the weight of all states
    that are kept, and the others lie outside of these.

    :ivar sites: their values.
    :ivar log_weight: of the chosen candidates, shape ``[count, *plates]``.
    :ivar acceptance: None, as without chains.
    """

    acceptance: Tensor | None = None

    def __init__(
        self, weights: StateWeights, count: int, candidates: int, summary: WeightSummary
    ) -> None:
        posterior, others = weights.posterior, candidates - 1
        bound = posterior.free_energy
        proposed: list[Tensor | None] = [None] * len(posterior.states.populations)
        outside = bound.new_full((0, *bound.shape), -math.inf)
        if others:
            proposed, outside, runs = look_outside(posterior, count * others)
            weights.check(outside, runs)
            summary.add(torch.logaddexp(bound.expand_as(outside), outside))
            outside = outside - math.log(others)
        whole = bound.expand(count, 1, *bound.shape)
        log_weight = torch.cat([whole, outside.reshape(count, others, *bound.shape)], 1)
        chosen = choose(log_weight)
        self.log_weight = take_chosen(log_weight.flatten(0, 1), chosen)
        states: list[Tensor | None] = [None] * len(posterior.states.populations)
        for b, own in enumerate(posterior.states.sample.split(chosen)):
            population = posterior.states.populations[b]
            if population is not None:
                states[b] = _taken(population, proposed[b], own.flatten(1).t(), others)
        self.sites: SiteDraws = site_draws(posterior.states.runs.run(states, count))


def _taken(population: Population, proposed: Tensor | None, chosen: Tensor, others: int) -> Tensor:
    """
    The states of the chosen candidates, ``[E, count, D]``.

    :param proposed: those outside, ``[E, count * others, D]``.
    :param chosen: 0 for a draw of q, ``[E, count]``.
    """
    logits = population.log_joint.nan_to_num(neginf=torch.finfo(population.log_joint.dtype).min)
    index = torch.distributions.Categorical(logits=logits).sample((chosen.shape[1],)).t()
    kept = take_rows(population.states, index)
    if proposed is None:
        return kept
    at = torch.arange(chosen.shape[1], device=chosen.device) * others
    other = take_rows(proposed, (chosen - 1).clamp_min(0) + at)
    return torch.where((chosen == 0).unsqueeze(-1), kept, other)
