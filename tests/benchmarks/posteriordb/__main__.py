"""
``refine(model)``, NUTS, Pathfinder and ADVI on posteriordb: errors and CPU seconds.

    git clone https://github.com/stan-dev/posteriordb
    python -m tests.benchmarks.posteriordb --data-root posteriordb --out draws.csv
    python -m tests.benchmarks.posteriordb.table draws.csv

The largest error, over parameters, of the mean (in posterior standard deviations) and of the
logarithm of the standard deviation, of 1,000 draws. Both are exact within 0.01 to 0.05, the error
of the reference draws and more of heavy tails. A thousand exact draws would be wrong by about 0.03
and 0.02 in each parameter. CPU seconds are from the data to the draws, with compilation, on one
thread in double precision. All methods of a posterior run after each other. Runs that the file has
are not repeated.

The methods are ``refine``, ``pyro`` (jitted NUTS) and ``advi``; with NumPyro and BlackJAX
(``pip install numpyro blackjax``) also ``numpyro`` (NUTS) and ``pathfinder``.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyro
import torch
from torch import Tensor

from tests.benchmarks.posteriordb.models import MODELS, ROOT, reference

LIMIT = 0.15
METHODS = ("refine", "numpyro", "pathfinder", "advi", "pyro")
COLUMNS = ("posterior", "method", "seed", "mean", "log_sd", "seconds", "note")
Method = Callable[[str, int], tuple[dict[str, Tensor], str]]


def method(name: str) -> Method:
    """Return the function that draws from a posterior."""
    if name in ("numpyro", "pathfinder"):
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        from tests.benchmarks.posteriordb import numpyro_side

        return {"numpyro": numpyro_side.nuts, "pathfinder": numpyro_side.pathfinder}[name]
    from tests.benchmarks.posteriordb import pyro_side

    return {"refine": pyro_side.refined, "pyro": pyro_side.nuts, "advi": pyro_side.advi}[name]


def errors(name: str, draws: dict[str, Tensor]) -> tuple[float, float]:
    """Return the largest error of a mean and of a log standard deviation."""
    got, wanted = MODELS[name]().quantities(draws), reference(name).items()
    means = [float((got[k].mean() - mean).abs()) / sd for k, (mean, sd) in wanted]
    sds = [float((got[k].std() / sd).log().abs()) for k, (_, sd) in wanted]
    return max(means), max(sds)


def run(name: str, draw: Method, seed: int, limit: float) -> tuple[float, float, float, str]:
    """Draw from one posterior."""
    pyro.clear_param_store()
    reference(name)  # starts the interpreter's unpacking before the clock
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        draws, note = draw(name, seed)
    except Exception as error:
        return math.nan, math.nan, time.process_time() - start, failure(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    seconds = time.process_time() - start
    return *errors(name, draws), seconds, note


def failure(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")


def expire(*_: object) -> None:
    raise TimeoutError("took longer than --limit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--limit", type=int, default=300, help="CPU seconds of each run")
    parser.add_argument("--limit-pyro", type=int, default=60, help="those of NUTS in Pyro")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    ROOT.append(options.data_root)
    signal.signal(signal.SIGPROF, expire)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    methods = {m: method(m) for m in options.methods}
    with options.out.open("a+", newline="") as file:
        file.seek(0)
        done = {(r["posterior"], r["method"], int(r["seed"])) for r in csv.DictReader(file)}
        writer = csv.writer(file)
        if not file.tell():
            writer.writerow(COLUMNS)
        for name in options.names or MODELS:
            for m, seed in ((m, s) for m in methods for s in options.seeds):
                if (name, m, seed) in done:
                    continue
                limit = options.limit_pyro if m == "pyro" else options.limit
                *numbers, note = run(name, methods[m], seed, limit)
                row = (name, m, seed, *(f"{x:.4g}" for x in numbers), note)
                writer.writerow(row)
                file.flush()
                print(*row, flush=True)


if __name__ == "__main__":
    main()
