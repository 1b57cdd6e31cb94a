"""
Where the time of a training step goes: each part is the difference of two steps, one with it.

    python -m tests.benchmarks.where --steps 60

From the networks alone to the objective under SVI, eight steps of a VAE (784-400-64, batch 100)
take turns in one process, each with one thing more than the one before. The differences are those
of medians of CPU time: small ones are uncertain by about a hundredth of the step.
"""

import argparse
from collections.abc import Callable
from functools import partial

import pyro
import torch

from tests.benchmarks import by_hand as hand
from tests.benchmarks import suite
from tests.benchmarks.suite import Specialization

OBJECTIVES = (("SGVB", 1), ("IWAE", 10), ("SIS", 5), ("AIS", 5))


def ladder(case: Specialization) -> dict[str, Callable[[], suite.Step]]:
    """What is added, and the step that has it."""
    torch.manual_seed(0)
    x = torch.rand(case.batch, suite.PIXELS).bernoulli().to(case.device)
    least, plain = (partial(f, case, x) for f in (suite.least_step, suite.plain_step))
    chain = case.objective in ("SIS", "AIS")
    return {
        "networks forward": partial(least, backward=False, gradients=False),
        "backward": partial(least, backward=not chain),
        "double backward": least,
        "formulas, noise, Adam": plain,
        "distributions": partial(plain, hand.Distributions),
        "Pyro's handlers": partial(plain, hand.Bare),
        "this package": lambda: suite.module_step(case, x),
        "SVI": lambda: suite.svi_step(case, suite.objective(case), x),
    }


def parts(case: Specialization, count: int, limit: float = 60.0) -> dict[str, float]:
    """Milliseconds that each part adds."""
    pyro.clear_param_store()
    steps = {name: make() for name, make in ladder(case).items()}
    times = suite.medians(steps, count, case.device, limit)
    before = [0.0, *times.values()]
    result = {n: t - b for (n, t), b in zip(times.items(), before[:-1], strict=True)}
    if case.objective in ("SGVB", "IWAE"):
        del result["double backward"]  # the same step again
    return result


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown: a column for each objective, with the share of the whole step."""
    names = list(max(rows.values(), key=len))
    lines = [["", *rows], ["---", *["---:"] * len(rows)]]
    for name in names:
        line = [name]
        for row in rows.values():
            fraction = row.get(name, 0.0) / sum(row.values())
            line.append(f"{row[name]:.1f} ms, {100 * fraction:.0f}%" if name in row else "")
        lines.append(line)
    lines.append(["the whole step", *(f"{sum(row.values()):.1f} ms" for row in rows.values())])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--validation", action="store_true", help="Pyro's checks on, its default")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pyro.enable_validation(args.validation)
    cases = [Specialization(name, size, device=args.device) for name, size in OBJECTIVES]
    heads = [c.objective + (f"-{c.size}" if c.objective != "SGVB" else "") for c in cases]
    print(table({h: parts(c, args.steps) for h, c in zip(heads, cases, strict=True)}))


if __name__ == "__main__":
    main()
