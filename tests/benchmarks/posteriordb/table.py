"""
Print a table of the results from the file of the benchmark.

    python -m tests.benchmarks.posteriordb.table draws.csv
    python -m tests.benchmarks.posteriordb.table draws.csv --by-seed

The first has all methods with seed 0, and prints how many posteriors each has within 0.15 and its
median CPU seconds. The second has the largest errors of ``refine`` over seeds, the number of seeds
whose draws are trusted, and the median CPU seconds, beside NUTS of NumPyro.
"""

import csv
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

LIMIT = 0.15
NAMES = {
    "refine": "refine",
    "numpyro": "NUTS, NumPyro",
    "pyro": "NUTS, Pyro",
    "pathfinder": "Pathfinder",
    "advi": "ADVI",
}
BY_SEED = ["posterior", "mean", "log sd", "trusted", "CPU s"]
BY_SEED += ["NUTS: mean", "NUTS: log sd", "NUTS: CPU s"]
Rows = dict[str, dict[str, list[dict[str, str]]]]


def read(path: str) -> Rows:
    """Return the rows of a file by posterior and method."""
    groups: Rows = defaultdict(lambda: defaultdict(list))
    with Path(path).open(newline="") as file:
        for row in csv.DictReader(file):
            groups[row["posterior"]][row["method"]].append(row)
    return groups


def line(cells: list[str]) -> None:
    print("|".join(["", *cells, ""]))


def numbers(row: dict[str, str]) -> list[str]:
    """Return the two errors and the seconds."""
    return [f"{float(row[k]):.{n}f}" for k, n in (("mean", 2), ("log_sd", 2), ("seconds", 1))]


def by_method(groups: Rows) -> None:
    line(["posterior", *NAMES.values()])
    line(["---"] * (1 + len(NAMES)))
    for name, methods in groups.items():
        first = [methods[m][0] if methods[m] else None for m in NAMES]
        cells = [", ".join(numbers(r)) if r and r["mean"] != "nan" else "—" for r in first]
        line([name, *(c if r else "" for c, r in zip(cells, first, strict=True))])
    for method, label in NAMES.items():
        rows = [methods[method][0] for methods in groups.values() if methods[method]]
        errors = [max(float(r["mean"]), float(r["log_sd"])) for r in rows]
        within = sum(not math.isnan(e) and e < LIMIT for e in errors)
        if rows:
            seconds = median(float(r["seconds"]) for r in rows)
            print(f"{label}: {within} of {len(rows)} within {LIMIT}, median {seconds:.1f} s")


def by_seed(groups: Rows) -> None:
    line(BY_SEED)
    line(["---"] * len(BY_SEED))
    for name, methods in groups.items():
        rows = methods["refine"]
        worst = [f"{max(float(r[k]) for r in rows):.2f}" for k in ("mean", "log_sd")]
        trusted = f"{sum(not r['note'] for r in rows)} of {len(rows)}"
        seconds = f"{median(float(r['seconds']) for r in rows):.1f}"
        nuts = numbers(methods["numpyro"][0]) if methods["numpyro"] else ["", "", ""]
        line([name, *worst, trusted, seconds, *nuts])


if __name__ == "__main__":
    (by_seed if "--by-seed" in sys.argv else by_method)(read(sys.argv[1]))
