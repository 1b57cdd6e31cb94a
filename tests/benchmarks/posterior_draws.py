"""
Posterior draws: a trained guide refined, beside Pyro's NUTS, by time and evaluations of gradients.

    python -m tests.benchmarks.posterior_draws --out draws.csv
    python -m tests.benchmarks.posterior_draws --models schools logistic --quick

Means and standard deviations of every latent, against long chains of NumPyro's NUTS (which has to
be installed): the root mean square, over latents, of the error of the mean in posterior standard
deviations, and of the logarithm of the ratio of standard deviations. A thousand exact draws would
be wrong by 0.032 and 0.022 or more (the heavier the tails). *Seconds* are CPU seconds from nothing:
with training, or with NUTS' warm-up. Double precision, one thread. The file grows by a row for each
trial, references are kept beside it, and a run goes on with what is lacking.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pyro
import torch
from pyro.infer import MCMC, NUTS
from torch import Tensor
from tqdm import tqdm

from pyro_mcvae import HMC, refine
from tests.benchmarks.growing import GrowingFile
from tests.benchmarks.posteriors.models import POSTERIORS
from tests.benchmarks.posteriors.numpyro_side import reference
from tests.benchmarks.posteriors.objectives import objective
from tests.benchmarks.posteriors.trials import Settings, begin, continued

MODELS = ["schools", "logistic", "volatility", "items"]
Draws = dict[str, Tensor]


@dataclass(frozen=True)
class Length:
    """How long everything takes."""

    draws: int = 1000
    warmup: int = 300
    reference_draws: int = 4000
    elbo_steps: int = 1500
    steps: int = 400

    @property
    def settings(self) -> Settings:
        """Of the training."""
        return Settings(elbo_steps=self.elbo_steps, steps=self.steps)


QUICK = Length(100, 50, 200, 300, 100)


@dataclass(frozen=True)
class Row:
    """
    :ivar seconds: of CPU time, from nothing to these draws; ``drawing`` without the training.
    :ivar gradients: evaluations of the model with its gradient, for the draws alone.
    """

    model: str
    method: str
    draws: int
    seconds: float
    drawing: float
    gradients: int
    mean_error: float
    deviation_error: float


@dataclass(frozen=True)
class Moments:
    """Of a long run, by site, and how far from the truth its means may be."""

    mean: Draws
    deviation: Draws
    error: float

    @classmethod
    def of(cls, chains: dict[str, numpy.ndarray]) -> Moments:
        """The error is that of batch means."""
        values = {n: torch.from_numpy(v).double() for n, v in chains.items()}
        mean = {n: v.mean((0, 1)) for n, v in values.items()}
        deviation = {n: v.flatten(0, 1).std(0) for n, v in values.items()}
        batches = {n: torch.stack(v.flatten(0, 1).chunk(40)).mean(1) for n, v in values.items()}
        error = {n: b.std(0) / len(b) ** 0.5 / deviation[n] for n, b in batches.items()}
        return cls(mean, deviation, _root_mean_square(error))

    def errors(self, draws: Draws) -> tuple[float, float]:
        """Of means, and of standard deviations."""
        mean, ratio = {}, {}
        for name, exact in self.mean.items():
            value = draws[name].reshape(-1, *exact.shape)
            mean[name] = (value.mean(0) - exact) / self.deviation[name]
            ratio[name] = (value.std(0) / self.deviation[name]).log()
        return _root_mean_square(mean), _root_mean_square(ratio)


def _root_mean_square(values: Draws) -> float:
    return float(torch.cat([v.reshape(-1) for v in values.values()]).square().mean().sqrt())


def long_run(name: str, length: Length, seed: int, folder: Path) -> Moments:
    """Kept in a file."""
    path = folder / f"reference_{name}_{length.reference_draws}_{seed}.npz"
    if not path.exists():
        numpy.savez(path, **reference(name, length.reference_draws, chains=2, seed=seed))
    return Moments.of(dict(numpy.load(path)))


Found = tuple[str, Draws, float, float, int]  # method, draws, seconds, of these drawing, gradients


def by_nuts(name: str, length: Length, seed: int, jit: bool) -> Iterator[Found]:
    """The first tenth of its draws, the first third, and all."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model, marks, calls = POSTERIORS[name].make(), [], 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        model()

    def hook(kernel: Any, params: Any, stage: str, i: int) -> None:
        if "ample" in stage:
            marks.append((time.process_time() - start, calls))

    kernel = NUTS(counted, jit_compile=jit, ignore_jit_warnings=True)
    chain = MCMC(kernel, length.draws, length.warmup, hook_fn=hook, disable_progbar=True)
    start = time.process_time()
    chain.run()
    result = chain.get_samples()
    for count in (length.draws // 10, length.draws // 3, length.draws):
        seconds, gradients = marks[count - 1]
        first = {n: v[:count] for n, v in result.items()}
        method = f"{'jitted NUTS' if jit else 'NUTS'}, {count} draws"
        # A traced step does not call the model.
        yield method, first, seconds, seconds, 0 if jit else gradients


def by_refine(name: str, length: Length, seed: int) -> Iterator[Found]:
    """Draws of the guide, by weight, of the chains that were trained, and of HMC from the guide."""
    posterior, settings = POSTERIORS[name], length.settings
    kind, nothing = posterior.guides[0], lambda: None
    start = time.process_time()
    model, guide, _ = begin(posterior, kind, settings, seed, nothing)
    elbo = time.process_time() - start
    settings = replace(settings, draws=2)

    def drawn(method: str, guide: Any, before: float, cost: int, **options: Any) -> Found:
        pyro.set_rng_seed(seed)
        start = time.process_time()
        options = {"joint": True, "progress": False, **options}
        draws = refine(model, guide, num_samples=length.draws, **options)
        seconds = time.process_time() - start
        gradients = cost * length.draws * options["num_particles"]
        return method, dict(draws), before + seconds, seconds, gradients

    def trained(by: str) -> tuple[Any, Any, float]:
        loss, start = objective(by), time.process_time()
        copied, _ = continued(model, guide, loss, settings, seed, nothing)
        return loss, copied, elbo + time.process_time() - start

    yield drawn("the guide, ELBO", guide, elbo, 0, num_particles=1)
    _, weighed, before = trained("IWAE-100")
    yield drawn("IWAE-100, of 100 by weight", weighed, before, 0, num_particles=100)
    loss, moved, before = trained("SIS-10x8")
    chains = {"kernel": loss.kernel, "schedule": loss.schedule().detach()}
    yield drawn("SIS-10, of 8 chains", moved, before, 11, num_particles=8, **chains)
    yield drawn("SIS-10, of 64 chains", moved, before, 11, num_particles=64, **chains)
    kernel = HMC(num_leapfrog=5, jitter=0.3)
    for count in (20, 100, 400):
        hmc = {"kernel": kernel, "schedule": 10, "num_transitions": count, "num_particles": 1}
        cost = 5 * (10 + count) + 2
        yield drawn(f"ELBO, {count} transitions of HMC", guide, elbo, cost, **hmc)


class Rows(GrowingFile[Row]):
    """All rows of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Row)

    def has(self, model: str, start: str) -> bool:
        return any(r.model == model and r.method.startswith(start) for r in self.all)

    def table(self) -> str:
        lines = ["| posterior | draws | seconds | drawing | gradients | of means | of deviations |"]
        lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
        lines += [
            f"| {r.model} | {r.method} | {r.seconds:.1f} | {r.drawing:.1f} | "
            f"{r.gradients or ''} | {r.mean_error:.3f} | {r.deviation_error:.3f} |"
            for r in self.all
        ]
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("draws.csv"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few steps and draws")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pyro.enable_validation(False)
    length = QUICK if args.quick else Length()
    rows = Rows(args.out)
    with tqdm(total=3 * len(args.models)) as bar:
        for name in args.models:
            bar.set_description(name)
            moments = long_run(name, length, args.seed, args.out.parent)
            tqdm.write(f"{name}: means of the long run are good to {moments.error:.4f}")
            ways: dict[str, Callable[[], Iterator[Found]]] = {
                "the guide": partial(by_refine, name, length, args.seed),
                "jitted NUTS": partial(by_nuts, name, length, args.seed, True),
                "NUTS": partial(by_nuts, name, length, args.seed, False),
            }
            for start, way in ways.items():
                for method, draws, *costs in () if rows.has(name, start) else way():
                    rows.add(Row(name, method, length.draws, *costs, *moments.errors(draws)))
                bar.update()
    print(rows.table())


if __name__ == "__main__":
    main()
