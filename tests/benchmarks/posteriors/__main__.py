"""
Bounds, gaps and times of objectives on posteriors of models as Pyro users write them.

    python -m tests.benchmarks.posteriors --out posteriors.csv --figure posteriors.png
    python -m tests.benchmarks.posteriors --quick
    python -m tests.benchmarks.posteriors --models volatility logistic --objectives IWAE-100 SIS-10

For each model the ELBO trains an AutoGuide; then each objective trains a copy of it. A row has the
bound at the end, its standard error over draws, and the CPU time of a step; the evidence, from
which the gap is counted, is that of annealed chains in white coordinates. The file grows by a row
for each trial, and a run goes on with what the file lacks of this commit. Small models, double
precision, one thread; run it on a machine that does nothing else, or believe the bounds and not the
times.
"""

import argparse
import subprocess
from dataclasses import replace
from pathlib import Path

import pyro
import torch
from pyro.infer.autoguide import AutoNormal
from tqdm import tqdm

from tests.benchmarks.posteriors.models import POSTERIORS
from tests.benchmarks.posteriors.numpyro_side import OTHERS, PROGRAMS, trained_by_numpyro
from tests.benchmarks.posteriors.objectives import DEFAULT, objective
from tests.benchmarks.posteriors.rows import EVIDENCE, Key, Row, Rows, figure, tables
from tests.benchmarks.posteriors.trials import Settings, begin, continued, evaluated

QUICK = Settings(elbo_steps=1500, steps=500, draws=100, evaluation_steps=100, evaluation_chains=100)


def commit() -> str:
    """Of the repository; marked where files have been changed since."""
    ask = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    result = subprocess.run(ask, cwd=folder, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def run(kind: type, key: Key, wanted: list[str], settings: Settings, rows: Rows) -> None:
    """What the file lacks of one model and guide."""
    _, name, _, seed, *_ = key
    wanted = [o for o in wanted if not rows.has(key, o)]
    if not wanted:
        return
    steps = settings.elbo_steps + settings.steps * sum(o != EVIDENCE for o in wanted)
    with tqdm(total=steps, desc=f"{name}, {kind.__name__}") as bar:
        model, guide, _ = begin(POSTERIORS[name], kind, settings, seed, lambda: bar.update())
        for each in wanted:
            bar.set_postfix_str(each)
            if each == EVIDENCE:
                rows.add(
                    Row(*key, each, *evaluated(POSTERIORS[name], model, guide, settings, seed))
                )
            else:
                loss = objective(each)
                _, result = continued(model, guide, loss, settings, seed, lambda: bar.update())
                rows.add(Row.of(key, each, result))


def run_numpyro(key: Key, settings: Settings, rows: Rows) -> None:
    """What the file lacks of NumPyro's objectives on one model."""
    _, name, _, seed, *_ = key
    for each in OTHERS if name in PROGRAMS else []:
        if not rows.has(key, each):
            rows.add(Row.of(key, each, trained_by_numpyro(name, each, settings, seed)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("posteriors.csv"))
    parser.add_argument("--figure", type=Path, help="gap over the time of a step, to this file")
    parser.add_argument("--models", nargs="+", choices=POSTERIORS, default=list(POSTERIORS))
    parser.add_argument(
        "--objectives",
        nargs="+",
        metavar="NAME",
        default=[*DEFAULT, EVIDENCE],
        help=", ".join([*DEFAULT, EVIDENCE]),
    )
    parser.add_argument("--numpyro", action="store_true", help="also its objectives, on six models")
    parser.add_argument("--one-guide", action="store_true", help="AutoNormal alone")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--elbo-steps", type=int, help="0: objectives begin at init_scale=0.1")
    parser.add_argument("--steps", type=int, help="of each objective, after the ELBO's")
    parser.add_argument("--draws", type=int, help="of each bound")
    parser.add_argument("--evaluation-steps", type=int, help="annealing steps for the evidence")
    parser.add_argument("--most-seconds", type=float, help="of CPU for one trial: else too dear")
    parser.add_argument("--commit", default=commit(), help="whose rows are completed and printed")
    parser.add_argument("--backend", default="eager", help="of CompiledELBO; none: plain steps")
    parser.add_argument("--quick", action="store_true", help="few steps, and a short evaluation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pyro.enable_validation(False)
    for name in set(args.objectives) - {EVIDENCE}:
        objective(name)  # a name that is none is refused at once
    settings = QUICK if args.quick else Settings()
    settings = replace(settings, backend=None if args.backend == "none" else args.backend)
    names = ("elbo_steps", "steps", "draws", "evaluation_steps", "most_seconds")
    given = {n: getattr(args, n) for n in names}
    settings = replace(settings, **{k: v for k, v in given.items() if v is not None})
    rows = Rows(args.out)
    length = settings.elbo_steps, settings.steps
    pairs = [(kind, n) for n in args.models for kind in POSTERIORS[n].guides]
    for kind, name in sorted(pairs, key=lambda pair: pair[0] is not AutoNormal):
        if kind is AutoNormal or not args.one_guide:
            for seed in args.seeds:
                key = (args.commit, name, kind.__name__, seed, *length)
                run(kind, key, args.objectives, settings, rows)
    for name in args.models if args.numpyro else []:
        for seed in args.seeds:
            run_numpyro((args.commit, name, AutoNormal.__name__, seed, *length), settings, rows)
    result = list(rows.posteriors(args.commit, *length))
    print(f"{tables(result)}\n\nin {args.out}")
    if args.figure is not None:
        figure(result, args.figure)
        print(f"figure in {args.figure}")


if __name__ == "__main__":
    main()
