"""Where the guide's weights leave doubt, chains look; where these do, longer ones."""

from __future__ import annotations

import warnings

import torch

from pyro_mcvae.evaluation.annealing import make_annealing
from pyro_mcvae.evaluation.evidence import LogEvidence, estimate
from pyro_mcvae.evaluation.options import Options
from pyro_mcvae.evaluation.weights import Weights
from pyro_mcvae.programs.errors import first_line

__all__ = ["climb", "is_sure", "settled"]

# Steps of the chains: the second ones show whether the first were long enough.
_RUNGS = 10, 40
# Chains of all data together, and the fewest of each datum.
_CHAINS, _FEWEST = 10_000, 20
# Share of the weights that may be doubtful, and nats per weight that are no difference.
_FEW, _SMALL = 0.05, 0.02


def is_sure(evidence: LogEvidence) -> bool:
    """Whether the standard errors of nearly all weights can be relied on."""
    return float(evidence.doubtful.double().mean()) <= _FEW


def settled(short: LogEvidence, long: LogEvidence) -> bool:
    """Whether longer chains find the same, within two errors, so that a bias would show."""
    error = torch.hypot(short.mean_standard_error, long.mean_standard_error)
    return bool((long.mean - short.mean).abs() <= torch.clamp(2 * error, min=_SMALL))


def climb(weights: Weights, options: Options) -> tuple[tuple[LogEvidence, ...], str]:
    """
    Chains from the guide's draws, four times as long where the first leave doubt.

    :param weights: those of the guide.
    :returns: what they found, and why there are none.
    """
    count = min(options.num_particles, max(_FEWEST, _CHAINS // max(1, weights.elements)))
    found: list[LogEvidence] = []
    kernel = options.kernel
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for steps in _RUNGS:
                annealing = make_annealing(steps, kernel, options.coordinates, options.warmup)
                assert annealing is not None
                found.append(estimate(weights.annealed(annealing), count))
                if is_sure(found[-1]):
                    break
                kernel = annealing.kernel  # with the step size that it has found
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return tuple(found), first_line(error)
    return tuple(found), ""
