"""
``refine(model)`` on posteriordb: errors against reference draws, CPU seconds, and the verdict.

    git clone https://github.com/stan-dev/posteriordb
    python -m tests.benchmarks.posteriordb --data-root posteriordb --out posteriors.csv

The largest error, over parameters, of the mean (in posterior standard deviations) and of the
logarithm of the standard deviation. Both are exact within 0.01 to 0.05, the error of the reference
draws and more of heavy tails. A thousand exact draws would be wrong by about 0.03 and 0.02 in each
parameter. CPU seconds are from the call to the draws. Double precision, one thread.
"""

from __future__ import annotations

import argparse
import csv
import math
import signal
import time
from pathlib import Path

import pyro
import torch

from pyro_mcvae import refine
from tests.benchmarks.posteriordb.models import MODELS, ROOT, reference

LIMIT = 0.15
COLUMNS = ("posterior", "seed", "dims", "mean", "log_sd", "seconds", "evaluations")
COLUMNS += ("k_hat", "r_hat", "ess", "trusted", "why")


def errors(name: str, got: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the largest error of a mean and of a log standard deviation."""
    wanted = reference(name).items()
    means = [float((got[k].mean() - mean).abs()) / sd for k, (mean, sd) in wanted]
    sds = [abs(math.log(float(got[k].std()) / sd)) for k, (_, sd) in wanted]
    return max(means), max(sds)


def run(name: str, seed: int) -> dict[str, object]:
    """Draw from one posterior."""
    posterior, start = MODELS[name](), time.process_time()
    pyro.clear_param_store()
    draws = refine(posterior.model, seed=seed)
    seconds, verdict = time.process_time() - start, draws.verdict
    mean, log_sd = errors(name, posterior.quantities(draws))
    numbers = (mean, log_sd, seconds, verdict.num_evaluations, verdict.pareto_k, verdict.r_hat)
    dims = sum(v[0].numel() for v in draws.values())
    end = (verdict.effective_sample_size, verdict.trusted, "; ".join(verdict.reasons))
    return dict(zip(COLUMNS, (name, seed, dims, *numbers, *end), strict=True))


def expire(*_: object) -> None:
    raise TimeoutError("took longer than --limit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--limit", type=int, default=300, help="seconds of each posterior")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ROOT.append(options.data_root)
    signal.signal(signal.SIGALRM, expire)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    rows = []
    for seed, name in ((s, n) for s in options.seeds for n in options.names or MODELS):
        signal.alarm(options.limit)
        try:
            row = run(name, seed)
        except Exception as error:
            row = dict.fromkeys(COLUMNS, math.nan) | {"posterior": name, "seed": seed}
            row |= {"trusted": False, "why": f"{type(error).__name__}: {str(error)[:200]}"}
        signal.alarm(0)
        row = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        rows.append(row)
        print(*row.values(), flush=True)
        if options.out:
            new = not options.out.exists()
            with options.out.open("a", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                if new:
                    writer.writeheader()
                writer.writerow(row)
    right = [row for row in rows if row["mean"] < LIMIT and row["log_sd"] < LIMIT]
    wrong = [
        f"{r['posterior']} (seed {r['seed']})" for r in rows if r["trusted"] and r not in right
    ]
    seconds = sorted(row["seconds"] for row in rows)[len(rows) // 2]
    print(f"{len(right)} of {len(rows)} within {LIMIT}, median {seconds:.1f} s")
    print(f"trusted and wrong: {', '.join(wrong) or 'none'}")


if __name__ == "__main__":
    main()
