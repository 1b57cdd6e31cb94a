"""A file of rows that grows by one at a time, so that a long run goes on where it stopped."""

from __future__ import annotations

import csv
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")
_KINDS: dict[str, Any] = {"int": int, "float": float, "str": str}


class GrowingFile(Generic[Row]):
    """
    All rows of a CSV file, old ones included; each new one is written at once.

    :param kind: a dataclass of ints, floats and strings.
    """

    def __init__(self, path: Path, kind: type[Row]) -> None:
        self.path, self._fields = path, fields(kind)  # type: ignore[arg-type]
        self.all: list[Row] = []
        if path.exists():
            with path.open(newline="") as file:
                self.all = [self._read(kind, values) for values in csv.DictReader(file)]

    def add(self, row: Row) -> None:
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, [f.name for f in self._fields], lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(asdict(row))  # type: ignore[call-overload]
        self.all.append(row)

    def _read(self, kind: type[Row], values: dict[str, str]) -> Row:
        return kind(**{f.name: _KINDS[str(f.type)](values[f.name]) for f in self._fields})
