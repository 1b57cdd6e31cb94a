"""The figure of a report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from pyro_mcvae.evaluation.evidence import LogEvidence
from pyro_mcvae.evaluation.findings import Findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


__all__ = ["draw"]


def draw(report: Findings) -> Figure:
    """The gaps' histogram, and k-hat and effective sample size of each datum; or one weight's."""
    from matplotlib.figure import Figure

    if report.gap.numel() == 1:
        figure = Figure(figsize=(9, 2.8), layout="constrained")
        evidences, tails = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_evidences(evidences, report)
        _draw_tails(tails, report)
        return figure
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


def _found(report: Findings) -> dict[str, LogEvidence]:
    """What was estimated, by who did."""
    found = {"the guide's weights": report.guide}
    for chains in report.chains:
        steps = 0 if chains.acceptance is None else len(chains.acceptance) + 1
        found[f"chains of {steps} steps"] = chains
    return found


def _draw_evidences(axes: Axes, report: Findings) -> None:
    """One weight: the ELBO, and each estimate of the evidence with two of its errors."""
    found = _found(report)
    names = ["ELBO", *found]
    axes.plot([float(report.bound)], [0], "|", color="C1", markersize=14)
    for i, evidence in enumerate(found.values()):
        error = 2 * float(evidence.standard_error)
        value = float(evidence.log_evidence)
        axes.errorbar([value], [i + 1], xerr=[error], fmt="o", color="C0")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="log evidence (nats), two standard errors", ylim=(len(names) - 0.5, -0.5))
    axes.margins(x=0.1)
    axes.grid(alpha=0.3)


def _draw_tails(axes: Axes, report: Findings) -> None:
    """One weight: k-hat with two of its errors."""
    found = _found(report)
    for i, evidence in enumerate(found.values()):
        k, error = float(evidence.pareto_k), 2 * float(evidence.pareto_k_error)
        if math.isfinite(k):
            axes.errorbar([k], [i], xerr=[error], fmt="o", color="C0")
        else:
            axes.text(0.5, i, f"{k}", ha="center", va="center")
    for level, style in ((0.5, ":"), (0.7, "--")):
        axes.axvline(level, color="k", linewidth=1, linestyle=style)
    low, high = axes.get_xlim()
    axes.set(
        xlabel="Pareto k, two standard errors",
        xlim=(min(low, 0.0), max(high, 1.0)),
        ylim=(len(found) - 0.5, -0.5),
    )
    axes.set_yticks(range(len(found)), list(found))
    axes.grid(alpha=0.3)


def _plain(value: Tensor) -> list[float]:
    return value.detach().double().flatten().cpu().tolist()
