"""Noise of the annealed bounds' gradients on probabilistic PCA, whose exact evidence is known.

The gap per datum and the total variance of the guide's gradient, summed over 50 data, with two
particles, at the optimal mean-field guide. First each kernel at the step size of its tightest
bound; then estimators of AIS's gradient at equal acceptance: ours, and those that Thin et al.
(2021) write down, the whole weight as signal, with its last transition, with and without the
leave-one-out baseline (eq. 26)::

    python -m tests.benchmarks.chain_gradient_variance
"""

import argparse
import math

import torch

from pyro_mcvae import MALA, ULA, LinearSchedule, UnderdampedLangevin
from pyro_mcvae.chains.annealing import accept_score, anneal, evaluator
from pyro_mcvae.ops.weights import leave_one_out_mean
from tests.models import ProbabilisticPCA

GUIDE = ("W", "c", "log_s")
PARTICLES = 2


def log_normal(value, scale=1.0):
    log_scale = scale.log() if isinstance(scale, torch.Tensor) else math.log(scale)
    return (-0.5 * (value / scale).square() - log_scale - 0.5 * math.log(2 * math.pi)).sum(-1)


class Programs:
    """Model and guide as tensors, with guide parameters of their own for each of R repetitions."""

    def __init__(self, exact, repetitions):
        self.values = exact.params()
        self.x, self.sigma = exact.x, exact.sigma
        start = exact.presets()["exact"]
        self.params = [
            start[n].expand(repetitions, *start[n].shape).clone().requires_grad_() for n in GUIDE
        ]
        weight, offset, log_s = self.params
        self.loc = self.x @ weight.mT + offset[:, None]  # [R, N, d]
        self.scale = log_s.exp()[:, None]

    def log_joint(self, z):
        mean = self.values["theta0"] + z @ self.values["theta1"].T
        return log_normal(z) + log_normal(self.x - mean, self.sigma)

    def noise(self, eps):
        base = log_normal(eps)
        log_q = base - self.scale.log().sum(-1)
        return base, self.log_joint(self.loc + self.scale * eps) - log_q

    def latent(self, z):
        log_q = log_normal(z - self.loc, self.scale)
        return log_q, self.log_joint(z) - log_q

    def run(self, kernel, num_steps, coordinates, last_transition):
        evaluate = evaluator(self.noise if coordinates == "noise" else self.latent)
        eps = torch.randn(PARTICLES, *self.loc.shape)
        start = eps if coordinates == "noise" else self.loc + self.scale * eps
        betas = LinearSchedule(num_steps)().to(eps)
        return anneal(evaluate(start), betas, kernel, evaluate, last_transition=last_transition)


def paper_score(chain, baseline):
    """The whole weight as the signal of every transition, the last one included."""
    weight = chain.log_weight.detach()
    signal = weight - leave_one_out_mean(weight) if baseline else weight
    return sum((signal * info.log_prob).mean(0) for info in chain.infos)


ESTIMATORS = {
    "reward-to-go, last move skipped": accept_score,
    "whole weight, eq. 26": lambda chain: paper_score(chain, True),
    "whole weight, no baseline": lambda chain: paper_score(chain, False),
}


def measure(exact, kernel, num_steps, coordinates, estimator=None, count=1000, chunk=100):
    """Gap per datum and its error, total variance of the gradient, mean acceptance."""
    bounds, grads, acceptance = [], [], []
    log_evidence = exact.log_evidence().detach()
    for _ in range(count // chunk):
        programs = Programs(exact, chunk)
        skip = estimator in (None, accept_score)
        chain = programs.run(kernel, num_steps, coordinates, not skip)
        surrogate = chain.log_weight.mean(0)
        if kernel.adjusted:
            surrogate = surrogate + (estimator or accept_score)(chain)
        result = torch.autograd.grad(surrogate.sum(), programs.params)
        grads.append(torch.cat([g.reshape(chunk, -1) for g in result], 1))
        bounds.append((chain.log_weight.detach().mean(0).sum(-1) - log_evidence) / exact.N)
        acceptance.append(torch.stack([i.acceptance.mean() for i in chain.infos]).mean())
    gap = torch.cat(bounds)
    variance = torch.cat(grads).var(0).sum()
    values = gap.mean(), gap.std() / count**0.5, variance, torch.stack(acceptance).mean()
    return [float(v) for v in values]


# name: (kernel of a step size, coordinates, grid of step sizes, METHODS' gap and variance)
GRID = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6)
LEAPFROG = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
KERNELS = {
    "ULA, latent": (ULA, "latent", tuple(k * 1e-3 for k in (1, 3, 10, 15, 20, 30)), (-0.52, 1680)),
    "ULA, noise": (ULA, "noise", GRID, (-0.47, 1210)),
    "MALA (AIS), noise": (MALA, "noise", GRID, (-0.39, 1480)),
    **{
        f"underdamped {m}, noise": (
            lambda step, m=m: UnderdampedLangevin(step, momentum=m),
            "noise",
            LEAPFROG,
            (-0.42, 950) if m == 0.5 else None,
        )
        for m in (0.0, 0.3, 0.5, 0.7, 0.9)
    },
}


def compare_kernels(exact, count):
    print("| kernel, K = 8 | step | acceptance | gap | variance | METHODS |\n" + "|---" * 6 + "|")
    for name, (make, coordinates, grid, published) in KERNELS.items():
        quick = {s: measure(exact, make(s), 8, coordinates, count=100)[0] for s in grid}
        step = max(grid, key=lambda s: quick[s] if math.isfinite(quick[s]) else -math.inf)
        gap, error, variance, acceptance = measure(exact, make(step), 8, coordinates, count=count)
        theirs = "" if published is None else f"{published[0]} / {published[1]}"
        print(
            f"| {name} | {step:g} | {acceptance:.2f} | {gap:.3f} ± {error:.3f} | {variance:.3g} "
            f"| {theirs} |",
            flush=True,
        )


def compare_estimators(exact, count):
    print("\n| acceptance | eta | " + " | ".join(ESTIMATORS) + " | gap |")
    print("|---" * (len(ESTIMATORS) + 3) + "|")
    for target in (0.95, 0.8, 0.5):
        step = step_size_of(exact, target)
        rows = [measure(exact, MALA(step), 10, "latent", e, count) for e in ESTIMATORS.values()]
        cells = " | ".join(f"{variance:.3g}" for _, _, variance, _ in rows)
        print(f"| {rows[0][3]:.2f} | {step:.3g} | {cells} | {rows[0][0]:.2f} |", flush=True)


def step_size_of(exact, acceptance):
    """By bisection of the logarithm."""
    low, high = math.log(1e-5), 0.0
    for _ in range(12):
        middle = 0.5 * (low + high)
        with torch.no_grad():
            chain = Programs(exact, 10).run(MALA(math.exp(middle)), 10, "latent", True)
        mean = torch.stack([i.acceptance.mean() for i in chain.infos]).mean()
        low, high = (middle, high) if mean > acceptance else (low, middle)
    return math.exp(low)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="gradients per row")
    count = parser.parse_args().count
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    compare_kernels(ProbabilisticPCA(p=20, d=10, N=50), count)
    compare_estimators(ProbabilisticPCA(p=20, d=20, N=50), count)


if __name__ == "__main__":
    main()
