"""
The benchmark: step time and peak memory of every objective, in JSON and a table.

    python -m tests.benchmarks --out benchmark.json
    python -m tests.benchmarks --device cuda --steps 200
    python -m tests.benchmarks --quick

Each objective is trained by SVI, and as a module, ``elbo(model, guide)``, by an optimizer of
PyTorch. Beside it run the same step written by hand in PyTorch; that step over the programs as Pyro
runs them under one bare handler, the least that a model kept as a Pyro program costs; Pyro's
nearest loss; and the networks alone, as often as the algorithm needs them. Sides take turns in one
process; times are medians (of CPU time on the CPU), memory is the most that a training run holds,
counted. ``--compiled`` adds each objective recorded, replayed and compiled, and two short steps,
one of them beside NumPyro's where that is installed. Run it on a machine that does nothing else.
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import pyro
import torch

from tests.benchmarks import suite


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the step by hand in milliseconds and megabytes, and ratios."""
    pairs = list(dict.fromkeys(pair for row in rows for pair in row["ratios"]))
    times, memory = ([p for p in pairs if p.startswith("memory") is m] for m in (False, True))
    head = ["step", "by hand", *times, "memory by hand", *memory]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        result = {p: f"{ratio:.2f}" for p, ratio in row["ratios"].items()}
        line = [row["name"], f"{row['milliseconds']['by hand']:.1f} ms"]
        line += [result.get(p, "") for p in times]
        line += [f"{row['megabytes']['by hand']:.0f} MB", *(result.get(p, "") for p in memory)]
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
    parser.add_argument("--only", nargs="+", metavar="OBJECTIVE", help="RB, say")
    parser.add_argument("--quick", action="store_true", help="each objective at one size")
    parser.add_argument("--compiled", action="store_true", help="also replay and Inductor")
    parser.add_argument(
        "--limit", type=float, default=60.0, help="seconds after which 8 steps of a case will do"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for case in suite.cases(args.device, args.quick, args.compiled):
        if args.only and case.objective not in args.only:
            continue
        row = suite.run(case, args.steps, args.limit, args.compiled)
        ratios = "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratios"].items())
        print(f"{row['name']}: {row['milliseconds']['SVI']:.2f} ms  {ratios}", flush=True)
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
