"""Monte Carlo objectives for Pyro: drop-in losses for latent-variable models."""

from pyro_mcvae.baselines.relaxed import REBAR, RELAX, GumbelSoftmax
from pyro_mcvae.baselines.score_function import (
    NVIL,
    Baseline,
    IndependentDraw,
    LeaveOneOut,
    SummedMean,
)
from pyro_mcvae.elbos.base import Bounds, MonteCarloELBO
from pyro_mcvae.elbos.iwae import TraceIWAE_ELBO
from pyro_mcvae.elbos.rao_blackwell import TraceRaoBlackwell_ELBO
from pyro_mcvae.elbos.sgvb import TraceSGVB_ELBO

__all__ = [
    "NVIL",
    "REBAR",
    "RELAX",
    "Baseline",
    "Bounds",
    "GumbelSoftmax",
    "IndependentDraw",
    "LeaveOneOut",
    "MonteCarloELBO",
    "SummedMean",
    "TraceIWAE_ELBO",
    "TraceRaoBlackwell_ELBO",
    "TraceSGVB_ELBO",
]

__version__ = "0.1.0"
