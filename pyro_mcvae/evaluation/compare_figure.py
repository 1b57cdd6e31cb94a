"""The figure of a comparison of losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyro_mcvae.evaluation.trained_copy import TrainedCopy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

# How many points of a bound, each a mean over steps, are drawn.
_POINTS = 200


def draw(found: Mapping[str, TrainedCopy]) -> Figure:
    """Each loss's own bound, and the evidence of the judged data, over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    bounds, evidence = figure.subplots(1, 2)
    for i, (name, copy) in enumerate(found.items()):
        _draw_bounds(bounds, name, copy, f"C{i}")
        _draw_evidence(evidence, copy, f"C{i}")
    bounds.set(title="each loss's own bound (training)", ylabel="nats per weight")
    evidence.set(title="log evidence of the judged data, one estimator")
    _look_at_the_end(bounds, [c.bounds for c in found.values()])
    curves = [[float(e.mean) for _, e in c.curve.values()] for c in found.values()]
    _look_at_the_end(evidence, curves)
    bounds.legend(loc="lower right", fontsize="small")
    for axes in (bounds, evidence):
        axes.set_xlabel("seconds of training")
        axes.grid(alpha=0.3)
    return figure


def _draw_bounds(axes: Axes, name: str, copy: TrainedCopy, color: str) -> None:
    size = max(1, len(copy.bounds) // _POINTS)
    means = [
        sum(copy.bounds[i : i + size]) / size for i in range(0, len(copy.bounds) - size + 1, size)
    ]
    at = [(i + 1) / max(1, len(means)) * copy.seconds for i in range(len(means))]
    axes.plot(at, means, color=color, linewidth=1, label=name)


def _draw_evidence(axes: Axes, copy: TrainedCopy, color: str) -> None:
    at = [seconds for seconds, _ in copy.curve.values()]
    means = [float(e.mean) for _, e in copy.curve.values()]
    errors = [2 * float(e.mean_standard_error) for _, e in copy.curve.values()]
    axes.errorbar(at, means, errors, color=color, marker="o", markersize=3.5, linewidth=1)


def _look_at_the_end(axes: Axes, curves: Sequence[Sequence[float]]) -> None:
    """The first steps lie far below the rest and would flatten everything else."""
    shown = [v for curve in curves for v in curve[len(curve) // 5 :]]
    if shown and min(shown) < max(shown):
        low, high = min(shown), max(shown)
        axes.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
