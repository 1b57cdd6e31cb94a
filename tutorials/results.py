"""What every experiment here leaves behind: a CSV whose rows say what ran, where and how long.

A script takes its settings from flags, begins ``results = Results(out / "name.csv", seed=0)``, and
adds a row for everything that it measures. The file is written at once, since long runs may be
interrupted, with columns for the seed, the command, the commit, the machine and the CPU seconds of
the process so far.

A long run that was stopped goes on when its command is given again: :func:`same_settings` sees to
it that a folder holds one experiment, and a checkpoint keeps the rows, as they were stamped, beside
the training run.
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
    """What was run: the commit of this folder, ``-dirty`` if files had changed since."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # no git here
        return "unknown"
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """Where: the processor, its cores and threads, the GPU if there is one, and PyTorch."""
    kind = platform.processor() or platform.machine()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    threads = torch.get_num_threads()
    return f"{kind}, {os.cpu_count()} cores, {threads} threads{gpu}, torch {torch.__version__}"


class Results:
    """
    The rows of one experiment.

    :param Path path: the CSV; its folder is made.
    :param int seed: of the whole run; rows may have seeds of their own.
    :param argv: the flags, for the column ``command``; by default those of this process.
    """

    def __init__(self, path: Path, seed: int = 0, argv: Sequence[str] | None = None) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = sys.argv[1:] if argv is None else argv
        self.stamp = {"seed": seed, "command": shlex.join([Path(sys.argv[0]).name, *flags])}
        # Now: the files may change while a long run is on.
        self.stamp |= {"commit": commit(), "machine": machine()}

    def stamped(self, **row: Any) -> dict[str, Any]:
        """The row with its columns for what ran; what was given comes first, and wins."""
        return {**row, **self.stamp, "cpu_seconds": round(time.process_time(), 2), **row}

    def add(self, **row: Any) -> None:
        """Add a row, stamped now if it was not before, and write the file."""
        self.rows.append(self.stamped(**row))
        write(self.rows, self.path)


def same_settings(args: argparse.Namespace, may_differ: Collection[str]) -> None:
    """Refuse to go on with what other settings have left in the folder ``args.out``."""
    settings = {k: str(v) for k, v in vars(args).items() if k not in {"out", *may_differ}}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "settings.json"
    past = json.loads(path.read_text()) if path.exists() else settings
    for name in settings:
        if (before := past.get(name)) != settings[name]:
            raise SystemExit(
                f"{args.out} holds results with {name} = {before}, and now it is {settings[name]}: "
                f"give another --out, or remove that folder"
            )
    path.write_text(json.dumps(settings))


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write dicts as a CSV; what a row does not have is left empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
