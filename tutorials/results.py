"""CSV files for the results of the experiments.

A script creates ``results = Results(out / "name.csv", seed=0)`` and adds a row for each
measurement. The rows have columns for the seed, the command, the commit, the machine and the CPU
seconds of the process. The file is written after each row, because long runs may be interrupted.

If a run was interrupted, the same command continues it. :func:`same_settings` checks that a folder
has only one experiment. A checkpoint stores the rows together with the training run.
"""

import argparse
import csv
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch


def commit() -> str:
    """Return the commit of this folder, with ``-dirty`` if files have changed."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # no git here
        return "unknown"
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """Return the processor, its cores and threads, the GPU if there is one, and PyTorch."""
    kind = platform.processor() or platform.machine()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    threads = torch.get_num_threads()
    return f"{kind}, {os.cpu_count()} cores, {threads} threads{gpu}, torch {torch.__version__}"


class Results:
    """
    The rows of one experiment.

    :param Path path: the CSV file. Its folder is created.
    :param int seed: the seed of the run. Rows may have other seeds.
    :param argv: the flags for the column ``command``; by default those of this process.
    """

    def __init__(self, path: Path, seed: int = 0, argv: Sequence[str] | None = None) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = sys.argv[1:] if argv is None else argv
        self.stamp = {"seed": seed, "command": shlex.join([Path(sys.argv[0]).name, *flags])}
        # Read the commit at the start, because files may change during a long run.
        self.stamp |= {"commit": commit(), "machine": machine()}

    def stamped(self, **row: Any) -> dict[str, Any]:
        """Return the row with the columns of the run. Values in the row take precedence."""
        return {**row, **self.stamp, "cpu_seconds": round(time.process_time(), 2), **row}

    def add(self, **row: Any) -> None:
        """Add a row, with the columns of the run if it has none, and write the file."""
        self.rows.append(self.stamped(**row))
        write(self.rows, self.path)


def same_settings(args: argparse.Namespace, may_differ: Collection[str]) -> None:
    """Raise an error if the folder ``args.out`` has results of other settings."""
    settings = {k: str(v) for k, v in vars(args).items() if k not in {"out", *may_differ}}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "settings.json"
    past = json.loads(path.read_text()) if path.exists() else settings
    for name in settings:
        if (before := past.get(name)) != settings[name]:
            raise SystemExit(
                f"{args.out} has results with {name} = {before}, but {name} is {settings[name]}: "
                f"pass another --out, or remove that folder"
            )
    own = path.with_suffix(f".{os.getpid()}")  # other processes may read the file meanwhile
    own.write_text(json.dumps(settings))
    own.replace(path)


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write dicts as a CSV file. Missing values are left empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
