"""
``refine(model)`` on posteriordb: errors against reference draws, CPU seconds, and the verdict.

    git clone https://github.com/stan-dev/posteriordb
    python -m tests.benchmarks.posteriordb --data-root posteriordb --out draws.jsonl

The largest error, over parameters, of the mean (in posterior standard deviations) and of the
logarithm of the standard deviation. Both are exact within 0.01 to 0.05, the error of the reference
draws and more of heavy tails. A thousand exact draws would be wrong by about 0.03 and 0.02 in each
parameter. CPU seconds are from the call to the draws. Double precision, one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pyro
import torch

from pyro_mcvae import refine
from tests.benchmarks.posteriordb.models import MODELS, ROOT, reference

LIMIT = 0.15


def errors(name: str, got: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the largest error of a mean and of a log standard deviation."""
    wanted = reference(name)
    means = [float((got[k].mean() - v.mean()).abs() / v.std()) for k, v in wanted.items()]
    sds = [float((got[k].std() / v.std()).log().abs()) for k, v in wanted.items()]
    return max(means), max(sds)


def run(name: str, seed: int) -> dict[str, object]:
    """Draw from one posterior."""
    posterior, start = MODELS[name](), time.process_time()
    pyro.clear_param_store()
    draws = refine(posterior.model, seed=seed)
    seconds, verdict = time.process_time() - start, draws.verdict
    mean, sd = errors(name, posterior.quantities(draws))
    return {
        "name": name,
        "seed": seed,
        "mean": mean,
        "sd": sd,
        "seconds": seconds,
        "evaluations": verdict.num_evaluations,
        "method": verdict.method,
        "k": verdict.pareto_k,
        "r_hat": verdict.r_hat,
        "ess": verdict.effective_sample_size,
        "trusted": verdict.trusted,
        "reasons": verdict.reasons,
        "modes": verdict.modes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ROOT.append(options.data_root)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    rows = []
    print(
        "| posterior | mean | log sd | trusted | CPU s | evaluations |\n|---|--:|--:|---|--:|--:|"
    )
    for name in options.names or MODELS:
        try:
            row = run(name, options.seed)
        except Exception as error:
            print(f"| {name} | {type(error).__name__}: {str(error)[:100]} |", flush=True)
            continue
        rows.append(row)
        print(
            f"| {name} | {row['mean']:.3f} | {row['sd']:.3f} | {row['trusted']} "
            f"| {row['seconds']:.1f} | {row['evaluations']} | {'; '.join(row['reasons'])}",
            flush=True,
        )
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    right = [row for row in rows if max(row["mean"], row["sd"]) < LIMIT]
    wrong = [row["name"] for row in rows if row["trusted"] and row not in right]
    seconds = sorted(row["seconds"] for row in rows)[len(rows) // 2]
    print(f"{len(right)} of {len(rows)} within {LIMIT}, median {seconds:.1f} s; trusted and wrong:")
    print(", ".join(wrong) or "none")


if __name__ == "__main__":
    main()
