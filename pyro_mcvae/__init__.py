"""Monte Carlo objectives for Pyro: drop-in losses for latent-variable models."""

from pyro_mcvae.chains.hmc import HMC
from pyro_mcvae.chains.kernel import Info, Kernel, Proposal, State, Target
from pyro_mcvae.chains.langevin import MALA, ULA
from pyro_mcvae.chains.momentum import LearnedMomentum
from pyro_mcvae.chains.random_walk import RandomWalk
from pyro_mcvae.chains.schedules import (
    LearnedSchedule,
    LinearSchedule,
    Schedule,
    SigmoidSchedule,
)
from pyro_mcvae.chains.step_size import AdaptiveStepSize, LearnedStepSize
from pyro_mcvae.chains.step_size_base import StepSize
from pyro_mcvae.chains.underdamped import UnderdampedLangevin
from pyro_mcvae.comparisons.monte_carlo_em import MonteCarloEM
from pyro_mcvae.comparisons.wake_sleep import WakeSleep
from pyro_mcvae.compiled.elbo import CompiledELBO
from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.coordinates.noise import Noise, register_noise
from pyro_mcvae.discrete.control_variates import (
    NVIL,
    Baseline,
    IndependentDraw,
    LeaveOneOut,
    SummedMean,
)
from pyro_mcvae.discrete.relaxed_control_variates import REBAR, RELAX, GumbelSoftmax
from pyro_mcvae.elbos.ais import TraceAIS_ELBO
from pyro_mcvae.elbos.base import MonteCarloELBO
from pyro_mcvae.elbos.elbo_terms import local_estimate
from pyro_mcvae.elbos.estimate import Bounds, Estimate
from pyro_mcvae.elbos.iwae import TraceIWAE_ELBO
from pyro_mcvae.elbos.rao_blackwell import TraceRaoBlackwell_ELBO
from pyro_mcvae.elbos.renyi import TraceRenyi_ELBO
from pyro_mcvae.elbos.sgvb import TraceSGVB_ELBO
from pyro_mcvae.elbos.sis import TraceSIS_ELBO
from pyro_mcvae.elbos.truncated import TraceTruncated_ELBO
from pyro_mcvae.evaluation.compare import Comparison, TrainedCopy, compare
from pyro_mcvae.evaluation.compare_models import ModelComparison, compare_models
from pyro_mcvae.evaluation.draws import PosteriorDraws
from pyro_mcvae.evaluation.evidence import LogEvidence, log_evidence, log_evidence_loader
from pyro_mcvae.evaluation.inference_data import to_inference_data
from pyro_mcvae.evaluation.refine import refine
from pyro_mcvae.evaluation.report import Report, report
from pyro_mcvae.evaluation.sandwich import Sandwich, sandwich
from pyro_mcvae.training.batches import RankBatches
from pyro_mcvae.training.checkpoint import load_checkpoint, save_checkpoint
from pyro_mcvae.training.plateau import PlateauDetector
from pyro_mcvae.truncated.closed_form import BernoulliPrior, GaussianNoise
from pyro_mcvae.truncated.evolution import (
    EvolutionaryUpdate,
    FitnessProportional,
    InformedFlips,
    Mutation,
    Parents,
    UniformFlips,
)
from pyro_mcvae.truncated.guide import TruncatedPosterior
from pyro_mcvae.truncated.posterior import StatePosterior
from pyro_mcvae.truncated.search import PriorDraws

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
    "Bounds",
    "Comparison",
    "CompiledELBO",
    "Estimate",
    "EvolutionaryUpdate",
    "FitnessProportional",
    "GaussianNoise",
    "GumbelSoftmax",
    "IndependentDraw",
    "Info",
    "InformedFlips",
    "Kernel",
    "LearnedMomentum",
    "LearnedSchedule",
    "LearnedStepSize",
    "LeaveOneOut",
    "LinearSchedule",
    "LogEvidence",
    "LogWeight",
    "ModelComparison",
    "MonteCarloELBO",
    "MonteCarloEM",
    "Mutation",
    "Noise",
    "Parents",
    "PlateauDetector",
    "PosteriorDraws",
    "PriorDraws",
    "Proposal",
    "RandomWalk",
    "RankBatches",
    "Report",
    "Sandwich",
    "Schedule",
    "SigmoidSchedule",
    "State",
    "StatePosterior",
    "StepSize",
    "SummedMean",
    "Target",
    "TraceAIS_ELBO",
    "TraceIWAE_ELBO",
    "TraceRaoBlackwell_ELBO",
    "TraceRenyi_ELBO",
    "TraceSGVB_ELBO",
    "TraceSIS_ELBO",
    "TraceTruncated_ELBO",
    "TrainedCopy",
    "TruncatedPosterior",
    "UnderdampedLangevin",
    "UniformFlips",
    "WakeSleep",
    "compare",
    "compare_models",
    "load_checkpoint",
    "local_estimate",
    "log_evidence",
    "log_evidence_loader",
    "refine",
    "register_noise",
    "report",
    "sandwich",
    "save_checkpoint",
    "to_inference_data",
]

__version__ = "0.1.0"
