"""The figure of a comparison of losses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyro_mcvae.evaluation.trained_copy import TrainedCopy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["draw"]

# How many points of a bound, each a mean over steps, are drawn.
_POINTS = 200


def draw(
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
