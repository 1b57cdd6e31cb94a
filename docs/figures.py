"""Figures that show tables of results: ``python docs/figures.py`` writes them from the files.

Each series has one color of Okabe and Ito and one marker, in all figures.
"""

import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from result_tables import read

from pyro_mcvae.evaluation.plots import STYLES

IMAGES = Path(__file__).parent / "images"
BLACK, BLUE, ORANGE, PINK, GREEN, RED, *_ = (color for color, _ in STYLES)


def number(text: str) -> float:
    """Return the first number of a cell."""
    found = re.search(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[0].replace(",", "")) if found else float("nan")


def bars(axes: Axes, labels: list[str], values: list[float], best: str) -> None:
    """Draw gaps as bars, with their numbers; the best choice is dark."""
    colors = [BLUE if label == best else "#B7CEDE" for label in labels]
    axes.barh(labels[::-1], values[::-1], color=colors[::-1])
    for i, value in enumerate(values[::-1]):
        axes.text(value, i, f" {value:.1f}", va="center")
    axes.set_xlim(0, 1.15 * max(values))
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def hero() -> None:
    """Draw the gaps of six objectives on two posteriors."""
    table = read("draws_or_chains")
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, column, title, best in zip(
        panels,
        table.header[1::2],
        ("Near the guide: 100 draws suffice", "Far from the guide: chains win"),
        ("IWAE-100", "SIS-10, 8 chains"),
        strict=True,
    ):
        labels = [row[0] for row in table.rows]
        bars(axes, labels, [number(table(label, column)) for label in labels], best)
        axes.set_title(title, fontweight="bold")
        axes.set_xlabel(f"nats below log p(x): less is better\n{column}")
    figure.savefig(IMAGES / "hero.png", dpi=150)


def posteriors() -> None:
    """Draw the gap over the time of a step, one panel for each posterior."""
    gaps, times = read("posteriors"), read("posteriors_time")
    series = {
        "ELBO": (["ELBO"], BLACK, "o"),
        "IWAE-10, -100, -1000": (["IWAE-10", "IWAE-100", "IWAE-1000"], BLUE, "s"),
        "SIS-5, -10, -32": (["SIS-5", "SIS-10", "SIS-32"], ORANGE, "^"),
        "SIS-10, 8 chains": (["SIS-10, 8 chains"], RED, "*"),
        "AIS-5, -10": (["AIS-5", "AIS-10"], PINK, "D"),
    }
    rows = [row[0] for row in gaps.rows if all(row)]
    figure = Figure(figsize=(10, 9), layout="constrained")
    grid = figure.subplots(4, 3).flat
    for axes, row in zip(grid, rows, strict=False):
        for label, (columns, color, marker) in series.items():
            x = [number(times(row, column)) for column in columns]
            y = [number(gaps(row, column)) for column in columns]
            axes.plot(x, y, color=color, marker=marker, markersize=8, label=label)
        axes.set_xscale("log")
        axes.set_xticks([1, 10, 100], ["1", "10", "100"])
        axes.minorticks_off()
        axes.set_ylim(0)
        axes.set_title(row.replace(", ", "\n", 1), fontsize=10)
        axes.grid(alpha=0.3)
    for axes in list(figure.axes)[len(rows) :]:
        axes.axis("off")
    figure.axes[len(rows)].legend(*figure.axes[0].get_legend_handles_labels(), loc="center")
    figure.supxlabel("milliseconds of a step")
    figure.supylabel("gap to log p(x), nats: lower is better")
    figure.savefig(IMAGES / "posteriors.png", dpi=110)


