"""
Tables of results: ``docs/results/NAME.csv`` has the numbers, and the pages repeat them.

The first lines of a file have the command, the commit and the versions that produced it. A page has
the table below the line ``<!-- table: NAME -->``::

    python docs/result_tables.py                                   # write the tables of all pages
    COMMAND | python docs/result_tables.py NAME --command COMMAND  # read a printed Markdown table

A test compares the pages with the files. The sentences of the other pages that quote a result are
in ``tests/docs/test_numbers.py``, with the cells that they quote.
"""

import argparse
import csv
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
FOLDER = HERE / "results"
_TABLE = re.compile(r"^<!-- table: ([\w-]+) -->\n((?:\|.*\n)*)", re.M)


class Table(NamedTuple):
    """The numbers of one table, as text, and where they come from."""

    command: str
    commit: str
    versions: str
    header: list[str]
    rows: list[list[str]]

    def __call__(self, row: str, column: str) -> str:
        """Return the cell of a column and of the row that begins with the text ``row``."""
        found = [r for r in self.rows if row in (r[0], ", ".join(r[:2]), ", ".join(r[:3]))]
        if len(found) != 1 or self.header.count(column) != 1:
            raise KeyError(f"{len(found)} rows {row!r}, {self.header.count(column)} of {column!r}")
        return found[0][self.header.index(column)].strip("*")


def read(name: str) -> Table:
    """Return a table."""
    lines = (FOLDER / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    stamps = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    header, *rows = csv.reader(line for line in lines if not line.startswith("# "))
    return Table(stamps["command"], stamps["commit"], stamps["versions"], header, rows)


def write(name: str, table: Table) -> None:
    """Write a table."""
    with (FOLDER / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        for key in ("command", "commit", "versions"):
            file.write(f"# {key}: {getattr(table, key)}\n")
        csv.writer(file, lineterminator="\n").writerows([table.header, *table.rows])


def rendered(table: Table) -> str:
    """Return a table as Markdown, with numbers on the right."""
    columns = list(zip(*table.rows, strict=True))
    right = [all(re.match(r"[-*\d]|$", c) for c in cells) and any(cells) for cells in columns]
    marks = ["---:" if at_right and i else "---" for i, at_right in enumerate(right)]
    lines = [table.header, marks, *table.rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def with_tables(text: str) -> str:
    """Return a page with its tables as in the files."""
    return _TABLE.sub(lambda m: f"<!-- table: {m[1]} -->\n{rendered(read(m[1]))}", text)


def parse(text: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a Markdown table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return cells[0], cells[2:]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("name", nargs="?", help="the table to read from standard input")
    parser.add_argument("--command", help="the command that printed it")
    args = parser.parse_args(argv)
    if args.name:
        if not args.command:
            parser.error("a table needs --command, so that others can print it again")
        git = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(git, cwd=HERE, capture_output=True, text=True).stdout.strip()
        versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "pyro-ppl"))
        header, rows = parse(sys.stdin.read())
        write(args.name, Table(args.command, commit or "unknown", versions, header, rows))
    for path in HERE.rglob("*.md"):
        if "_build" not in path.parts:
            text = path.read_text(encoding="utf-8")
            if (result := with_tables(text)) != text:
                path.write_text(result, encoding="utf-8")


if __name__ == "__main__":
    main()
