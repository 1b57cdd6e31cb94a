"""How every judge begins: the weights of programs, which stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pyro import poutine

from pyro_mcvae.coordinates.chain_density import outside_inference_mode
from pyro_mcvae.evaluation.annealing import Annealing
from pyro_mcvae.evaluation.evaluation_mode import evaluation_mode
from pyro_mcvae.evaluation.importance_sampler import ImportanceSampler
from pyro_mcvae.evaluation.options import Options
from pyro_mcvae.evaluation.state_weights import StateWeights
from pyro_mcvae.evaluation.weights import Weights
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.progress import Progress
from pyro_mcvae.truncated.guide import TruncatedPosterior

__all__ = ["has_states", "importance_sampler", "make_weights", "weights_of"]


@contextmanager
def weights_of(
    programs: Programs, options: Options, annealing: Annealing | None = None
) -> Iterator[Weights]:
    """The weights of programs, or of their chains."""
    with (
        evaluation_mode(programs.model, programs.guide, seed=options.seed),
        outside_inference_mode(programs) as programs,
        Progress("judging", options.progress, "particle") as progress,
        torch.no_grad(),
    ):
        yield make_weights(programs, options, annealing, progress)


def make_weights(
    programs: Programs,
    options: Options,
    annealing: Annealing | None = None,
    progress: Progress | None = None,
) -> Weights:
    """The weights of programs that are being evaluated."""
    progress = progress or Progress("judging", show=False)
    if not has_states(programs):
        return ImportanceSampler(programs, options, progress, annealing)
    weights = StateWeights(programs, options, progress)
    return weights if annealing is None else weights.annealed(annealing)


def has_states(programs: Programs) -> bool:
    """Whether the guide is a truncated posterior."""
    return isinstance(poutine.unwrap(programs.guide), TruncatedPosterior)


@contextmanager
def importance_sampler(
    programs: Programs, options: Options, annealing: Annealing | None = None
) -> Iterator[ImportanceSampler]:
    """
    The same, of judges that move draws of the guide.

    :raises ValueError: for a guide of states.
    """
    with weights_of(programs, options, annealing) as weights:
        if not isinstance(weights, ImportanceSampler):
            raise ValueError(
                "the latents of a TruncatedPosterior are discrete, and here they would be moved: "
                "judge it by log_evidence, report, refine or sandwich, which look at its states"
            )
        yield weights
