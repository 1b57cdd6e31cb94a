"""Find the coordinates in which a posterior is white, by a population of chains."""

from __future__ import annotations

from pyro_mcvae.chains.annealing import Transition, anneal
from pyro_mcvae.checks.angles import is_circular
from pyro_mcvae.coordinates.chain_checks import named
from pyro_mcvae.coordinates.chain_density import ChainDensity
from pyro_mcvae.coordinates.whitened import WhitenedDensity, Whitening
from pyro_mcvae.evaluation.annealing import Annealing

__all__ = ["MOVES", "population", "whiten"]

# Chains for each coordinate, and the fewest and the most of a weight.
_PER_COORDINATE, _FEWEST, _MOST = 2, 50, 1000
# Transitions between two looks at the population.
MOVES = 5
# Numbers of the factors of all weights, above which correlations are left out.
_LARGEST = 1 << 24


def population(dim: int) -> int:
    """How many chains show the covariance of so many coordinates."""
    return min(_MOST, max(_FEWEST, _PER_COORDINATE * dim))


def whiten(density: ChainDensity, annealing: Annealing, transition: Transition) -> Whitening:
    r"""
    The map to white coordinates, after ``annealing.warmup`` windows of five transitions.

    The chains begin at the guide's draws and move with respect to the posterior itself. After each
    window coordinates are white with respect to where they stand then, and the step size has
    adapted; so the chains spread as far as the posterior does, window by window.

    :param transition: by the kernel.
    :raises ValueError: for discrete sites of the guide, and for angles.
    """
    discrete = density.log_weight.plan.discrete
    if discrete:
        raise ValueError(
            f"coordinates='whitened' moves all latents, but the guide's site{named(discrete)} "
            f"discrete: use coordinates='noise', where they stay as they were drawn"
        )
    angles = [n for n, fn in density.log_weight.unconstrained.items() if is_circular(fn)]
    if angles:
        raise ValueError(
            f"coordinates='whitened' fits a normal density on the line, but the guide's site"
            f"{named(tuple(angles))} an angle, which has no end there: use coordinates='noise'"
        )
    position, movable = density.log_weight.coordinates.detach(), density.log_weight.movable
    dense = position[0].numel() * position.shape[-1] <= _LARGEST
    found = Whitening.none(position, movable, dense)
    betas = position.new_ones(MOVES + 1)
    for turn in range(annealing.warmup):
        white = WhitenedDensity(density, found)
        chain = anneal(white(found.white(position)), betas, transition, white, movable)
        if not chain.infos:
            break  # nothing can move
        annealing.adapt(turn, chain.mean_acceptance, None)
        position = found.position(chain.state.position)
        found = found.refined(chain.state.position)
    return found
