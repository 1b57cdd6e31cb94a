"""Figures of a report and of a comparison, as matplotlib axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyro_mcvae.evaluation.evidence import LogEvidence

# Colors of Okabe and Ito (and gray), which differ for everyone, and markers.
STYLES = (
    *(("#000000", "o"), ("#0072B2", "s"), ("#E69F00", "^"), ("#CC79A7", "D")),
    *(("#009E73", "v"), ("#D55E00", "P"), ("#56B4E9", "X"), ("#7F7F7F", "*")),
)


def palette() -> Any:
    """
    Return these colors and markers as a cycle of matplotlib.

    Example::

        >>> from pyro_mcvae.evaluation.plots import palette
        >>> import matplotlib.pyplot as plt  # doctest: +SKIP
        >>> plt.rc("axes", prop_cycle=palette())  # doctest: +SKIP
    """
    from cycler import cycler  # which matplotlib needs

    colors, markers = zip(*STYLES, strict=True)
    return cycler(color=colors) + cycler(marker=markers)


def panels(axes: Any) -> tuple[Any, Any]:
    """Return two axes: new ones, or those that were passed."""
    if axes is not None:
        left, right = axes
        return left, right
    from matplotlib import pyplot

    _, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    return left, right


def plot_estimates(axes: Any, rows: Sequence[tuple[str, Tensor | LogEvidence]]) -> None:
    """Plot bounds, and log evidences with two standard errors, one row each, in nats per weight."""
    for i, (label, estimate) in enumerate(rows):
        color, marker = STYLES[i % len(STYLES)]
        error = 0.0
        if isinstance(estimate, LogEvidence):
            error = 2 * float(estimate.mean_standard_error)
            estimate = estimate.mean
        axes.errorbar(
            float(estimate), i, xerr=error, color=color, marker=marker, capsize=3, label=label
        )
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="nats per weight (bars: two errors)")
    axes.grid(axis="x", alpha=0.3)


def plot_gaps(axes: Any, gap: Tensor, pareto_k: Tensor) -> None:
    """Plot the gap of each datum over the k-hat of its weights."""
    k = pareto_k.flatten().clamp_min(-1.0)  # minus infinity: equal weights
    bad = (k > 0.7).cpu()
    gap, k = gap.flatten().cpu(), k.cpu()
    for mask, (color, marker), label in (
        (~bad, STYLES[1], f"k-hat up to 0.7: {int((~bad).sum())}"),
        (bad, STYLES[2], f"above, unreliable: {int(bad.sum())}"),
    ):
        axes.scatter(k[mask], gap[mask], s=22, color=color, marker=marker, label=label)
    axes.axvline(0.7, color="gray", linestyle="--", linewidth=1)
    axes.set(
        xlabel="Pareto k-hat of the guide's weights", ylabel="gap of the ELBO, nats per weight"
    )
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def plot_curves(axes: Any, curves: dict[str, dict[int, LogEvidence]]) -> None:
    """Plot the log evidence over the steps of training, one curve per loss."""
    late: list[float] = []
    for i, (name, curve) in enumerate(curves.items()):
        color, marker = STYLES[i % len(STYLES)]
        values = [float(e.mean) for e in curve.values()]
        errors = [2 * float(e.mean_standard_error) for e in curve.values()]
        style = {"color": color, "marker": marker, "markersize": 5, "label": name}
        axes.errorbar(list(curve), values, errors, **style)
        late += values[len(values) // 5 :]
    if late:  # the first steps are far below all others
        margin = 0.1 * (max(late) - min(late)) + 1e-3
        axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set(xlabel="steps of training", ylabel="log evidence, nats per weight")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
