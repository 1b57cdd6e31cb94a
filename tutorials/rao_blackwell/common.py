"""Functions that all experiments use: data, results, tables, figures and Gumbel-softmax."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # the folder of all tutorials
from data import add_data_flags, mnist
from results import Results, same_settings

__all__ = [
    "GumbelSoftmax",
    "Results",
    "add_data_flags",
    "annealed",
    "draw_curves",
    "mnist",
    "same_settings",
    "write_table",
]


class GumbelSoftmax(dist.OneHotCategorical):
    """
    Draw one-hot vectors with the biased gradient of their Gumbel-softmax relaxation.

    This is the straight-through estimator of Jang et al. (2017).

    :param Tensor temperature: temperature of the relaxation, one number. It changes the gradient,
        but not the draws.
    """

    has_rsample = True

    def __init__(self, logits: Tensor, temperature: Tensor) -> None:
        super().__init__(logits=logits)
        self.temperature = temperature

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> GumbelSoftmax:
        return GumbelSoftmax(self.logits.expand(*batch_shape, -1), self.temperature)

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        logits = self.logits.expand(self._extended_shape(sample_shape))
        noise = -torch.empty_like(logits).exponential_().log()
        relaxed = ((logits + noise) / self.temperature).softmax(-1)
        hard = torch.zeros_like(relaxed).scatter(-1, relaxed.argmax(-1, keepdim=True), 1.0)
        return hard - relaxed.detach() + relaxed

    def log_prob(self, value: Tensor) -> Tensor:
        # Differentiable in the draw, so that the entropy has a gradient.
        return (value * self.logits).sum(-1)


def annealed(epoch: int, rate: float = 0.1, least: float = 0.5) -> float:
    """Return the temperature of an epoch, ``max(least, exp(-rate * epoch))``."""
    return max(least, math.exp(-rate * epoch))


def write_table(path: Path, header: list[str], rows: list[list[str]]) -> str:
    """Write and return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return text


def draw_curves(path: Path, curves: dict[str, list[float]], xlabel: str, ylabel: str) -> None:
    """Plot a line for each curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from pyro_mcvae.evaluation.plots import palette

    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.set_prop_cycle(palette())
    for name, values in curves.items():
        every = max(1, len(values) // 10)
        axes.plot(range(1, len(values) + 1), values, markevery=every, label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)  # whole epochs only
    axes.legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
