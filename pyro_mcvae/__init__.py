"""Monte Carlo objectives for Pyro: drop-in losses for latent-variable models."""

from pyro_mcvae.chains.kernels import (
    HMC,
    MALA,
    ULA,
    GaussianReverse,
    Kernel,
    Proposal,
    RandomWalk,
    UnderdampedLangevin,
)
from pyro_mcvae.chains.parameters import (
    AdaptiveStepSize,
    LearnedMomentum,
    LearnedStepSize,
    StepSize,
)
from pyro_mcvae.chains.schedules import LearnedSchedule, LinearSchedule, Schedule, SigmoidSchedule
from pyro_mcvae.chains.score_network import ScoreNetwork
from pyro_mcvae.compiled.elbo import CompiledELBO
from pyro_mcvae.coordinates.noise import Noise, register_noise
from pyro_mcvae.discrete.baselines import (
    NVIL,
    REBAR,
    RELAX,
    Baseline,
    IndependentDraw,
    LeaveOneOut,
    SummedMean,
)
from pyro_mcvae.elbos.base import Estimate, MonteCarloELBO
from pyro_mcvae.elbos.chain import TraceAIS_ELBO, TraceSIS_ELBO
from pyro_mcvae.elbos.elbo_terms import elbo_costs, local_estimate
from pyro_mcvae.elbos.iwae import TraceIWAE_ELBO, TraceRenyi_ELBO
from pyro_mcvae.elbos.rao_blackwell import TraceRaoBlackwell_ELBO
from pyro_mcvae.elbos.sgvb import TraceSGVB_ELBO
from pyro_mcvae.elbos.truncated import TraceTruncated_ELBO
from pyro_mcvae.evaluation.compare import compare, compare_models
from pyro_mcvae.evaluation.evidence import log_evidence
from pyro_mcvae.evaluation.laplace import laplace_init
from pyro_mcvae.evaluation.low_dimensional import low_dimensional_evidence
from pyro_mcvae.evaluation.refine import refine, to_inference_data
from pyro_mcvae.evaluation.report import report
from pyro_mcvae.evaluation.sandwich import sandwich
from pyro_mcvae.training.checkpoint import load_checkpoint, save_checkpoint
from pyro_mcvae.training.distributed import RankBatches
from pyro_mcvae.training.monte_carlo_em import MonteCarloEM
from pyro_mcvae.training.wake_sleep import WakeSleep
from pyro_mcvae.truncated.closed_form import BernoulliPrior, GaussianNoise
from pyro_mcvae.truncated.guide import TruncatedPosterior
from pyro_mcvae.truncated.search import EvolutionaryUpdate, InformedFlips, UniformFlips

__all__ = [
    "HMC",
    "MALA",
    "NVIL",
    "REBAR",
    "RELAX",
    "ULA",
    "AdaptiveStepSize",
    "Baseline",
    "BernoulliPrior",
    "CompiledELBO",
    "Estimate",
    "EvolutionaryUpdate",
    "GaussianNoise",
    "GaussianReverse",
    "IndependentDraw",
    "InformedFlips",
    "Kernel",
    "LearnedMomentum",
    "LearnedSchedule",
    "LearnedStepSize",
    "LeaveOneOut",
    "LinearSchedule",
    "MonteCarloELBO",
    "MonteCarloEM",
    "Noise",
    "Proposal",
    "RandomWalk",
    "RankBatches",
    "Schedule",
    "ScoreNetwork",
    "SigmoidSchedule",
    "StepSize",
    "SummedMean",
    "TraceAIS_ELBO",
    "TraceIWAE_ELBO",
    "TraceRaoBlackwell_ELBO",
    "TraceRenyi_ELBO",
    "TraceSGVB_ELBO",
    "TraceSIS_ELBO",
    "TraceTruncated_ELBO",
    "TruncatedPosterior",
    "UnderdampedLangevin",
    "UniformFlips",
    "WakeSleep",
    "compare",
    "compare_models",
    "elbo_costs",
    "laplace_init",
    "load_checkpoint",
    "local_estimate",
    "log_evidence",
    "low_dimensional_evidence",
    "refine",
    "register_noise",
    "report",
    "sandwich",
    "save_checkpoint",
    "to_inference_data",
]

__version__ = "0.1.0"