def posteriordb() -> None:
    """Draw the errors of draws over the time, one marker for each posterior and method."""
    table = read("posteriordb_methods")
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    colors = ((BLUE, "s"), (BLACK, "o"), (PINK, "D"), (ORANGE, "^"), (GREEN, "v"))
    for method, (color, marker) in zip(table.header[1:], colors, strict=True):
        cells = [cell.split(", ") for cell in (table(row[0], method) for row in table.rows)]
        points = [(float(c[2]), max(map(float, c[:2]))) for c in cells if len(c) == 3]
        if points:
            x, y = zip(*points, strict=True)
            style = {"color": color, "marker": marker, "alpha": 0.8, "label": method}
            axes.scatter(x, [min(error, 100.0) for error in y], s=36, **style)
    axes.axhline(0.15, color="#777777", linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="CPU seconds, with compilation")
    axes.set_ylabel("largest error of a mean or log sd")
    axes.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
    axes.set_yticks([0.03, 0.15, 1, 10, 100], ["0.03", "0.15", "1", "10", "100 or more"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(IMAGES / "posteriordb.png", dpi=120)


def frontier() -> None:
    """Draw the bound over the number of transitions, one panel for each model."""
    table, guides = read("frontier_transitions"), read("frontier")
    series = {
        "UHA": ("UHA", BLACK, "o"),
        "LDVI": ("LDVI", ORANGE, "^"),
        "default": ("default", PINK, "D"),
        "mass matrix": ("mass", BLUE, "s"),
    }
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    grid = list(figure.subplots(2, 3).flat)
    for axes, model in zip(grid, [row[0] for row in guides.rows], strict=False):
        rows = [row for row in table.rows if row[0] == model]
        for label, (column, color, marker) in series.items():
            i = table.header.index(column)
            points = [(int(row[1]), number(row[i])) for row in rows if row[i]]
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, label=label)
        level = number(guides(model, "full-rank ELBO"))
        axes.axhline(level, color=GREEN, linestyle="--", label="full-rank guide, no chain")
        axes.set_xscale("log", base=2)
        axes.set_xticks([8, 16, 32, 64, 128], ["8", "16", "32", "64", "128"])
        axes.set_title(model)
        axes.grid(alpha=0.3)
    grid[-1].axis("off")
    grid[-1].legend(*grid[0].get_legend_handles_labels(), loc="center")
    figure.supxlabel("number of transitions K")
    figure.supylabel("bound on log p(x), nats: higher is better")
    figure.savefig(IMAGES / "frontier.png", dpi=110)


def mnist() -> None:
    """Draw the likelihood of the convolutional networks after three epochs, over the time."""
    table = read("mnist_convolutional")
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    kinds = {"ELBO": (BLACK, "o"), "IWAE": (BLUE, "s"), "SIS": (ORANGE, "^"), "AIS": (PINK, "D")}
    for row in table.rows:
        color, marker = kinds[row[0].split("-")[0]]
        seconds = number(table(row[0], "CPU seconds"))
        nll = number(table(row[0], "ten chains of 40 steps"))
        axes.plot(seconds, nll, color=color, marker=marker, markersize=9)
        label = row[0].replace(" in the latents", "").split(" (")[0]
        below = -14 if "MALA" in label else 4
        axes.annotate(label, (seconds, nll), (8, below), textcoords="offset points", fontsize=9)
    axes.set(xlabel="CPU seconds of training", ylabel="negative log-likelihood, nats per image")
    axes.set_xlim(0, 3600)
    axes.margins(y=0.12)
    axes.grid(alpha=0.3)
    figure.savefig(IMAGES / "mnist_convolutional.png", dpi=120)


def aevb_dimensions() -> None:
    """Draw the bounds of AEVB and wake-sleep over training samples, one panel per latent space."""
    table = read("aevb_dimensions")
    columns = table.header[1:-1]
    samples = [number(column) for column in columns]
    rows = {row[0].rsplit(": ", 1)[0]: None for row in table.rows}
    figure = Figure(figsize=(2.6 * len(rows), 3.4), layout="constrained")
    series = {"AEVB": (BLUE, "s"), "wake-sleep": (ORANGE, "^")}
    for axes, row in zip(figure.subplots(1, len(rows)), rows, strict=True):
        for name, (color, marker) in series.items():
            cells = [table(f"{row}: {name}", column) for column in columns]
            cells = [cell for cell in cells if cell]
            train, test = ([number(c.split(" (")[i]) for c in cells] for i in (1, 0))
            style = {"color": color, "marker": marker, "markersize": 4}
            x = samples[: len(cells)]
            axes.plot(x, train, label=f"{name}, training", **style)
            axes.plot(x, test, linestyle="--", label=f"{name}, test", **style)
        axes.set(xscale="log", title=row, xlabel="training samples")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("bound per image, nats")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(IMAGES / "aevb_dimensions.png", dpi=120)


def moving_mnist() -> None:
    """Draw the bound of four estimators of a position over the epochs."""
    table = read("moving_mnist")
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    columns = table.header[1:5]
    epochs = [number(column) for column in columns]
    for row, (color, marker) in zip(table.rows, STYLES, strict=False):
        values = [table(row[0], column) for column in columns]
        errors = [number(value.split("±")[1]) for value in values]
        style = {"color": color, "marker": marker, "capsize": 3, "label": row[0]}
        axes.errorbar(epochs, [number(value) for value in values], errors, **style)
    axes.set(xlabel="epoch", ylabel="negative ELBO of test frames, nats", xticks=epochs)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(IMAGES / "moving_mnist.png", dpi=120)


if __name__ == "__main__":
    hero()
    posteriors()
    posteriordb()
    frontier()
    mnist()
    moving_mnist()
    aevb_dimensions()
