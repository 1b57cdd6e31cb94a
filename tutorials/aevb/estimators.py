"""Estimators of the marginal likelihood of a trained model, for figure 3."""

import warnings
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import VAE
from torch import Tensor

from pyro_mcvae import log_evidence, low_dimensional_evidence, refine


@dataclass
class Estimates:
    """Estimates for a trained model: means over images, in nats per image."""

    value: float
    error: float  # standard error over the evaluated images
    monte_carlo_error: float = float("nan")  # of the mean, from the spread of the weights
    unreliable: float = float("nan")  # fraction of images with a Pareto k above 0.7
    appendix_d: float = float("nan")  # the paper's estimator


class Around:
    """
    A guide without an encoder: kernels around posterior draws of each image. One draw in ten is
    from the prior, so that the guide covers the whole posterior.

    :param draws: posterior draws, shape ``[draws, images, latents]``.
    """

    def __init__(self, draws: Tensor, prior: float = 0.1) -> None:
        count, images, dims = draws.shape
        width = draws.std(0).clamp_min(1e-3) * (4 / ((dims + 2) * count)) ** (1 / (dims + 4))
        loc = torch.cat([draws, draws.new_zeros(1, images, dims)]).transpose(0, 1)
        scale = torch.cat(
            [width.unsqueeze(1).expand(-1, count, -1), torch.ones_like(loc[:, :1])], 1
        )
        shares = torch.cat(
            [draws.new_full((count,), (1 - prior) / count), draws.new_tensor([prior])]
        )
        kernels = dist.Normal(loc, scale).to_event(1)
        self.density = dist.MixtureSameFamily(dist.Categorical(shares.expand(images, -1)), kernels)

    def guide(self, x: Tensor) -> None:
        with pyro.plate("data", len(x), dim=-1):
            pyro.sample("z", self.density)


def marginal(vae: VAE, x: Tensor, guide: Any, draws: int, particles: int, warmup: int) -> Estimates:
    """
    Estimate log p(x) by importance sampling around draws of annealed chains, in two stages.

    The draws of the second stage are independent of those of the first. The estimate is therefore a
    lower bound in expectation, and its k-hat measures its reliability. The estimate of appendix D
    is returned, too.

    :param guide: the start of the chains: the encoder, or the prior.
    :param draws: number of posterior draws of each image for the guide of the second stage.
    :param particles: number of weights of each image in the second stage.
    :param warmup: transitions before the draws of appendix D.
    """
    with warnings.catch_warnings():
        # Warnings about the k-hat of the first stage, which is not reported.
        warnings.simplefilter("ignore", UserWarning)
        result = refine(
            vae.model,
            guide,
            x,
            num_samples=draws,
            num_particles=4,
            schedule=10,
            warmup=min(20, warmup),
        )
    around = Around(result["z"])
    evidence = log_evidence(vae.model, around.guide, x, num_particles=particles)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        papers = low_dimensional_evidence(vae.model, guide, x, num_transitions=max(1, warmup))
    values, errors = evidence.log_evidence, evidence.standard_error
    return Estimates(
        values.mean().item(),
        values.std().item() / len(values) ** 0.5,
        errors.square().sum().sqrt().item() / len(values),
        evidence.unreliable.double().mean().item(),
        papers.log_evidence.mean().item(),
    )
