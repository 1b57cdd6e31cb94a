"""What an unadjusted chain's step size should follow: which acceptance, or the bound's gradient?

Three posteriors with a guide that stays as it is: probabilistic PCA with its best mean-field guide,
a VAE of 8x8 digits that the ELBO has trained, and a ring that a normal guide covers in part. For
each kernel the gap to log p(x) per datum (nats; lower is better) after the step size has adapted to
a target acceptance, or was learned by gradient ascent on the bound::

    python -m tests.benchmarks.chain_step_size

With ``--defaults`` whole objectives, chains that adapt beside chains that train, and CPU time::

    python -m tests.benchmarks.chain_step_size --defaults
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor, nn

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    LearnedSchedule,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from pyro_mcvae.chains.parameters import AdaptiveStepSize, LearnedStepSize
from tests.models import ProbabilisticPCA

TARGETS = (0.6, 0.7, 0.8, 0.9, 0.95)
MOMENTA = (0.5, 0.7, 0.8, 0.9)
MANY: dict[str, Any] = {"vectorize_particles": True, "max_plate_nesting": 1}


class Posterior(NamedTuple):
    model: Callable[..., Any]
    guide: Callable[..., Any]
    args: tuple[Any, ...]
    log_evidence: float  # per datum
    num_data: int


def pca() -> Posterior:
    exact = ProbabilisticPCA(p=20, d=10, N=50)
    exact.set_guide("exact")
    evidence = float(exact.log_evidence()) / len(exact.x)
    return Posterior(exact.model, exact.guide, (), evidence, len(exact.x))


def digits() -> Posterior:
    from sklearn.datasets import load_digits

    images = (torch.tensor(load_digits().data, dtype=torch.float) / 16).bernoulli()
    encoder = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 20))
    decoder = nn.Sequential(nn.Linear(10, 100), nn.Tanh(), nn.Linear(100, 64))

    def model(x: Tensor) -> None:
        pyro.module("digits.decoder", decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(10), 1.0).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=decoder(z)).to_event(1), obs=x)

    def guide(x: Tensor) -> None:
        pyro.module("digits.encoder", encoder)
        with pyro.plate("data", len(x)):
            loc, log_scale = encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 3e-3}), TraceSGVB_ELBO())
    for _ in range(60):
        for batch in images[torch.randperm(1500)].split(100):
            svi.step(batch)
    x = images[1500:1700]
    with torch.no_grad():
        iwae = TraceIWAE_ELBO(2000, **MANY)
        evidence = float(iwae.bounds(model, guide, x).per_datum.mean())
    return Posterior(model, guide, (x,), evidence, len(x))


def ring() -> Posterior:
    def log_joint(z: Tensor) -> Tensor:
        prior = dist.Normal(0.0, 1.0).log_prob(z).sum(-1)
        return prior + dist.Normal(z.square().sum(-1) + 0.5, 0.4).log_prob(torch.tensor(2.5))

    def model() -> None:
        with pyro.plate("data", 50):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.square().sum(-1) + 0.5, 0.4), obs=torch.tensor(2.5))

    def guide() -> None:
        with pyro.plate("data", 50):
            loc, scale = torch.tensor([1.0, 0.5]), torch.tensor([0.4, 0.7])
            pyro.sample("z", dist.Normal(loc, scale).expand([50, 2]).to_event(1))

    axis = torch.linspace(-4, 4, 801)
    grid = torch.cartesian_prod(axis, axis)
    evidence = log_joint(grid).logsumexp(0) + 2 * torch.log(axis[1] - axis[0])
    return Posterior(model, guide, (), float(evidence), 50)


def kernels() -> Iterator[tuple[str, Any]]:
    sizes = {
        f"acceptance {t}": (lambda t=t: AdaptiveStepSize(target_acceptance=t)) for t in TARGETS
    }
    for rule, size in [*sizes.items(), ("gradient", lambda: LearnedStepSize(0.05))]:
        yield f"ULA, {rule}", ULA(size() if rule != "gradient" else LearnedStepSize(0.01))
        for momentum in MOMENTA:
            yield f"momentum {momentum}, {rule}", UnderdampedLangevin(size(), momentum=momentum)


def objectives(k: int) -> dict[str, Any]:
    """Chains of K transitions as they could be by default."""
    result = {"SIS, ULA": TraceSIS_ELBO(k, ULA(), **MANY)}
    result["SIS, momentum 0.9"] = TraceSIS_ELBO(k, UnderdampedLangevin(), **MANY)
    for momentum in (0.7, 0.9):
        kernel = UnderdampedLangevin.trained(k, momentum)
        result[f"SIS, trained from {momentum}"] = TraceSIS_ELBO(
            kernel=kernel, schedule=LearnedSchedule(k), **MANY
        )
    for name, make in {"MALA": MALA, "HMC 2": partial(HMC, num_leapfrog=2)}.items():
        result[f"AIS, {name}"] = TraceAIS_ELBO(k, make(), **MANY)
        schedule = LearnedSchedule(k)
        result[f"AIS, {name}, schedule"] = TraceAIS_ELBO(kernel=make(), schedule=schedule, **MANY)
    return result


def compare_defaults(
    posteriors: dict[str, Posterior], num_steps: int, warmup: int, evaluate: int
) -> None:
    """Gap per datum, and CPU milliseconds of a step."""
    for name in objectives(num_steps):
        cells = []
        for posterior in posteriors.values():
            elbo = objectives(num_steps)[name]
            begin = time.process_time()
            result = gap(posterior, elbo, warmup, evaluate)
            step = 1e3 * (time.process_time() - begin) / (warmup + evaluate)
            cells.append(f"{result:8.3f} [{step:.0f}]")
        print(f"{name:24}", *cells, flush=True)


def gap(posterior: Posterior, elbo: Any, warmup: int, evaluate: int) -> float:
    pyro.set_rng_seed(0)
    learned = [p for p in elbo.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=0.03) if learned else None
    objective = elbo(posterior.model, posterior.guide)
    for _ in range(warmup):
        if optimizer is None:
            elbo.loss_and_grads(posterior.model, posterior.guide, *posterior.args)
            continue
        optimizer.zero_grad()
        objective(*posterior.args).backward()
        optimizer.step()
    elbo.eval()
    losses = [elbo.loss(posterior.model, posterior.guide, *posterior.args) for _ in range(evaluate)]
    return posterior.log_evidence + sum(losses) / evaluate / posterior.num_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--evaluate", type=int, default=60)
    parser.add_argument("--defaults", action="store_true", help="whole objectives")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    posteriors = {"pPCA": pca(), "digits VAE": digits(), "ring": ring()}
    print(f"K = {args.num_steps}".ljust(30), *(f"{n:>12}" for n in posteriors), flush=True)
    if args.defaults:
        compare_defaults(posteriors, args.num_steps, args.warmup, args.evaluate)
        return
    names = [name for name, _ in kernels()]
    for name in names:
        row = []
        for posterior in posteriors.values():
            kernel = dict(kernels())[name]
            elbo = TraceSIS_ELBO(args.num_steps, kernel, **MANY)
            row.append(gap(posterior, elbo, args.warmup, args.evaluate))
        print(f"{name:30}", *(f"{v:12.3f}" for v in row), flush=True)


if __name__ == "__main__":
    main()
