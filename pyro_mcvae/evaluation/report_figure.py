"""The figure of a report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pyro_mcvae.evaluation.verdict import Report

__all__ = ["draw"]


def draw(report: Report) -> Figure:
    """The gaps' histogram, and k-hat and effective sample size of each datum."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.2), layout="constrained")
    gaps, tails, sizes = figure.subplots(1, 3)
    gap = _plain(report.gap)
    gaps.hist(gap, bins=min(30, max(5, len(gap) // 3)), color="C0")
    gaps.axvline(float(report.gap.mean()), color="k", linewidth=1, label="mean")
    gaps.legend(fontsize="small")
    gaps.set(xlabel="gap: log evidence - ELBO (nats)", ylabel="data")
    k = _plain(report.guide.pareto_k)
    finite = [v for v in k if math.isfinite(v)]
    low, high = min([*finite, 0.0]) - 0.1, max([*finite, 1.0]) + 0.1
    tails.scatter(gap, [min(max(v, low), high) for v in k], s=8, color="C0")
    for level, style in ((0.5, ":"), (0.7, "--")):
        tails.axhline(level, color="k", linewidth=1, linestyle=style)
    tails.set(xlabel="gap (nats)", ylabel="Pareto k (0.7: unreliable)")
    sizes.scatter(gap, _plain(report.guide.effective_sample_size), s=8, color="C1")
    sizes.set(
        xlabel="gap (nats)",
        ylabel=f"effective sample size of {report.guide.num_particles}",
        yscale="log",
    )
    return figure


def _plain(value: Tensor) -> list[float]:
    return value.detach().double().flatten().cpu().tolist()
