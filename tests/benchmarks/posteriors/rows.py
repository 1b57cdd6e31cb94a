"""What was found: a file that grows, tables and a figure of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyro_mcvae.evaluation.plots import STYLES
from tests.benchmarks.growing import GrowingFile
from tests.benchmarks.posteriors.trials import Trained

EVIDENCE = "evidence"
Found = list[tuple[str, dict[str, "Row"]]]
FAMILIES = ("SGVB", "IWAE", "SIS", "AIS", "SIS-ULA", "AIS-MALA", "AutoDAIS")


# Commit, model, guide, seed, steps of the ELBO, and of the objective.
Key = tuple[str, str, str, int, int, int]


@dataclass(frozen=True)
class Row:
    """
    :ivar commit: of the repository: rows of another one are another run's.
    :ivar elbo_steps: of the ELBO, before the ``steps`` of the objective.
    :ivar bound: in nats, with its standard error; NaN where a step was too dear.
    :ivar milliseconds: CPU time of a step; ``seconds`` that of all, recordings included.
    :ivar plain: how many times as long a step takes that is not recorded.
    """

    commit: str
    model: str
    guide: str
    seed: int
    elbo_steps: int
    steps: int
    objective: str
    bound: float
    error: float
    milliseconds: float = 0.0
    seconds: float = 0.0
    plain: float = math.nan

    @property
    def key(self) -> Key:
        return self.commit, self.model, self.guide, self.seed, self.elbo_steps, self.steps

    @classmethod
    def of(cls, key: Key, objective: str, result: Trained) -> Row:
        """A row of a trial."""
        return cls(*key, objective, **asdict(result))


class Rows(GrowingFile[Row]):
    """All rows of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Row)

    def has(self, key: Key, objective: str) -> bool:
        return any((r.key, r.objective) == (key, objective) for r in self.all)

    def evidence(self, model: str) -> Row | None:
        """Of all estimates, from whichever guides, the surest."""
        result = [r for r in self.all if (r.model, r.objective) == (model, EVIDENCE)]
        return min(result, key=lambda row: row.error, default=None)

    def posteriors(
        self, commit: str, elbo_steps: int, steps: int
    ) -> Iterator[tuple[str, dict[str, Row]]]:
        """Of one run each model and guide: the mean of its seeds by objective, and the evidence."""
        run = [r for r in self.all if r.objective != EVIDENCE]
        run = [r for r in run if (r.commit, *r.key[-2:]) == (commit, elbo_steps, steps)]
        for model, guide in dict.fromkeys((r.model, r.guide) for r in run):
            rows = [r for r in run if (r.model, r.guide) == (model, guide)]
            names = dict.fromkeys(r.objective for r in rows)
            means = {name: _mean([r for r in rows if r.objective == name]) for name in names}
            if evidence := self.evidence(model):
                yield f"{model}, {guide}", {EVIDENCE: evidence, **means}


def _mean(rows: list[Row]) -> Row:
    """Of seeds; the error is that of the mean, by the draws."""
    count, mean = len(rows), {}
    for name in ("bound", "milliseconds", "seconds", "plain"):
        mean[name] = sum(getattr(r, name) for r in rows) / count
    error = sum(r.error**2 for r in rows) ** 0.5 / count
    return Row(**{**asdict(rows[0]), **mean, "error": error})


def tables(result: Found) -> str:
    """Markdown: gaps in nats, milliseconds of a step, and how much longer a plain one takes."""
    names = list(dict.fromkeys(n for _, by_name in result for n in by_name if n != EVIDENCE))
    parts = ["Gaps to the evidence, in nats:", _table(result, names, _gap)]
    parts += [
        "Milliseconds of a step:",
        _table(result, names, lambda row, _: f"{row.milliseconds:.1f}"),
        "A plain step, in recorded ones:",
        _table(result, names, lambda row, _: "" if math.isnan(row.plain) else f"{row.plain:.1f}"),
    ]
    return "\n\n".join(parts)


def _gap(row: Row, evidence: Row) -> str:
    if math.isnan(row.bound):
        return f"too dear: {row.milliseconds / 1e3:.1f} s a step"
    return f"{evidence.bound - row.bound:.2f} ± {row.error:.2f}"


def _table(result: Found, names: list[str], cell: Any) -> str:
    lines = [["posterior", "evidence", *names], ["---", *["---:"] * (len(names) + 1)]]
    for posterior, rows in result:
        evidence = rows[EVIDENCE]
        cells = [cell(rows[n], evidence) if n in rows else "" for n in names]
        lines.append([posterior, f"{evidence.bound:.2f} ± {evidence.error:.2f}", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(result: Found, path: Path) -> None:
    """Gap over the time of a step, one panel for each posterior, up to a bit above the ELBO's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(result))
    height = -(-len(result) // columns)
    size = (3.4 * columns, 2.9 * height)
    drawn, axes = pyplot.subplots(height, columns, figsize=size, squeeze=False)
    for panel in axes.flat[len(result) :]:
        panel.set_visible(False)
    for panel, (posterior, by_name) in zip(axes.flat, result, strict=False):
        evidence = by_name[EVIDENCE]
        by_name = {n: row for n, row in by_name.items() if not math.isnan(row.bound)}
        for (family, chains), points in _families(by_name).items():
            points.sort(key=lambda row: int(re.sub(r"x.*|\D", "", row.objective) or 0))
            x = [row.milliseconds for row in points]
            y = [evidence.bound - row.bound for row in points]
            index = FAMILIES.index(family) if family in FAMILIES else 0
            color, marker = STYLES[index]
            style = {"color": color, "marker": marker, "linestyle": "--" if chains else "-"}
            label = family + (f", {chains} chains" if chains else "")
            panel.errorbar(
                x,
                y,
                [row.error for row in points],
                markersize=4,
                label=label,
                **style,
            )
        panel.set(xscale="log", title=posterior, xlabel="CPU ms a step", ylabel="gap, nats")
        highest = by_name.get("SGVB") or min(by_name.values(), key=lambda row: row.bound)
        panel.set_ylim(0, 1.1 * (evidence.bound - highest.bound))
        ticks = [1, 2, 5, 10, 20, 50, 100, 200]
        panel.set_xticks(ticks, map(str, ticks), minor=False)
        panel.set_xticks([], minor=True)
        panel.set_xlim(0.5, 250)
    shown = [panel.get_legend_handles_labels() for panel in axes.flat]
    legend = {label: handle for pair in shown for handle, label in zip(*pair, strict=True)}
    drawn.tight_layout(rect=(0, 0.06, 1, 1))
    drawn.legend(legend.values(), legend, loc="lower center", ncols=8, fontsize=8)
    drawn.savefig(path, dpi=110)
    pyplot.close(drawn)


def _families(by_name: dict[str, Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows that one line joins: of one kind of objective, and one number of chains."""
    families: dict[tuple[str, str], list[Row]] = {}
    for name, row in by_name.items():
        result = re.fullmatch(r"([A-Za-z-]+?)(?:-\d+)?(?:x(\d+))?", name)
        if result and name != EVIDENCE:
            families.setdefault((result[1], result[2] or ""), []).append(row)
    return families
