"""
The benchmark: step time and peak memory of every objective, in JSON and a table.

    python -m tests.benchmarks --out benchmark.json
    python -m tests.benchmarks --device cuda --steps 200
    python -m tests.benchmarks --quick --memory

Beside each objective run the same step written by hand in PyTorch, Pyro's nearest loss, and the
networks alone as often as the algorithm needs them. Sides take turns in one process; numbers are
medians (of CPU time on the CPU). Run it on a machine that does nothing else.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyro
import torch

from tests.benchmarks import suite


def peak(case: suite.Case, side: str) -> float:
    """Megabytes that three steps add to what was there before, in this process."""
    step = suite.sides(case)[side]
    if case.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        made = step()
        for _ in range(3):
            made()
        return torch.cuda.max_memory_allocated() / 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = step()
    for _ in range(3):
        made()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def peak_apart(index: int, side: str, args: argparse.Namespace) -> float:
    """The same in a process of its own, since a process's peak never falls."""
    flags = ["--device", args.device, "--threads", str(args.threads)]
    flags += ["--quick"] * args.quick + ["--peak", str(index), side]
    command = [sys.executable, "-m", "tests.benchmarks", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    sides = list(rows[0]["milliseconds"])
    others = [s for s in sides if s != "ours"]
    head = ["case", *(f"{s} [ms]" for s in sides), *(f"ours / {s}" for s in others)]
    memory = "megabytes" in rows[0]
    if memory:
        head += [f"{s} [MB]" for s in rows[0]["megabytes"]]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        times, ratios = row["milliseconds"], row["ratios"]
        line = [row["name"], *(f"{times[s]:.2f}" for s in sides)]
        line += [f"{ratios[f'ours / {s}']:.2f}" for s in others]
        if memory:
            line += [f"{m:.0f}" for m in row["megabytes"].values()]
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmark.json"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="each objective at one size")
    parser.add_argument("--memory", action="store_true", help="also the peak memory, much slower")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = list(suite.cases(args.device, args.quick))
    if args.peak:
        print(peak(cases[int(args.peak[0])], args.peak[1]))
        return
    rows = []
    for i, case in enumerate(cases):
        row = suite.run(case, args.steps)
        if args.memory:
            row["megabytes"] = {s: peak_apart(i, s, args) for s in ("ours", "by hand")}
        ratios = "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratios"].items())
        print(f"{row['name']}: {row['milliseconds']['ours']:.2f} ms  {ratios}", flush=True)
        rows.append(row)
    about = {
        "torch": torch.__version__,
        "pyro": pyro.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name() if args.device != "cpu" else platform.machine(),
        "threads": args.threads,
        "steps": args.steps,
    }
    args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    args.out.with_suffix(".md").write_text(table(rows) + "\n")
    print(f"\n{table(rows)}\n\nwritten to {args.out} and {args.out.with_suffix('.md')}")


if __name__ == "__main__":
    main()
