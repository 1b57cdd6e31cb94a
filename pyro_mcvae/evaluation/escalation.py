"""Where the guide's weights leave doubt, chains look; where these do, longer and whitened ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_mcvae.evaluation.annealing import JudgeCoordinates, make_annealing
from pyro_mcvae.evaluation.evidence import LogEvidence, estimate
from pyro_mcvae.evaluation.options import Options
from pyro_mcvae.evaluation.weights import Weights
from pyro_mcvae.programs.errors import first_line

__all__ = ["climb", "is_sure", "settled"]

# Steps of the chains: the second ones show whether the first were long enough. Where they were not,
# the last ones move in coordinates of their own.
_RUNGS: tuple[tuple[int, JudgeCoordinates | None], ...]
_RUNGS = (10, None), (40, None), (40, "whitened")
# Chains of all data together, and the fewest of each datum.
_CHAINS, _FEWEST = 10_000, 20
# Share of the weights that may be doubtful; nats per weight that are no difference, and an error
# within which nearly everything agrees.
_FEW, _SMALL, _WIDE = 0.05, 0.02, 0.1


def is_sure(evidence: LogEvidence) -> bool:
    """Whether the standard errors of nearly all weights can be relied on."""
    return float(evidence.doubtful.double().mean()) <= _FEW


def settled(short: LogEvidence, long: LogEvidence) -> bool:
    """Whether longer chains find the same, within two errors, so that a bias would show."""
    error = _error(short, long)
    return bool((long.mean - short.mean).abs() <= torch.clamp(2 * error, min=_SMALL))


def _error(short: LogEvidence, long: LogEvidence) -> Tensor:
    """Of their difference, in nats per weight."""
    return torch.hypot(short.mean_standard_error, long.mean_standard_error)


def climb(weights: Weights, options: Options) -> tuple[tuple[LogEvidence, ...], str]:
    """
    Chains from the guide's draws, four times as long where the first leave doubt; and from a normal
    density that is fitted to the posterior, where both do, unless they closely agree.

    :param weights: those of the guide.
    :returns: what they found, the surest last, and why there are none.
    """
    found: list[LogEvidence] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for evidence in _rungs(weights, options):
                found.append(evidence)
                if is_sure(evidence) or _agree(found[-2:]):
                    break
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return tuple(found), first_line(error)
    # Each is a lower bound in expectation.
    return (*found[:1], *sorted(found[1:], key=lambda e: float(e.mean))), ""


def _agree(last: list[LogEvidence]) -> bool:
    """Whether the last two found the same, and not for the width of their errors alone."""
    return len(last) > 1 and settled(*last) and bool(_error(*last) <= _WIDE)


def _rungs(weights: Weights, options: Options) -> Iterator[LogEvidence]:
    count = min(options.num_particles, max(_FEWEST, _CHAINS // max(1, weights.elements)))
    kernel = options.kernel
    for steps, own in _RUNGS:
        if own and (weights.discrete or options.coordinates == own):
            return
        coordinates = own or options.coordinates
        warmup = max(1, options.warmup) if own else options.warmup
        annealing = make_annealing(steps, options.kernel if own else kernel, coordinates, warmup)
        assert annealing is not None
        yield estimate(weights.annealed(annealing), count)
        kernel = annealing.kernel  # with the step size that it has found
