"""
Print the table of the results from the files of both benchmarks.

    python -m tests.benchmarks.posteriordb.table posteriors.csv nuts.csv

For each posterior the largest errors over seeds, the number of seeds whose draws are trusted, and
the median CPU seconds.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

HEADER = [
    "posterior",
    "mean",
    "log sd",
    "trusted",
    "CPU s",
    "NUTS: mean",
    "NUTS: log sd",
    "NUTS: CPU s",
]


def read(path: str) -> dict[str, list[dict[str, str]]]:
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    with Path(path).open(newline="") as file:
        for row in csv.DictReader(file):
            groups[row["posterior"]].append(row)
    return groups


def main() -> None:
    ours, nuts = read(sys.argv[1]), read(sys.argv[2])
    print("|".join(["", *HEADER, ""]) + "\n" + "|---" * len(HEADER) + "|")
    for name, rows in ours.items():
        worst = [f"{max(float(r[k]) for r in rows):.2f}" for k in ("mean", "log_sd")]
        trusted = f"{sum(r['trusted'] == 'True' for r in rows)} of {len(rows)}"
        cells = [name, *worst, trusted]
        cells.append(f"{median(float(r['seconds']) for r in rows):.1f}")
        other = nuts.get(name, [{}])[0]
        digits = {"mean": 2, "log_sd": 2, "seconds": 1}
        cells += [f"{float(other[k]):.{n}f}" if other else "" for k, n in digits.items()]
        print("|".join(["", *cells, ""]))


if __name__ == "__main__":
    main()
