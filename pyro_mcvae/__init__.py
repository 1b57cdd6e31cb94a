"""Monte Carlo objectives for Pyro: drop-in losses for latent-variable models."""

from pyro_mcvae.elbos.ais import TraceAIS_ELBO
from pyro_mcvae.elbos.base import Bounds, MonteCarloELBO
from pyro_mcvae.elbos.iwae import TraceIWAE_ELBO
from pyro_mcvae.elbos.sgvb import TraceSGVB_ELBO
from pyro_mcvae.elbos.sis import TraceSIS_ELBO
from pyro_mcvae.kernels.base import Kernel
from pyro_mcvae.kernels.hmc import HMC
from pyro_mcvae.kernels.langevin import MALA, ULA, GaussianReverse
from pyro_mcvae.kernels.random_walk import RandomWalk
from pyro_mcvae.kernels.underdamped import UnderdampedLangevin
from pyro_mcvae.schedules import FixedSchedule, LearnedSchedule, LinearSchedule, SigmoidSchedule
from pyro_mcvae.step_size import AdaptiveStepSize, FixedStepSize, LearnedStepSize

__all__ = [
    "HMC",
    "MALA",
    "ULA",
    "AdaptiveStepSize",
    "Bounds",
    "FixedSchedule",
    "FixedStepSize",
    "GaussianReverse",
    "Kernel",
    "LearnedSchedule",
    "LearnedStepSize",
    "LinearSchedule",
    "MonteCarloELBO",
    "RandomWalk",
    "SigmoidSchedule",
    "TraceAIS_ELBO",
    "TraceIWAE_ELBO",
    "TraceSGVB_ELBO",
    "TraceSIS_ELBO",
    "UnderdampedLangevin",
]

__version__ = "0.1.0"
