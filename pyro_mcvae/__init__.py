"""Monte Carlo objectives for Pyro: drop-in losses for latent-variable models."""

from pyro_mcvae.elbos.base import Bounds, MonteCarloELBO
from pyro_mcvae.elbos.iwae import TraceIWAE_ELBO
from pyro_mcvae.elbos.sgvb import TraceSGVB_ELBO
from pyro_mcvae.elbos.truncated import TraceTruncated_ELBO
from pyro_mcvae.guides.closed_form import BernoulliPrior, GaussianNoise
from pyro_mcvae.guides.posterior import StatePosterior
from pyro_mcvae.guides.search import PriorDraws
from pyro_mcvae.guides.truncated import TruncatedPosterior
from pyro_mcvae.ops.evolution import (
    EvolutionaryUpdate,
    FitnessProportional,
    GreedyParents,
    OnePointCrossover,
    UniformParents,
)
from pyro_mcvae.ops.mutation import InformedFlips, Mutation, Parents, SparseFlips, UniformFlips

__all__ = [
    "BernoulliPrior",
    "Bounds",
    "EvolutionaryUpdate",
    "FitnessProportional",
    "GaussianNoise",
    "GreedyParents",
    "InformedFlips",
    "MonteCarloELBO",
    "Mutation",
    "OnePointCrossover",
    "Parents",
    "PriorDraws",
    "SparseFlips",
    "StatePosterior",
    "TraceIWAE_ELBO",
    "TraceSGVB_ELBO",
    "TraceTruncated_ELBO",
    "TruncatedPosterior",
    "UniformFlips",
    "UniformParents",
]

__version__ = "0.1.0"
