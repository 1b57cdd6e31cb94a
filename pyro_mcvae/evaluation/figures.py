"""The figures of reports and comparisons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from pyro_mcvae.evaluation.trained_copy import TrainedCopy

__all__ = ["draw_comparison", "draw_report"]

# How many points of a bound, each a mean over steps, are drawn.
_POINTS = 200


def draw_report(report: Any) -> Figure:
    """The gaps' histogram, k-hat and effective sample size of each datum; of one, the evidence."""
    from matplotlib.figure import Figure

    if report.gap.numel() == 1:
        figure = Figure(figsize=(6.5, 2.8), layout="constrained")
        _draw_evidences(figure.subplots(), report)
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


def _draw_evidences(axes: Axes, report: Any) -> None:
    """One weight: the ELBO, and each estimate of the evidence with two of its errors."""
    found = {"the guide's weights": report.guide}
    for chains in report.chains:
        found[f"chains of {len(chains.acceptance) + 1} steps"] = chains
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


def _plain(value: Tensor) -> list[float]:
    return value.detach().double().flatten().cpu().tolist()


def draw_comparison(
    found: Mapping[str, TrainedCopy],
    figure: Figure | SubFigure | None = None,
    over: str = "seconds",
) -> Figure | SubFigure:
    """Each loss's own bound, and the evidence of the judged data, over time."""
    if over not in ("seconds", "steps"):
        raise ValueError(f"over must be 'seconds' or 'steps', got {over!r}")
    if figure is None:
        from matplotlib.figure import Figure as New

        figure = New(figsize=(10, 3.6), layout="constrained")
    bounds, evidence = figure.subplots(1, 2)
    for i, (name, copy) in enumerate(found.items()):
        _draw_bounds(bounds, name, copy, f"C{i}", over)
        _draw_evidence(evidence, copy, f"C{i}", over)
    bounds.set(title="each loss's own bound (training)", ylabel="nats per weight")
    evidence.set(title="log evidence of the judged data, one estimator")
    _look_at_the_end(bounds, [line.get_ydata() for line in bounds.lines])
    curves = [[float(e.mean) for _, e in c.curve.values()] for c in found.values()]
    _look_at_the_end(evidence, curves)
    bounds.legend(loc="lower right", fontsize="small")
    for axes in (bounds, evidence):
        axes.set_xlabel(f"{over} of training")
        axes.grid(alpha=0.3)
    return figure


def _draw_bounds(axes: Axes, name: str, copy: TrainedCopy, color: str, over: str) -> None:
    size = max(1, len(copy.bounds) // _POINTS)
    ends = range(size, len(copy.bounds) + 1, size)
    means = [sum(copy.bounds[end - size : end]) / size for end in ends]
    passed = list(itertools.accumulate(copy.times))
    at = list(ends) if over == "steps" else [passed[end - 1] for end in ends]
    axes.plot(at, means, color=color, linewidth=1, label=name)


def _draw_evidence(axes: Axes, copy: TrainedCopy, color: str, over: str) -> None:
    at = [step if over == "steps" else seconds for step, (seconds, _) in copy.curve.items()]
    means = [float(e.mean) for _, e in copy.curve.values()]
    errors = [2 * float(e.mean_standard_error) for _, e in copy.curve.values()]
    axes.errorbar(at, means, errors, color=color, marker="o", markersize=3.5, linewidth=1)


def _look_at_the_end(axes: Axes, curves: Sequence[Sequence[float]]) -> None:
    """The first steps lie far below the rest and would flatten everything else."""
    shown = [v for curve in curves for v in curve[len(curve) // 5 :]]
    if shown and min(shown) < max(shown):
        low, high = min(shown), max(shown)
        axes.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
